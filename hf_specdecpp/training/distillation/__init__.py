"""Stage `distill` of `specdecpp train`: trains the draft on the target's answers."""
