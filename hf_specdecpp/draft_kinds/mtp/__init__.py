"""Multi-token prediction: the layers of a target's own checkpoint that draft for it (arXiv 2412.19437, section 2.2)."""
