"""Matrix products of large linear layers on a CPU: copies of weights, what products take, which a layer uses."""
