"""What is compiled before the first text: passes of the target, steps of a draft."""
