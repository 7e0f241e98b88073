"""An assistant has no state of a generation: repeated calls, several targets, several assistants, several threads."""

import threading
from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny
from support.snapshots import has_our_methods, of_own_class
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models.causal_lm import CausalLM

FIXED = SpeculationConfig("fixed", num_tokens=4)
PROMPTS = [prompt(length, seed=length) for length in (1, 5, 9, 20)]
KINDS = ["attached", "unattached", "early exit"]


def generate(target: CausalLM, ids: Tensor, **arguments: Any) -> Tensor:
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 30, **arguments})


def make(target: CausalLM, kind: str) -> Any:
    if kind == "early exit":
        return SpecDecPPAssistant.from_early_exit(target, 2, speculation=FIXED)
    return assistant_for(target, kind == "attached")


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["fixed", "threshold"])
def test_repeated_calls(kind: str, rule: str) -> None:
    """Without `adapt` what one call learned does not reach the next."""
    target = tiny("llama")
    assistant = make(target, kind)
    assistant.speculation.rule, assistant.decisions = rule, Decisions(adapt=False)
    config, speculation = assistant.generation_config.to_dict(), assistant.speculation.to_dict()
    described = assistant.config.to_dict()
    texts, counts = [], []
    for _ in range(3):
        texts.append(generate(target, PROMPTS[2], assistant_model=assistant))
        counts.append((assistant.stats.rounds, assistant.stats.drafted_at, assistant.stats.accepted_at))
        generate(target, PROMPTS[1], assistant_model=assistant)
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert counts[0] == counts[1] == counts[2]
    assert assistant.generation_config.to_dict() == config
    assert assistant.speculation.to_dict() == speculation
    assert assistant.config.to_dict() == described


@pytest.mark.every(2, takes=2)
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "unattached"])
def test_two_targets_share_an_assistant(attached: bool) -> None:
    targets = [tiny("llama"), tiny("mistral", seed=3)]
    assistant = SpecDecPPAssistant.from_draft(partly_agreeing(targets[0]), speculation=FIXED)
    if attached:
        for target in targets:
            assistant.attach(target)
    for target in (*targets, *targets):
        plain = generate(target, PROMPTS[3])
        assert torch.equal(generate(target, PROMPTS[3], assistant_model=assistant), plain)
        assert assistant.stats.complete is attached
    assistant.detach(targets[0])
    for target in targets:
        assert torch.equal(generate(target, PROMPTS[3], assistant_model=assistant), generate(target, PROMPTS[3]))
        assert assistant.stats.complete is (attached and target is targets[1])


def test_two_assistants_on_a_target() -> None:
    target = of_own_class(tiny("llama"))
    plain = generate(target, PROMPTS[3])
    independent, early = make(target, "attached"), make(target, "early exit")
    for assistant in (independent, early, independent):
        assert torch.equal(generate(target, PROMPTS[3], assistant_model=assistant), plain)
        assert assistant.stats.complete
    independent.detach()
    assert has_our_methods(target), "the early exit is still attached"
    for assistant in (independent, early):
        assert torch.equal(generate(target, PROMPTS[3], assistant_model=assistant), plain)
        assert assistant.stats.complete is (assistant is early)
    early.detach()
    assert not has_our_methods(target)


def test_attaching_twice_counts_once() -> None:
    target = of_own_class(tiny("llama"))
    assistant = make(target, "attached")
    assistant.attach(target)
    assistant.detach()
    assert not has_our_methods(target)


def test_the_stats_of_a_call_stay_as_they_are() -> None:
    target = tiny("llama")
    assistant = make(target, "attached")
    generate(target, PROMPTS[0], assistant_model=assistant)
    first = assistant.stats
    kept = str(first)
    generate(target, PROMPTS[1], assistant_model=assistant)
    assert assistant.stats is not first
    assert str(first) == kept


@pytest.mark.every(3, takes=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_threads(family: str, kind: str) -> None:
    target = tiny(family)
    plain = [generate(target, ids) for ids in PROMPTS]
    assistant = make(target, kind)
    results: dict[int, list[Tensor]] = {i: [] for i in range(len(PROMPTS))}
    start = threading.Barrier(len(PROMPTS))

    def work(i: int) -> None:
        start.wait(timeout=20)
        for _ in range(2):
            results[i].append(generate(target, PROMPTS[i], assistant_model=assistant))

    threads = [threading.Thread(target=work, args=(i,)) for i in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for i, texts in results.items():
        assert len(texts) == 2, "a thread failed"
        assert all(torch.equal(text, plain[i]) for text in texts)
