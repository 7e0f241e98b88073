"""DSpark drafts: blocks of DFlash with a bias by the token drawn before, and a confidence head."""
