"""The two doors to drafting: our own loop on an attached target, and transformers' loop on any."""
