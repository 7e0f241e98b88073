"""Functions of transformers' models: early exits, adapters, hidden states, loading, kernels on a CPU."""
