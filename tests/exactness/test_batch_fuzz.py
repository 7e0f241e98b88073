"""Random batches with an assistant give what plain `generate()` gives.

The slow run draws 300 batches, `SPECDECPP_FUZZ_CASES` another number. To run one again, by its seed:

    PYTHONPATH=tests python -c "from exactness.test_batch_fuzz import *; check(5)"
"""

import os
import random
from typing import Any

import pytest
import torch
from support.fuzz.arguments import PROCESSORS, STOPS, random_ids
from support.fuzz.cases import Case
from support.fuzz.models import RULES, assistant_for, target_of
from support.watchers import tokenizer
from torch import Tensor
from torch.nn.functional import pad

SLOW_BATCHES = int(os.environ.get("SPECDECPP_FUZZ_CASES", "300"))
FAMILIES = ("llama", "gpt2", "opt", "mistral", "gemma3_text")
DRAFTS = ("close", "close", "other", "exit", "conditioned", "eagle3")
OF_ROWS = (
    "repetition_penalty", "no_repeat_ngram", "bad_words", "sequence_bias", "min_new_tokens", "suppress",
)  # fmt: skip
LETTERS = [tokenizer().decode([token]) for token in range(47)]


def batch(seed: int) -> tuple[Case, dict[str, Any]]:
    """A case, of which family, draft and rule count, and the arguments of `generate()`: rows padded on the left."""
    r = random.Random(seed)
    case = Case(seed=seed, family=r.choice(FAMILIES), draft=r.choice(DRAFTS), rule=r.choice(tuple(RULES)))
    rows = [random_ids(seed + place, r.choice((1, 2, 4, 9, 14))) for place in range(r.choice((2, 3, 5)))]
    longest = max(row.shape[1] for row in rows)
    found: dict[str, Any] = {
        "input_ids": torch.cat([pad(row, (longest - row.shape[1], 0)) for row in rows]),
        "attention_mask": torch.cat([pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]),
        "max_new_tokens": r.choice((5, 12, 30)),
        "pad_token_id": 0,
        "do_sample": False,
    }
    for name in r.sample(OF_ROWS, r.choice((0, 1, 2))):
        found |= PROCESSORS.get(name, {})
    if (stop := r.choice(("none", "eos", "stop strings", "stop strings"))) == "eos":
        found |= STOPS["eos"]
    elif stop == "stop strings":
        strings = ["".join(r.choices(LETTERS, k=length)) for length in (1, 1, 2, 2)]
        found |= {"stop_strings": strings, "tokenizer": tokenizer()}
    return case, found


def check(seed: int) -> int:
    """Compare both texts. Returns how many candidates were accepted."""
    case, arguments = batch(seed)
    target = target_of(case.family, case.attention, case.dtype)
    assistant = assistant_for(case, target)
    try:
        plain: Tensor = target.generate(**arguments)
        assert torch.equal(target.generate(**arguments, assistant_model=assistant), plain), case
        return assistant.stats.accepted
    finally:
        assistant.detach()


# Rows whose candidates a stop string has cut.
@pytest.mark.parametrize("seed", [161, 345, 596])
def test_earlier_mistakes(seed: int) -> None:
    assert check(seed) > 5


@pytest.mark.takes(2)
def test_random_batches() -> None:
    assert sum(check(seed) for seed in range(6)) > 50


@pytest.mark.slow
def test_many_random_batches() -> None:
    assert sum(check(seed) for seed in range(SLOW_BATCHES)) > 10 * SLOW_BATCHES
