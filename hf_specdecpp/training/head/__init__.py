"""The acceptance head is fitted."""
