"""`specdecpp chat`: a conversation in the terminal, with an assistant."""
