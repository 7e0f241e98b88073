"""Every logits processor that `generate()` offers to decoder-only models, when sampling with an assistant.

The law of the samples is tested in `test_exact_law.py`. Here: each argument is taken, nothing outside the vocabulary
comes out, a seed fixes the run, and where the law is a point (`top_k=1`) the text is that of plain `generate()`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from models import VOCAB_SIZE, Rounds, assistant_for, prompt, tiny
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

from hf_specdecpp.typing import CausalLM

NEW_TOKENS = 30
PROMPT = prompt(10)
STOP = {"eos_token_id": [1, 2, 3, 4, 5], "pad_token_id": 0}  # of 48 tokens, so that they are drawn sooner or later


class NoRepeat(LogitsProcessor):
    """A user's processor that depends on the prefix: never the same token twice in a row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = float("-inf")  # in place, as many users write them
        return scores


def only_neighbours(_: int, input_ids: Tensor) -> list[int]:
    last = int(input_ids[-1])
    return [(last + step) % VOCAB_SIZE for step in range(1, 9)]


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [5, 7], [11, 12, 13]]},
    "sequence_bias": {"sequence_bias": {(4,): 3.0, (8, 9): -5.0}},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(40))},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (10, 1.2), **STOP},
    "min_length": {"min_length": 30, **STOP},
    "min_new_tokens": {"min_new_tokens": 25, **STOP},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "top_p": 0.9},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark by itself": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_neighbours},
    "logits_processor": {"logits_processor": LogitsProcessorList([NoRepeat()])},
    "many": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
}


@lru_cache
def target() -> CausalLM:
    return tiny("llama", num_hidden_layers=2)


def generate(seed: int = 0, **arguments: Any) -> Tensor:
    torch.manual_seed(seed)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0}
    return target().generate(PROMPT, **{**defaults, **arguments})


@pytest.fixture(params=[True, False], ids=["attached", "unattached"])
def assistant(request: pytest.FixtureRequest) -> Any:
    assistant = assistant_for(target(), attached=request.param)
    yield assistant
    assistant.detach()


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling(name: str, assistant: Any) -> None:
    arguments = PROCESSORS[name]
    text = generate(assistant_model=assistant, **arguments)
    assert text.shape[1] > PROMPT.shape[1]
    assert torch.equal(text[:, : PROMPT.shape[1]], PROMPT)
    assert 0 <= int(text.min()) <= int(text.max()) < VOCAB_SIZE
    assert torch.equal(generate(assistant_model=assistant, **arguments), text), "a seed fixes the run"


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_point_law_gives_the_plain_text(name: str, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    arguments = {**PROCESSORS[name], "top_k": 1}
    text = generate(assistant_model=assistant, **arguments)
    assert torch.equal(text, generate(**arguments))
    assert any(accepted > 0 for _, accepted in rounds.outcomes)
    assert any(accepted < drafted for drafted, accepted in rounds.outcomes)


def test_a_tiny_temperature_gives_the_greedy_text(assistant: Any) -> None:
    text = generate(assistant_model=assistant, temperature=1e-4)
    assert torch.equal(text, generate(do_sample=False, top_k=None))


def test_seeds_differ(assistant: Any) -> None:
    texts = {tuple(generate(seed, assistant_model=assistant)[0].tolist()) for seed in range(4)}
    assert len(texts) == 4


def test_constraints_hold(assistant: Any) -> None:
    """What a processor forbids does not occur, also in candidates that the draft proposed by itself."""
    arguments: dict[str, Any] = {
        "prefix_allowed_tokens_fn": only_neighbours,
        "suppress_tokens": [1, 2, 3],
        "no_repeat_ngram_size": 2,
    }
    new = generate(assistant_model=assistant, **arguments)[0, PROMPT.shape[1] - 1 :].tolist()
    steps = [(after - before) % VOCAB_SIZE for before, after in zip(new, new[1:], strict=False)]
    assert set(steps) <= set(range(1, 9))
    assert not set(new[1:]) & {1, 2, 3}
    pairs = list(zip(new[1:], new[2:], strict=False))
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("rule", ["threshold", "confidence", "svip", "adaedl"])
def test_every_rule_samples(rule: str, assistant: Any) -> None:
    assistant.speculation.rule = rule
    text = generate(assistant_model=assistant, temperature=0.7)
    assert torch.equal(text, generate(assistant_model=assistant, temperature=0.7))
    assert torch.equal(generate(assistant_model=assistant, top_k=1), generate(top_k=1))
