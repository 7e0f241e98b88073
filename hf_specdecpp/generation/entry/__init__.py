"""How a `generate()` call comes to our loop: assistants are attached, and their calls decided upon."""
