"""Candidates from earlier text: an index of tokens, the tokens after a repeated context, and their acceptance."""
