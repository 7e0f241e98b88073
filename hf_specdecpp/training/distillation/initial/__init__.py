"""What the weights of drafts are before training: made of the target, by least squares on its own states."""
