"""Logits processors and stopping criteria that write to the token ids they are called with: plain `generate()` goes on
from what they have written, and the target reads the last token as a criterion has left it."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.targets.families import informed_draft, model_of
from support.targets.models import assistant_of, configured, prompt, tiny
from support.targets.watchers import Collector, Replaces
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp.assistant import SpecDecPPAssistant


class Writes(LogitsProcessor):
    """Lowers the scores of the tokens that it is shown, and writes over the last one."""

    reads_prefix_only = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.scatter_add(1, input_ids, torch.full_like(input_ids, -1, dtype=scores.dtype))
        self.write(input_ids)
        return scores

    def write(self, input_ids: Tensor) -> None:
        if input_ids.shape[1] % 2:
            input_ids[:, -1] = 5


class Clamps(Writes):
    def write(self, input_ids: Tensor) -> None:
        input_ids.clamp_(max=30)


class WritesEarlier(Replaces):
    """Writes over tokens that the target has read already."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        input_ids[:, -4:-1] = 3
        return input_ids[:, -1] < 0


CASES: dict[str, tuple[list[type[Any]], list[type[Any]], dict[str, Any]]] = {
    "processor": ([Writes], [], {}),
    "clamp": ([Clamps], [], {}),
    "criterion": ([], [Replaces], {}),
    "earlier tokens": ([], [WritesEarlier], {}),
    "both": ([Writes], [Replaces], {}),
    "beside a known processor": ([], [Replaces], {"repetition_penalty": 1.3}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chains": {"rule": "fixed", "num_tokens": 4, "tree": False},
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 8},
    "static": {"tree": [2, 2, 1]},
    "lookups": {"rule": "fixed", "num_tokens": 2, "lookup": True},
    "captured trees": {"tree": "dyspec", "tree_budget": 15, "tree_threshold": 0.0},
}
NAMES = pytest.mark.parametrize("name", CASES)


def generated(target: Any, name: str, assistant: Any = None, ids: Tensor | None = None, declared: bool = False) -> Any:
    """Sequences, streamed tokens and scores. `declared`: with `reads_prefix_only`, as batches need it."""
    processors, criteria, options = CASES[name]
    given = [[each() for each in kinds] for kinds in (processors, criteria)]
    for each in (*given[0], *given[1]):
        each.reads_prefix_only = declared
    ids = prompt(9) if ids is None else ids.clone()  # plain `generate()` writes to the prompt, too
    streamer = Collector() if len(ids) == 1 else None
    output = target.generate(
        ids, assistant_model=assistant, logits_processor=given[0], stopping_criteria=given[1], streamer=streamer,
        do_sample=False, max_new_tokens=24, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    streamed = [token for put in streamer.puts for token in put] if streamer is not None else []
    return output.sequences.tolist(), streamed, torch.stack(output.scores)


def assert_as_plain(target: Any, name: str, assistant: SpecDecPPAssistant, **how: Any) -> None:
    sequences, streamed, scores = generated(target, name, **{**how, "declared": False})
    ours = generated(target, name, assistant, **how)
    assert ours[:2] == (sequences, streamed)
    torch.testing.assert_close(ours[2], scores)
    assert assistant.stats.drafted > 0


@pytest.mark.daily(
    "processor-chains", "clamp-dyspec", "criterion-dyspec-exact", "earlier tokens-static", "both-lookups",
    "beside a known processor-captured trees", "criterion-chains", "earlier tokens-chains",
)  # fmt: skip
@pytest.mark.parametrize("settings", SETTINGS)
@NAMES
def test_as_plain(name: str, settings: str) -> None:
    target = tiny("llama")
    assistant = configured(SpecDecPPAssistant.from_early_exit(target, 2), **SETTINGS[settings])
    assert_as_plain(target, name, assistant)
    assert assistant.stats.accepted > 0
    assert generated(target, name)[0] != target.generate(prompt(9), do_sample=False, max_new_tokens=24).tolist()


@pytest.mark.daily("independent-chains", "conditioned-dyspec", "eagle3-chains", "pard-chains")
@pytest.mark.parametrize("settings", ["chains", "dyspec"])
@pytest.mark.parametrize("kind", ["independent", "conditioned", "eagle3", "pard"])
def test_every_kind_of_draft(kind: str, settings: str) -> None:
    target = tiny("llama")
    for name in ("both", "criterion"):
        assert_as_plain(target, name, configured(assistant_of(kind, target), **SETTINGS[settings]))


@NAMES
def test_batches(name: str) -> None:
    target, ids = tiny("llama"), torch.cat((prompt(9), prompt(9, seed=4)))
    assistant = configured(SpecDecPPAssistant.from_early_exit(target, 2), **SETTINGS["chains"])
    assert_as_plain(target, name, assistant, ids=ids, declared=True)


@pytest.mark.daily("criterion", "both", "earlier tokens")
@NAMES
def test_states_that_are_computed_again(name: str) -> None:
    """A recurrent target reads accepted tokens again after a rejection: as it has read them before."""
    target = model_of("granite4")
    draft = informed_draft(torch.tensor(generated(target, name)[0]))
    assistant = configured(SpecDecPPAssistant.from_draft(draft, target), **SETTINGS["chains"])
    assert_as_plain(target, name, assistant)
    assistant.detach()


@pytest.mark.daily(
    "processor-early_exit-chains", "criterion-early_exit-lookups", "earlier tokens-early_exit-captured trees",
    "both-conditioned-chains", "beside a known processor-early_exit-chains",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "settings"), [
    ("early_exit", "chains"), ("early_exit", "lookups"), ("early_exit", "captured trees"), ("conditioned", "chains"),
])  # fmt: skip
@NAMES
def test_captured_rounds(name: str, kind: str, settings: str, pretended: Counter[str]) -> None:
    target = tiny("llama")
    assistant = configured(assistant_of(kind, target), **SETTINGS[settings])
    plain = generated(target, name)[0]
    processors, criteria, options = CASES[name]
    for _ in range(2):
        before = pretended["replayed"]
        ours = target.generate(
            prompt(9), assistant_model=assistant, logits_processor=[each() for each in processors],
            stopping_criteria=[each() for each in criteria], do_sample=False, max_new_tokens=24, **options,
        )  # fmt: skip
        assert ours.tolist() == plain
        assert pretended["replayed"] > before


def test_captured_rounds_of_batches(pretended: Counter[str]) -> None:
    target, ids = tiny("llama"), torch.cat((prompt(9), prompt(9, seed=4)))
    assistant = configured(SpecDecPPAssistant.from_early_exit(target, 2), **SETTINGS["chains"])
    criterion = Replaces()
    criterion.reads_prefix_only = True
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    plain = target.generate(ids.clone(), stopping_criteria=[criterion], **given)
    assert torch.equal(target.generate(ids, assistant_model=assistant, stopping_criteria=[criterion], **given), plain)
    assert pretended["replayed"] > 0
