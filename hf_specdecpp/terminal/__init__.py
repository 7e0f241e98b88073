"""`specdecpp demo` and `specdecpp chat`: streamed answers, accepted candidates in colour, and pictures."""
