"""`python -m hf_specdecpp` and `accelerate launch -m hf_specdecpp` are the `specdecpp` command."""

from hf_specdecpp.cli import app

app()
