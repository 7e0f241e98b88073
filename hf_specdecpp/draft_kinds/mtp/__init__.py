"""Multi-token prediction (arXiv 2412.19437, section 2.2): drafts with extra layers of the target's own checkpoint."""
