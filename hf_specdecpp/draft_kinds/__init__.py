"""The kinds of draft: one subclass of `draft_kind.DraftKind` each, in a folder if the kind needs several files."""
