"""Matrix multiplications of large linear layers on a CPU: copies of weights, times, and the choice for each layer."""
