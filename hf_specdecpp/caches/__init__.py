"""Key-value caches and masks: what rounds leave in them, take out of them and hide in them."""
