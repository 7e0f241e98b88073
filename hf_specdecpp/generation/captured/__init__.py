"""The part of a text that is captured: the target's passes, and whole rounds."""
