"""`specdecpp bench`: measures whether speculation speeds up generation on this machine, and with which settings."""
