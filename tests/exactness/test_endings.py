"""However a text ends, or a row of a batch, and whether plain generation goes on in a row that has ended: texts are
those of plain generation, and so is what it makes of them with the caches that are returned.

    PYTHONPATH=tests python -c "from exactness.test_endings import *; check(5)"    # one case again, by its seed"""

import os
import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from support.devices.pretend_graph import direct_graphs, pretend_graphs
from support.fuzz.arguments import random_ids
from support.targets.models import assistant_of, quiet_later_layers, tiny
from support.targets.watchers import Collector, tokenizer
from torch import Tensor
from torch.nn.functional import pad
from transformers import StoppingCriteria

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.generation.batch_target import BatchTarget
from hf_specdecpp.generation.captured.parts import RoundGraphs
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.models.causal_lm import CausalLM

MANY = int(os.environ.get("SPECDECPP_FUZZ_CASES", "400"))
LETTERS = [tokenizer().decode([token]) for token in range(47)]
FAMILIES = ("llama", "llama", "gpt2", "mistral")
KINDS = ("independent", "independent", "independent", "early_exit", "conditioned")
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.9, "max_tokens": 5},
    "lookup": {"rule": "fixed", "num_tokens": 3, "lookup": True},
}
OF_ONE: dict[str, dict[str, Any]] = {
    **RULES,
    "tree": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
    "static": {"tree": [3, 2, 1]},
}


class Ends(StoppingCriteria):
    """Ends texts after tokens with a remainder, once they have a length."""

    reads_prefix_only = True

    def __init__(self, divisor: int, remainder: int, length: int) -> None:
        self.divisor, self.remainder, self.length = divisor, remainder, length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids[:, -1] % self.divisor == self.remainder) & (input_ids.shape[1] >= self.length)


class EndsAt(StoppingCriteria):
    """Ends texts of one length alone: not those that are longer."""

    reads_prefix_only = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] == self.length)


@cache
def pair(family: str, kind: str, rule: str, captured: bool) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = quiet_later_layers(tiny(family))
    return target, assistant_of(kind, target, **OF_ONE[rule], graphs="auto" if captured else "off")


def endings(r: random.Random, length: int) -> dict[str, Any]:
    """Some of the ways to end texts whose prompts have a length."""
    found: dict[str, Any] = {"max_new_tokens": r.choice((1, 7, 20, 20, 30)), "pad_token_id": r.choice((0, 0, 3))}
    criteria: list[StoppingCriteria] = []
    for each in r.sample(("eos", "strings", "remainder", "remainder", "length", "time"), r.choice((0, 1, 1, 2))):
        if each == "eos":
            found["eos_token_id"] = r.sample(range(1, 47), r.choice((1, 3, 8)))
        elif each == "strings":
            strings = ["".join(r.choices(LETTERS, k=size)) for size in (1, 1, 2, 2)]
            found |= {"stop_strings": strings, "tokenizer": tokenizer()}
        elif each == "time":
            found["max_time"] = r.choice((0.0, 1000.0))
        elif each == "length":
            criteria.append(EndsAt(length + r.choice((1, 2, 5, 9))))
        else:
            divisor = r.choice((3, 6, 12, 24))
            criteria.append(Ends(divisor, r.randrange(divisor), length + r.choice((0, 4, 8))))
    return found | ({"stopping_criteria": criteria} if criteria else {})


def case(seed: int) -> tuple[str, str, str, bool, dict[str, Any]]:
    """Family, kind of draft, rule, whether rounds are captured, and the arguments of `generate()`."""
    r = random.Random(seed)
    rows = r.choice((1, 1, 2, 3))
    prompts = [random_ids(seed + row, r.choice((1, 2, 4, 9))) for row in range(rows)]
    longest = max(each.shape[1] for each in prompts)
    arguments: dict[str, Any] = {
        "input_ids": torch.cat([pad(each, (longest - each.shape[1], 0)) for each in prompts]),
        "attention_mask": torch.cat([pad(torch.ones_like(each), (longest - each.shape[1], 0)) for each in prompts]),
        "do_sample": False,
        "return_dict_in_generate": r.random() < 0.5,
        **endings(r, longest),
    }
    if r.random() < 0.4:
        arguments["repetition_penalty"] = 1.3
    if r.random() < 0.15:
        arguments["no_repeat_ngram_size"] = 2
    rule = r.choice(tuple(OF_ONE if rows == 1 else RULES))
    return r.choice(FAMILIES), r.choice(KINDS), rule, r.random() < 0.8, arguments


def results(target: CausalLM, arguments: dict[str, Any], assistant: SpecDecPPAssistant | None) -> list[Any]:
    """The texts, what a streamer got, and what plain generation goes on to with what is returned."""
    given, seen = dict(arguments), Collector()
    if len(given["input_ids"]) == 1:
        given["streamer"] = seen
    out: Any = target.generate(**given, assistant_model=assistant)
    if not arguments["return_dict_in_generate"]:
        return [out.tolist(), sum(seen.puts, []), seen.ends]
    texts = out.sequences
    further = texts.shape[1] - arguments["input_ids"].shape[1]
    held = out.past_key_values.get_seq_length()
    more = target.generate(
        texts, attention_mask=pad(arguments["attention_mask"], (0, further), value=1), max_new_tokens=3,
        do_sample=False, pad_token_id=0, past_key_values=out.past_key_values,
    )  # fmt: skip
    return [texts.tolist(), sum(seen.puts, []), seen.ends, held, more.tolist()]


def check(seed: int, replays: bool = False) -> tuple[int, bool]:
    """Compare both. Returns how many candidates were accepted, and whether rounds were captured whole. `replays`: of
    what was recorded at the capture."""
    family, kind, rule, captured, arguments = case(seed)
    target, assistant = pair(family, kind, rule, captured)
    plain = results(target, arguments, None)
    graphs = nullcontext() if not captured else pretend_graphs() if replays else direct_graphs()
    with graphs:
        ours = results(target, arguments, assistant)
    assert ours == plain, case(seed)
    return assistant.stats.accepted, str(assistant.stats.decided.get("rounds")).startswith("captured")


@pytest.mark.takes(8)
def test_random_endings() -> None:
    found = [check(seed) for seed in range(24)]
    assert sum(accepted for accepted, _ in found) > 40
    assert sum(whole for _, whole in found) > 6


@pytest.mark.slow
def test_many_random_endings() -> None:
    assert sum(accepted for accepted, _ in (check(seed) for seed in range(1000, 1000 + MANY))) > MANY


@pytest.mark.slow
def test_random_endings_of_replays() -> None:
    for seed in range(2000, 2000 + MANY // 8):
        check(seed, replays=True)


def cuts_rows_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut where a criterion ends them, whether or not tokens follow."""
    monkeypatch.setattr(OutputText, "goes_on", property(lambda _: False, lambda *_: None), raising=False)


def ends_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not padded are cut at the end of the first alone."""
    lengths = BatchTarget._lengths

    def shortest(side: BatchTarget) -> list[int]:
        if not side.texts[0].goes_on:
            return lengths(side)
        return [int(min(text.end_length for text in side.texts))] * len(side.texts)

    monkeypatch.setattr(BatchTarget, "_lengths", shortest)


def holds_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a captured round has read stays in the cache."""

    def keep(target: RoundGraphs, rounds: Any) -> None:
        target.passes.context.num_tokens += len(rounds[0].result.emitted)

    monkeypatch.setattr(RoundGraphs, "commit", keep)


def check_captured(rows: int) -> None:
    for seed in range(100):
        _, _, rule, captured, arguments = case(seed)
        if captured and rule != "lookup" and len(arguments["input_ids"]) == rows:
            check(seed)


@pytest.mark.daily("ends_with_the_first", "holds_what_was_cut")
@pytest.mark.takes(3)
@pytest.mark.parametrize("mutant", [cuts_rows_that_go_on, ends_with_the_first, holds_what_was_cut],
                         ids=lambda each: each.__name__)  # fmt: skip
def test_mutants_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check_captured(rows=1 if mutant is holds_what_was_cut else 2)
