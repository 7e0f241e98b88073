"""`specdecpp bench`: does speculation pay on this machine, and with which setting?"""
