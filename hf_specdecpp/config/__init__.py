"""What a user sets and what a repository says."""
