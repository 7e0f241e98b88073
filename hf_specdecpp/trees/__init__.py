"""Token trees: growth, shapes, attention and verification."""
