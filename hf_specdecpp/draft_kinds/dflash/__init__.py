"""DFlash block drafts (arXiv 2602.06036): the model, its settings and checkpoints, and its drafting sessions."""
