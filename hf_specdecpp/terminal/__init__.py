"""`specdecpp demo` and `specdecpp chat`: answers shown as they come, who chose each token, and pictures of that."""
