"""The kinds of draft (`draft_kind.DraftKind`): a class each, in a folder where it has modules of its own."""
