"""DFlash block drafts (arXiv 2602.06036): the layers, their checkpoints, and a block's side of a generation."""
