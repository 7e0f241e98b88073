"""DFlash blocks, Gemma 4 assistants and multi-token layers under grammars, stop strings and interrupts: as others.

And what none of them changes about a target, or can do without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gemma4_files, mtp_files
from support.dflash_files import VARIANTS, target_for
from support.models import prompt
from support.snapshots import hash_of, hooks_of
from support.watchers import Collector, tokenizer
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

VOCAB = 12  # of all three
TEXT = 1 + prompt(9) % (VOCAB - 1)
SETTINGS = {
    "chain": SpeculationConfig(rule="fixed", num_tokens=4),
    "tree": SpeculationConfig(tree="dyspec", tree_budget=8),
}


Made = tuple[CausalLM, Callable[..., SpecDecPPAssistant]]  # a target, and what attaches an assistant to it


def dflash(folder: Path) -> Made:
    VARIANTS["plain"].save(folder)
    return target_for(), partial(SpecDecPPAssistant.from_pretrained, folder)


def gemma4(folder: Path) -> Made:
    draft = gemma4_files.VARIANTS["plain"].theirs()
    return gemma4_files.target_for(), partial(SpecDecPPAssistant.from_draft, draft)


def mtp(folder: Path, num_layers: int = 1) -> Made:
    dense = {"first_k_dense_replace": mtp_files.DEPTH}
    return mtp_files.Files("glm4_moe", num_layers, seed=7, overrides=dense).load(folder), SpecDecPPAssistant.from_mtp


def two_layers(folder: Path) -> Made:
    return mtp(folder, 2)


@dataclass
class Pair:
    target: CausalLM
    assistant: SpecDecPPAssistant

    def generate(self, **arguments: Any) -> Tensor:
        output: Tensor = self.target.generate(TEXT, **{"do_sample": False, "max_new_tokens": 24, **arguments})
        return output

    def check_equal(self, **arguments: Any) -> Tensor:
        plain = self.generate(**arguments)
        assert torch.equal(self.generate(assistant_model=self.assistant, **arguments), plain)
        assert self.assistant.stats.drafted > 0
        return plain


MAKES = (dflash, gemma4, mtp, two_layers)
WHICH = [(make, name) for make in MAKES for name in SETTINGS if (make, name) != (two_layers, "tree")]


@pytest.fixture(params=WHICH, ids=lambda which: f"{which[0].__name__}-{which[1]}")
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    make, name = request.param
    target, attach = make(tmp_path)
    assistant = attach(target=target)
    assistant.speculation = SETTINGS[name]
    yield Pair(target, assistant)
    assistant.detach()


def after(allowed: Callable[[int], list[int]]) -> Callable[[int, Tensor], list[int]]:
    """A grammar: which tokens may follow the last one."""
    return lambda _, ids: allowed(int(ids[-1]))


def test_a_grammar_that_depends_on_the_path(pair: Pair) -> None:
    """Every other token is even; of these two are allowed, so a mask of another place would change the text."""
    grammar = after(lambda last: [1, 3] if last % 2 == 0 else [0, 2])
    text = pair.check_equal(prefix_allowed_tokens_fn=grammar)[0, TEXT.shape[1] :].tolist()
    assert all(first % 2 != second % 2 for first, second in zip(text, text[1:], strict=False))
    assert pair.assistant.stats.accepted > 0


@pytest.mark.every(3)
@pytest.mark.parametrize("at", [3, 6])
def test_stop_strings(pair: Pair, at: int) -> None:
    text = pair.generate()[0, TEXT.shape[1] :].tolist()
    stop = tokenizer().decode(text[at : at + 2])
    stopped = pair.check_equal(stop_strings=[stop], tokenizer=tokenizer(), pad_token_id=0)
    assert stopped.shape[1] < TEXT.shape[1] + 24


def test_an_interrupt_leaves_nothing_behind(pair: Pair) -> None:
    """In the middle of a text, which a streamer sees; then the same assistant says the whole text."""
    pair.check_equal()  # transformers' own hooks stay in a target whose states were asked for
    hooks = hooks_of(pair.target)

    class Interrupting(Collector):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.generate(assistant_model=pair.assistant, streamer=Interrupting())
    assert hooks_of(pair.target) == hooks
    pair.check_equal()


@pytest.mark.parametrize("make", MAKES)
def test_the_target_stays_as_it_is(make: Callable[[Path], Made], tmp_path: Path) -> None:
    target, attach = make(tmp_path)

    def look() -> dict[str, Any]:
        found = {"class": type(target), "weights": hash_of(target), "config": target.config.to_dict()}
        return {**found, "logits": target(TEXT).logits.tolist(), "hooks": hooks_of(target)}

    before = look()
    assistant = attach(target=target)
    target.generate(TEXT, assistant_model=assistant, max_new_tokens=8)
    assistant.detach()
    assert look() == before


def test_without_an_attached_target(pair: Pair) -> None:
    pair.assistant.detach()
    with pytest.raises(ValueError, match="reads hidden states of the target.*Attach"):
        pair.generate(assistant_model=pair.assistant)


def test_a_target_that_was_moved(pair: Pair) -> None:
    pair.target.float()
    with pytest.raises(ValueError, match="was moved to torch.float32"):
        pair.generate(assistant_model=pair.assistant)
