"""The draft learns to say what the target says."""
