"""How likely is the target to accept a candidate?"""
