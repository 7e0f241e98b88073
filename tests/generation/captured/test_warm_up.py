"""After `assistant.warm_up` nothing is captured any more, and nothing else has changed; on pretended graphs."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from support.devices.capturing import generate
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import assistant_of, quiet_later_layers, tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.generation.captured import warm_up
from hf_specdecpp.models.causal_lm import CausalLM

LONGEST, SHORT = 320, 60  # two rooms; one
COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "one": {"rule": "fixed", "num_tokens": 1},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 9},
    "throughput": {"rule": "throughput", "costs": COSTS, "max_tokens": 9},
    "lookup": {"rule": "fixed", "num_tokens": 2, "lookup": True, "lookup_tokens": 12},
    "dyspec": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    "dyspec throughput": {"tree": "dyspec", "rule": "throughput", "costs": COSTS, "tree_budget": 15, "tree_depth": 4},
    "dyspec of 70": {"tree": "dyspec", "tree_budget": 70, "tree_depth": 4},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 7, "tree_depth": 4},
    "static": {"tree": [3, 2, 1], "lookup": True, "tree_budget": 12},
}
SAMPLING: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 1.3}]
KINDS = ("independent", "early_exit", "conditioned", "eagle3")


def texts(target: CausalLM, assistant: SpecDecPPAssistant) -> None:
    """Short and long, greedy and sampled, up to the last token that there is room for."""
    for length, further in ((3, 20), (12, 30), (240, 30), (LONGEST - 20, 20)):
        for how in SAMPLING:
            generate(target, assistant, length, max_new_tokens=further, **how)


def made(kind: str, name: str, **further: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = quiet_later_layers(tiny("llama"))
    return target, assistant_of(kind, target, **{**SETTINGS[name], **further})


@pytest.mark.daily("fixed")
@pytest.mark.takes(5)
@pytest.mark.parametrize("name", ["fixed", "dyspec of 70"])
def test_nothing_is_captured_afterwards_for_texts_of_known_length(name: str) -> None:
    """Their caches have room for all expected tokens from the beginning."""
    target, assistant = made("independent", name)
    with pretend_graphs() as counts:
        assistant.warm_up(LONGEST)
        captured = counts["captured"]
        for length, further in ((3, 20), (150, LONGEST - 150), (LONGEST - 20, 20)):
            generate(target, assistant, length, max_new_tokens=further)
            assert assistant.stats.uncaptured is None
    assert counts["captured"] == captured


@pytest.mark.daily("dyspec-eagle3", takes=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_captured_afterwards(name: str, kind: str, pretended: Counter[str]) -> None:
    target, assistant = made(kind, name)
    for how in SAMPLING:  # rounds that are captured whole have drawing in them
        assert assistant.warm_up(LONGEST, **how) > 0.0
    captured = pretended["captured"]
    assert captured >= 6
    texts(target, assistant)
    assert pretended["captured"] == captured
    assert assistant.stats.accepted > 0
    assert assistant.stats.uncaptured is None


@pytest.mark.daily("_make_whole_rounds-fixed", "_read_target-dyspec")
@pytest.mark.parametrize(
    ("name", "settings"), [("_make_rounds", "fixed"), ("_read_target", "dyspec"), ("_make_whole_rounds", "fixed")]
)
def test_what_is_left_out_is_captured_later(
    name: str, settings: str, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail, by all rounds, passes of the target and whole rounds."""
    target, assistant = made("independent", settings)
    with monkeypatch.context() as patch:
        patch.setattr(warm_up.WarmUpDecoding, name, lambda *_: None)
        patch.setattr(warm_up, "ROUNDS", 0)
        assistant.warm_up(SHORT)
    captured = pretended["captured"]
    generate(target, assistant)
    assert pretended["captured"] > captured


@pytest.mark.usefixtures("pretended")
def test_nothing_is_learned() -> None:
    """What a text finds and leaves is the same with and without; torch's generators stay as they are."""
    target, assistant = made("conditioned", "threshold", lookup="history")
    generate(target, assistant, do_sample=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    stats, learned = copy.deepcopy(assistant.stats), assistant.memory.calibrations()
    keys = list(assistant.memory.learned[target])
    answers, speculation = len(assistant.memory.answers.seen), assistant.speculation
    assistant.warm_up(SHORT, do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert (assistant.stats, assistant.memory.calibrations()) == (stats, learned)
    assert (list(assistant.memory.learned[target]), len(assistant.memory.answers.seen)) == (keys, answers)
    assert assistant.speculation is speculation


def test_what_cannot_be_warmed_up_is_said() -> None:
    target, assistant = made("early_exit", "fixed")
    with pytest.raises(ValueError, match="Nothing can be captured here.*there are no CUDA graphs on cpu"):
        assistant.warm_up(LONGEST)
    assistant.speculation.graphs = "off"
    with pytest.raises(ValueError, match=r"Nothing can be captured here.*SpeculationConfig.graphs is off"):
        assistant.warm_up(LONGEST)
    for length in (3, 12.5, True):
        with pytest.raises(ValueError, match="whole number of tokens, at least"):
            assistant.warm_up(length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_beams=2"):
        assistant.warm_up(LONGEST, num_beams=2)
    with pytest.raises(ValueError, match="A batch of 2"):
        assistant.warm_up(LONGEST, num_return_sequences=2, do_sample=True)
    assistant.detach()
    with pytest.raises(ValueError, match="attached to 0 targets"):
        assistant.warm_up(LONGEST)
    short = tiny("gpt2", n_positions=64)
    with pytest.raises(ValueError, match="Nothing can be captured"):  # by default as many tokens as there are positions
        assistant_of("early_exit", short, rule="fixed", num_tokens=2).warm_up()
    with pytest.raises(ValueError, match="at most 64"):
        assistant_of("early_exit", short, rule="fixed", num_tokens=2).warm_up(65)


def test_a_text_that_would_end_at_once(pretended: Counter[str]) -> None:
    """Nothing ends the rehearsal."""
    target, assistant = made("independent", "fixed")
    assistant.warm_up(SHORT, eos_token_id=list(range(48)), stopping_criteria=[lambda ids, _: torch.tensor([True])])
    captured = pretended["captured"]
    generate(target, assistant)
    assert pretended["captured"] == captured > 0


def test_the_last_positions(pretended: Counter[str]) -> None:
    """Up to as many tokens as the models have positions for."""
    target = tiny("gpt2", n_positions=64)
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=5)
    assistant.warm_up(64)
    captured = pretended["captured"]
    plain, ours = (generate(target, each, 9, max_new_tokens=55) for each in (None, assistant))
    assert torch.equal(ours, plain)
    assert pretended["captured"] == captured
