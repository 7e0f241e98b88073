"""Settings: of a user, of a repository, and costs of a round."""
