"""Rules and trees compared on recorded texts."""
