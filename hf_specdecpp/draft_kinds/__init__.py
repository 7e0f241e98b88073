"""The kinds of draft (`draft_kind.DraftKind`): one class each, in a folder if the kind has modules of its own."""
