"""The entry of `generate()` calls: attaching assistants, and building the decoding of a call."""
