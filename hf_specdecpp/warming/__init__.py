"""What is captured before the first text."""
