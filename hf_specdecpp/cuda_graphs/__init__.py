"""CUDA graphs of target passes, draft steps and whole rounds, with caches of fixed size."""
