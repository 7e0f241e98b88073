"""DFlash drafts (arXiv 2602.06036), and DSpark drafts: the same with a Markov head, and maybe a confidence head."""
