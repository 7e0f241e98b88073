"""Token trees: growth, shapes, drawing; and verification, of chains, too."""
