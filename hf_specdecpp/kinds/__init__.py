"""What can draft: a file for each kind, with all that others ask of it (`kind.Kind`)."""
