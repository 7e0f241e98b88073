"""Looked-up candidates in captured rounds: uploaded, read and verified by the graphs of whole rounds."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.whole_rounds import KINDS, batch, made, together
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.watchers import heard
from torch import Tensor

from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.cuda_graphs import captured_rounds
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundShape
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError
from hf_specdecpp.generation.captured.entering import BETWEEN
from hf_specdecpp.generation.captured.parts import GraphDrafts
from hf_specdecpp.lookup.token_index import TextLookup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import round_shapes

pytestmark = pytest.mark.usefixtures("pretended")
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.7},
    "throughput": {"rule": "throughput"},
    "tree": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
}


def repeating(target: CausalLM) -> Tensor:
    """A prompt that begins once more."""
    ids = prompt(12) % target.config.get_text_config().vocab_size
    return torch.cat((ids, ids[:, :9]), dim=1)


def written(target: CausalLM, assistant: Any, ids: Tensor | None = None, **how: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, **how}
    return target.generate(repeating(target) if ids is None else ids, assistant_model=assistant, **options)


@pytest.mark.daily("eagle3-fixed", "independent-tree", "gemma 4-threshold", takes=6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_beside_every_kind_of_draft(kind: str, rule: str, tmp_path: Path, pretended: Counter[str]) -> None:
    if rule == "tree" and kind in ("mtp 3", "pard"):
        pytest.skip("the draft proposes chains")
    target, assistant = made(kind, tmp_path, lookup=True, **RULES[rule])
    plain = written(target, None)
    for turn in range(2):
        before = pretended["captured"]
        assert torch.equal(written(target, assistant), plain)
        stats = assistant.stats
        assert (stats.decided["rounds"], stats.uncaptured) == ("captured", None)
        assert stats.accepted > 0
        assert stats.accepted_lookups > 0 or rule == "tree"  # a tree of a good draft may accept all
        assert turn == 0 or rule == "throughput" or pretended["captured"] - before < 4  # for lookups of other lengths


PROCESSORS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "captured"),
    "a penalty": ({"repetition_penalty": 1.3}, "captured"),
    "between": ({"bad_words_ids": [[3], [5, 7]]}, BETWEEN),
}


@pytest.mark.daily("none-fixed", "between-throughput", takes=5)
@pytest.mark.parametrize("rule", ["fixed", "threshold", "throughput"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_without_a_draft(name: str, rule: str) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assist(target, speculation=SpeculationConfig(lookup=True, **RULES[rule]))
    how, made_as = PROCESSORS[name]
    assert torch.equal(written(target, assistant, **how), written(target, None, **how))
    assert assistant.stats.decided["rounds"] == made_as
    assert assistant.stats.accepted_lookups > 30
    assert assistant.stats.draft_passes == 0


def test_a_seed_gives_plain_generations_text_without_a_draft() -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assist(target)
    assert torch.equal(written(target, assistant, do_sample=True), written(target, None, do_sample=True))
    assert "as plain generate() draws them" in assistant.stats.decided["rounds"]


@pytest.mark.daily("independent-throughput", takes=6)
@pytest.mark.parametrize("rule", ["fixed", "threshold", "throughput"])
@pytest.mark.parametrize("kind", ["none", "independent", "eagle3", "dflash windows"])
def test_rows_of_a_batch(kind: str, rule: str, tmp_path: Path) -> None:
    if kind == "none":
        target = quiet_later_layers(tiny("llama"))
        assistant = assist(target, speculation=SpeculationConfig(lookup=True, **RULES[rule]))
    else:
        target, assistant = made(kind, tmp_path, lookup=True, **RULES[rule])
    ids, mask = batch(3, vocab=target.config.vocab_size)
    ids, mask = (torch.cat((each, each[:, 2:]), dim=1) for each in (ids, mask))
    expected = together(target, None, ids, mask, max_new_tokens=60)
    assert torch.equal(together(target, assistant, ids, mask, max_new_tokens=60), expected)
    assert assistant.stats.decided["rounds"] == "captured"
    assert sum(row.accepted_lookups > 0 for row in assistant.stats.rows) > 1


def test_nothing_is_looked_up_behind_the_last_token() -> None:
    """Texts end at `max_length` and at the last position, whatever repeats itself."""
    target = quiet_later_layers(tiny("llama", max_position_embeddings=64))
    assistant = assist(target)
    ids = torch.tensor([[5, 6, 7, 8] * 5])
    for length in (1, 2, 17, 44):
        text = written(target, assistant, ids, max_new_tokens=length)
        assert torch.equal(text, written(target, None, ids, max_new_tokens=length))


@pytest.mark.daily("eagle3")
@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_reads_looked_up_tokens_before_its_window_is_full(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lookups that cost nothing the draft drafts only to read."""
    monkeypatch.setattr(round_shapes.RoundSeconds, "of", lambda _, shape: 50.0 if not shape.given else 0.1)
    target, assistant = made(kind, tmp_path, rule="throughput", lookup=True, max_tokens=5)
    shapes: list[RoundShape] = []
    with monkeypatch.context() as patch:
        heard(patch, captured_rounds.CapturedRounds, "launch", lambda _, shape, *rest: shapes.append(shape))
        assert torch.equal(written(target, assistant, max_new_tokens=200), written(target, None, max_new_tokens=200))
    assert any(shape.given for shape in shapes)
    assert any(shape.levels for shape in shapes)


# Targets of the other kinds repeat themselves too little to fill a window.
@pytest.mark.daily("eagle3")
@pytest.mark.parametrize("kind", [each for each in KINDS if not each.startswith(("dflash", "dspark"))])
def test_a_draft_that_reads_too_late_is_noticed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: all rounds look up, and the window overflows."""
    monkeypatch.setattr(round_shapes.RoundSeconds, "of", lambda _, shape: 50.0 if not shape.given else 0.1)
    target, assistant = made(kind, tmp_path, rule="throughput", lookup=True, max_tokens=5)

    def never_reading(drafts: GraphDrafts, *given: Any) -> RoundShape:
        drafts.rounds.draft.pending = 0
        return choose(drafts, *given)

    choose = GraphDrafts._shape
    monkeypatch.setattr(GraphDrafts, "_shape", never_reading)
    with pytest.raises(RuntimeError, match="out of bounds"):
        written(target, assistant, max_new_tokens=200)


def test_their_q_is_one() -> None:
    """Of the round's candidates alone, in tensors that drafted rounds have filled."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=4, lookup=True)
    drafts: list[CapturedDraft] = []
    with pytest.MonkeyPatch.context() as patch:
        heard(patch, CapturedDraft, "propose", lambda draft, *_: drafts.append(draft))
        written(target, assistant, do_sample=True)
    draft = drafts[-1]
    assert draft.q is not None
    draft.q.fill_(0.5)
    draft.give({0: [7, 9]})
    draft.take_given(3)
    assert draft.count.tolist() == [2]
    assert draft.candidates[0, :3].tolist() == [7, 9, 0]
    assert torch.equal(draft.q[0, :3], torch.nn.functional.one_hot(torch.tensor([7, 9, 0]), draft.q.shape[-1]).float())
    assert (draft.q[0, 3:] == 0.5).all()


def test_other_candidates_than_were_found_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only less is accepted."""
    target = quiet_later_layers(tiny("llama"))
    assistant, give = assist(target), CapturedDraft.give
    plain = written(target, assistant)
    assert assistant.stats.accepted_lookups > 40

    def give_others(draft: CapturedDraft, chains: Any) -> None:
        give(draft, {place: [(token + 1) % 48 for token in tokens] for place, tokens in chains.items()})

    monkeypatch.setattr(CapturedDraft, "give", give_others)
    assert torch.equal(written(target, assistant), plain)
    assert assistant.stats.accepted_lookups < 5


ERRORS = {
    "a round cannot be captured (nothing)": CannotCaptureError("nothing", is_passing=True),
    "memory ended (CUDA out of memory)": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
}


@pytest.mark.parametrize("reason", ERRORS)
def test_a_failure_in_mid_text(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text goes on step by step, with lookups that know all of it, unless memory ended."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=4, lookup=True)
    propose, rounds = captured_rounds.CapturedRounds.launch, list[Any]()

    def failing(self: Any, *given: Any) -> None:
        rounds.append(given)
        if len(rounds) == 6:
            raise ERRORS[reason]
        propose(self, *given)

    monkeypatch.setattr(captured_rounds.CapturedRounds, "launch", failing)
    looked_up: list[int] = []
    heard(monkeypatch, TextLookup, "read_prompt", lambda _, tokens: looked_up.append(len(tokens)))
    assert torch.equal(written(target, assistant), written(target, None))
    assert assistant.stats.uncaptured == reason
    assert len(rounds) == 6
    assert looked_up[0] == 22
    assert len(looked_up) == 1 if reason.startswith("memory") else looked_up[1] > 22 + 5
