"""The two doors to `generate()`, the decoding loop and its statistics."""
