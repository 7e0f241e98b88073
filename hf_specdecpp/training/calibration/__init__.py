"""The head's estimates are calibrated on recorded chains."""
