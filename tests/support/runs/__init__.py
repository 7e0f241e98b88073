"""Training runs, servers, and rules of other systems."""
