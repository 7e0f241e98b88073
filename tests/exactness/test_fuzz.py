"""Random cases of `generate()` with an assistant give what plain `generate()` gives: tokens, side outputs, caches.

A case that fails is printed. To run one again, perhaps with less, or a batch by its seed:

    PYTHONPATH=tests python -c "from support.fuzz.running import *; print(run_case(Case(family='gpt2', tree='static')))"
    PYTHONPATH=tests python -c "from exactness.test_fuzz import *; check(5)"

The slow run draws 4,000 cases of every family that can be built and 300 batches, `SPECDECPP_FUZZ_CASES` another number
and `SPECDECPP_FUZZ_SEED` others: `SPECDECPP_FUZZ_SEED=7 pytest -m slow -s tests/exactness/test_fuzz.py`."""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.fuzz.arguments import PROCESSORS, STOPS, random_ids
from support.fuzz.cases import FAMILIES, Case, draw
from support.fuzz.models import RULES, assistant_for, target_of
from support.fuzz.running import Result, run_case
from support.targets.watchers import tokenizer
from support.targets.zoo import families
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_specdecpp.caches import cached_context as text
from hf_specdecpp.generation import single_target
from hf_specdecpp.models import foreign
from hf_specdecpp.models.cpu import weight_copies
from hf_specdecpp.sampling.processors import Processing

PARTS, CASES_OF_A_PART = 4, 50
SLOW_CASES = int(os.environ.get("SPECDECPP_FUZZ_CASES", "4000"))
SLOW_BATCHES = int(os.environ.get("SPECDECPP_FUZZ_CASES", "300"))
SEED = int(os.environ.get("SPECDECPP_FUZZ_SEED", "0"))

# Cases that are wrong, by what is wrong: in older versions of transformers, or here, until it is repaired.
HELD_OUT: dict[str, Callable[[Case], bool]] = {
    # Plain generation reads the text again on top of what the cache holds, with a mask that is too short.
    "chunked prefill of a later turn": lambda case: (
        Version(transformers.__version__) < Version("5.23") and case.chunk > 0 and case.turns > 1
    )
}


def cases(part: int, count: int, of: tuple[str, ...] = FAMILIES) -> list[Case]:
    randomness = random.Random(f"{SEED}-{part}")
    drawn = (draw(randomness, of) for _ in range(count))
    return [case for case in drawn if not any(is_held_out(case) for is_held_out in HELD_OUT.values())]


def run(drawn: list[Case]) -> list[tuple[Case, Result]]:
    """Run all; fails if some are wrong, and names each."""
    results = [(case, run_case(case)) for case in drawn]
    wrong = [f"run_case({case})\n{result.detail}" for case, result in results if result.kind == "wrong"]
    assert not wrong, "\n\n".join(wrong)
    return results


# Cases that were wrong once, and that few random cases are like.
EARLIER = [
    Case(family="hy_v4", new_tokens=5, records=("hidden_states",)),  # states [1, length, streams, size]
    Case(family="gemma3n_text", new_tokens=5, records=("hidden_states",)),  # [streams, 1, length, size]
    Case(family="moshi", new_tokens=30),  # beyond its window
    Case(family="dory", attention="eager", new_tokens=5, records=("attentions",)),  # attentions of layers in a loop
    Case(family="dory", attention="eager", new_tokens=5, length=25, records=("attentions",)),  # beyond their windows
    Case(family="gpt_neo", new_tokens=30, draft="exit some"),  # its attention has a `layer_id`
    # A processor has a tree's candidates, which the draft does not know.
    Case(draft="fewer ids", tree="static", processors=("neighbours",), new_tokens=5, length=1),
]


@pytest.mark.parametrize("case", [case for case in EARLIER if case.family in families()], ids=lambda case: case.family)
def test_earlier_mistakes(case: Case) -> None:
    run([case])


def share(results: list[tuple[Case, Result]], kind: str) -> float:
    return sum(result.kind == kind for _, result in results) / len(results)


@pytest.mark.daily("0", takes=7)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(part: int) -> None:
    results = run(cases(part, CASES_OF_A_PART))
    assert share(results, "equal") >= 0.7, Counter(result.kind for _, result in results)
    assert share(results, "tie") <= 0.05
    assert sum(result.accepted for _, result in results) >= CASES_OF_A_PART / 2


@pytest.mark.slow
def test_many_random_cases() -> None:
    buildable = tuple(name for name in families() if _can_be_built(name))
    results = run(cases(-1, SLOW_CASES // 2)) + run(cases(-2, SLOW_CASES // 2, buildable))
    print(Counter(f"{result.kind}: {result.detail}" for _, result in results).most_common(60))  # noqa: T201 - run with -s, the findings are the result
    assert share(results, "equal") >= 0.6
    assert share(results, "refused") <= 0.3
    assert share(results, "raised") <= 0.1
    assert share(results, "tie") <= 0.02
    assert share(results, "NaN") <= 0.05


def _can_be_built(family: str) -> bool:
    """Whether generic sizes make a model of it with which plain `generate()` works."""
    try:
        target_of(family, "sdpa", "float64").generate(torch.tensor([[5, 6]]), max_new_tokens=2, pad_token_id=0)
    except Exception:  # noqa: BLE001 - whatever a family's config or model raises
        return False
    return True


OF_BATCHES = ("llama", "gpt2", "opt", "mistral", "gemma3_text")
DRAFTS = ("close", "close", "other", "exit", "conditioned", "eagle3")
OF_ROWS = (
    "repetition_penalty", "no_repeat_ngram", "bad_words", "sequence_bias", "min_new_tokens", "suppress",
)  # fmt: skip
LETTERS = [tokenizer().decode([token]) for token in range(47)]


def batch(seed: int) -> tuple[Case, dict[str, Any]]:
    """A case, of which family, draft and rule count, and the arguments of `generate()`: rows padded on the left."""
    r = random.Random(seed)
    case = Case(seed=seed, family=r.choice(OF_BATCHES), draft=r.choice(DRAFTS), rule=r.choice(tuple(RULES)))
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
def test_earlier_mistakes_in_batches(seed: int) -> None:
    assert check(seed) > 5


@pytest.mark.takes(2)
def test_random_batches() -> None:
    assert sum(check(seed) for seed in range(6)) > 50


@pytest.mark.slow
def test_many_random_batches() -> None:
    assert sum(check(seed) for seed in range(SLOW_BATCHES)) > 10 * SLOW_BATCHES


def positions_by_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's positions counted from the mask instead of continued from the last."""
    extend = single_target.extended

    def counted(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        extended = extend(model_kwargs, count)
        if (mask := extended.get("attention_mask")) is not None and "position_ids" in extended:
            extended["position_ids"] = mask.cumsum(-1) - 1
        return extended

    monkeypatch.setattr(single_target, "extended", counted)


def tree_at_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's root at the position that equals its row in the cache."""
    real: Any = single_target.TargetContext.tree_inputs

    def at_its_row(text: single_target.TargetContext, *arguments: Any, **how: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = real(text, *arguments, **how)
        inputs["position_ids"] = inputs["position_ids"] + text.rows - inputs["position_ids"][..., :1]
        return inputs

    monkeypatch.setattr(single_target.TargetContext, "tree_inputs", at_its_row)


def rolled_back_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = Cache.crop
    _replace_crop(monkeypatch, lambda cache, count: real(cache, min(count + 1, 0)))


def not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_crop(monkeypatch, lambda cache, count: None)


def _replace_crop(monkeypatch: pytest.MonkeyPatch, crop: Callable[[Any, int], None]) -> None:
    monkeypatch.setattr(foreign, "KNOWN", {*foreign.KNOWN, __name__.partition(".")[0]})  # else no candidates
    monkeypatch.setattr(Cache, "crop", crop)


def path_kept_in_drawing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a tree kept, not those of the accepted path."""
    real = text.keep_path
    monkeypatch.setattr(text, "keep_path", lambda cache, count, path, _: real(cache, count, list(range(len(path)))))


def processors_after_the_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate's logits processed as if they followed the text without the candidates before."""
    real = Processing.after_each

    def after_each(self: Processing, ids: torch.Tensor, paths: list[list[int]], scores: torch.Tensor) -> torch.Tensor:
        return real(self, ids, [[] for _ in paths], scores)

    monkeypatch.setattr(Processing, "after_each", after_each)


def stale_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of weights are not compared with these."""
    monkeypatch.setattr(weight_copies, "fingerprint", lambda weight: torch.zeros(1))


FOLLOWING = {"no_repeat_ngram", "bad_words", "sequence_bias"}  # processors of transformers that follow the last tokens
# Each mutant, and the cases in which it can show; the others would only take time.
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[Case], bool]] = {
    positions_by_the_mask: lambda case: case.positions != "none" and case.tree == "none",
    tree_at_its_row: lambda case: case.tree != "none",
    rolled_back_one_short: lambda case: case.tree == "none",
    not_rolled_back: lambda case: case.tree == "none",
    path_kept_in_drawing_order: lambda case: case.tree != "none",
    processors_after_the_text_only: lambda case: case.tree == "none" and bool(FOLLOWING & set(case.processors)),
    stale_copies: lambda case: case.weights not in ("as they are", "copies"),
}


@pytest.mark.takes(5)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By cases that `test_random_cases` runs."""
    drawn = [case for part in range(PARTS) for case in cases(part, CASES_OF_A_PART) if MUTANTS[mutant](case)]
    mutant(monkeypatch)
    assert any(run_case(case).kind == "wrong" for case in drawn)
