"""The draft model, its side of a generation, chains and the rules that stop them."""
