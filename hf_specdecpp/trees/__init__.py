"""Token trees: growth, shapes, pictures; and verification of chains and trees."""
