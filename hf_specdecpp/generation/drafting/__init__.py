"""Who drafts in one generation: chains, trees, and what a text says that is new to them."""
