"""Key-value caches and attention masks: commit, roll back, tokens that a mask hides."""
