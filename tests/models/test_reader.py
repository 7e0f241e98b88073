"""Models whose hidden states, or layers, cannot be taken by themselves are refused with the reason."""

import pytest
from support.zoo import tiny_of

from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.reader import Reader


@pytest.mark.parametrize("family", ["electra", "rembert"])
def test_layers_between_hidden_states_and_head(family: str) -> None:
    with pytest.raises(ValueError, match="reads vectors of [0-9]+ numbers and its hidden states have 32.*in between"):
        Reader(tiny_of(family))


def test_a_target_that_reads_one_token_at_a_time() -> None:
    with pytest.raises(ValueError, match="ProphetNetForCausalLM reads one token at a time"):
        early_exit(tiny_of("prophetnet"), 1)
