"""What we do to transformers' models: early exits, adapters, caches, vocabularies, faster products."""
