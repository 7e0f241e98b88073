"""The kinds of draft: a file or folder for each, with all that others ask of it (`kind.Kind`)."""
