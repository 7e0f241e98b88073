"""Small models, repositories and servers that the tests make."""
