"""Every logits processor that `generate()` offers to decoder-only models, when sampling with an assistant.

The distribution of the samples is tested in `tests/exactness/`. Here: each argument is taken, nothing outside the
vocabulary comes out, a seed fixes the run, and where the distribution is a point (`top_k=1`) the text is that of plain
`generate()`."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE, assistant_for, prompt, tiny
from support.outputs import PROCESSORS, only_neighbours
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM

NEW_TOKENS, PROMPT = 30, prompt(10)


@lru_cache
def target() -> CausalLM:
    return tiny("llama", num_hidden_layers=2)


def generate(seed: int = 0, **arguments: Any) -> Tensor:
    torch.manual_seed(seed)
    return target().generate(PROMPT, **{"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0, **arguments})


@pytest.fixture(params=[True, False], ids=["attached", "unattached"])
def assistant(request: pytest.FixtureRequest) -> Any:
    assistant = assistant_for(target(), attached=request.param)
    yield assistant
    assistant.detach()


@pytest.mark.every(7)
@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling(name: str, assistant: Any) -> None:
    arguments = PROCESSORS[name]
    text = generate(assistant_model=assistant, **arguments)
    assert text.shape[1] > PROMPT.shape[1]
    assert torch.equal(text[:, : PROMPT.shape[1]], PROMPT)
    assert 0 <= int(text.min()) <= int(text.max()) < VOCAB_SIZE
    assert torch.equal(generate(assistant_model=assistant, **arguments), text), "a seed fixes the run"


def test_a_tiny_temperature_gives_the_greedy_text(assistant: Any) -> None:
    assert torch.equal(generate(assistant_model=assistant, temperature=1e-4), generate(do_sample=False, top_k=None))


def test_seeds_differ(assistant: Any) -> None:
    assert len({tuple(generate(seed, assistant_model=assistant)[0].tolist()) for seed in range(4)}) == 4


def test_constraints_hold(assistant: Any) -> None:
    """What a processor forbids does not occur, also in candidates that the draft proposed by itself."""
    arguments: dict[str, Any] = {
        "prefix_allowed_tokens_fn": only_neighbours, "suppress_tokens": [1, 2, 3], "no_repeat_ngram_size": 2,
    }  # fmt: skip
    new = generate(assistant_model=assistant, **arguments)[0, PROMPT.shape[1] - 1 :].tolist()
    steps = [(after - before) % VOCAB_SIZE for before, after in zip(new, new[1:], strict=False)]
    assert set(steps) <= set(range(1, 9))
    assert not set(new[1:]) & {1, 2, 3}
    pairs = list(zip(new[1:], new[2:], strict=False))
    assert len(set(pairs)) == len(pairs)
