"""Drafts that read the target's states: what they read, round by round, beside states computed from scratch.

What they have in common with other kinds of draft is in `tests/drafts/test_draft_kind.py`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.targets.formulas import states_of
from support.targets.models import assistant_of, prompt, quiet_later_layers, random_fusion, tiny
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.drafting.drafter import DraftSession
from hf_specdecpp.generation.single_target import SingleTarget
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import RETURNS_CHOSEN, TargetStates
from hf_specdecpp.trees.tree import DraftTree

FAMILIES = ("llama", "gemma3_text", "gpt2", "mistral")
ITS_OWN: Any = {"draft_successors": False, "tree_depth": 3}  # what is drafted is the draft's own
CHAIN = SpeculationConfig("fixed", num_tokens=3)
TREE = SpeculationConfig(rule="threshold", tree="dyspec", tree_budget=7)

Drafted = tuple[list[int], list[list[int]], list[Tensor]]  # the text, paths below it, and the logits after each


Making = Callable[..., SpecDecPPAssistant]


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> CausalLM:
    return quiet_later_layers(tiny(request.param))


@pytest.fixture(params=["conditioned", "eagle3"])
def reading(request: pytest.FixtureRequest) -> Making:
    """Makes an attached assistant with such a draft."""

    def made(target: CausalLM, speculation: SpeculationConfig = CHAIN) -> SpecDecPPAssistant:
        return assistant_of(request.param, target, **speculation.to_dict(), **ITS_OWN)

    return made


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """What each round drafted after which text."""
    seen: list[Drafted] = []
    propose = SpecDecPPCandidateGenerator.propose

    def watched(self: SpecDecPPCandidateGenerator, input_ids: Tensor, *args: Any) -> DraftTree:
        tree = propose(self, input_ids, *args)
        nodes = sorted(tree.scores)
        seen.append((input_ids[0].tolist(), [tree.path(node) for node in nodes], [tree.scores[n] for n in nodes]))
        return tree

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "propose", watched)
    return seen


@torch.no_grad()
def from_scratch(assistant: SpecDecPPAssistant, target: CausalLM, text: list[int], path: list[int]) -> Tensor:
    """The draft's logits after `text + path`: target states over the text, then the draft's own, one by one."""
    drafter = assistant.ready_drafter()
    states, cache = states_of(target, drafter, torch.tensor([text])), DynamicCache(config=drafter.text_config)
    cache.activate_past_recording()
    hidden = drafter.hidden_states(torch.tensor([text[1:]]), cache, states[:, :-1])[:, -1:]
    for token in path:
        hidden = drafter.hidden_states(torch.tensor([[token]]), cache, hidden)
    return drafter.logits(hidden[0, -1], target.config.vocab_size)


def worst(assistant: SpecDecPPAssistant, target: CausalLM, rounds: list[Drafted]) -> float:
    """The largest difference from what it is from scratch."""
    return max(
        float((scores - from_scratch(assistant, target, text, path)).abs().max())
        for text, paths, all_scores in rounds
        for path, scores in zip(paths, all_scores, strict=True)
    )


@pytest.mark.daily("conditioned-gemma3_text-5-tree", "conditioned-llama-None-chain", "eagle3-mistral-None-chain")
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_reads_the_states_of_the_verified_text(
    reading: Making, target: CausalLM, drafted: list[Drafted], speculation: SpeculationConfig, chunk: int | None
) -> None:
    assistant, ids = reading(target, speculation), prompt()
    how: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    plain = target.generate(ids, **how)
    output = target.generate(ids, **how, assistant_model=assistant, prefill_chunk_size=chunk)
    assert torch.equal(output, plain)
    assert len(drafted) > 3
    assert worst(assistant, target, drafted) < 1e-4
    assert 0 < assistant.stats.accepted < assistant.stats.drafted, "rounds that accept some and reject some"


@pytest.mark.daily("conditioned-llama-throughput", "eagle3-mistral-threshold")
@pytest.mark.parametrize("rule", ["throughput", "threshold"])
def test_rounds_without_candidates(reading: Making, drafted: list[Drafted], rule: Any, target: CausalLM) -> None:
    """What was not drafted at is read later, with the states of its own passes."""
    costs = {"draft": 0.9, "verify": [1.0, 1.3, 1.6, 1.9]}
    assistant = reading(target, SpeculationConfig(rule, costs=costs if rule == "throughput" else None))
    target.generate(prompt(), max_new_tokens=60, do_sample=False, assistant_model=assistant)
    assert worst(assistant, target, drafted) < 1e-4


def _late(take: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(self: TargetStates, rows: Any = slice(None)) -> Any:
        states = take(self, rows)
        return None if states is None else states.roll(1, dims=1)

    return mutant


def _rejected_too(_: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(self: TargetStates, rows: Any = slice(None)) -> Any:  # the last rows of the pass, not the first
        caught = self._caught[0][0].shape[1]
        chosen = rows if isinstance(rows, slice) else range(caught - len(rows), caught)
        parts = [part[0][0][list(chosen)] if not isinstance(chosen, slice) else part[0][0] for part in self._caught]
        self.clear()
        return torch.cat(parts, dim=-1)[None]

    return mutant


@pytest.mark.parametrize("mutate", [_late, _rejected_too])
def test_wrong_states_are_noticed(
    reading: Making, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch, mutate: Callable[..., Any]
) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant, right = reading(target), TargetStates.states_of
    monkeypatch.setattr(SingleTarget, "time_one_token", lambda *_: None)
    monkeypatch.setattr(TargetStates, "states_of", mutate(right))
    target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=assistant)
    monkeypatch.setattr(TargetStates, "states_of", right)
    assert worst(assistant, target, drafted) > 1e-3


def test_stale_candidates_are_noticed(reading: Making, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant, begin = reading(target), DraftSession.read_verified

    def keeps(self: DraftSession, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        fed = min(num_accepted, self._num_read_candidates)
        self._num_read_candidates -= fed
        begin(self, new_tokens[:, fed:], num_accepted, states[:, fed:] if states is not None else None)

    monkeypatch.setattr(DraftSession, "read_verified", keeps)
    target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=assistant)
    assert worst(assistant, target, drafted) > 1e-3


@pytest.fixture
def llama() -> CausalLM:
    return quiet_later_layers(tiny("llama"))


@pytest.mark.daily("conditioned-1-chain", "conditioned-2-tree", "eagle3-2-chain")
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_processor_that_calls_the_target(
    reading: Making, llama: CausalLM, drafted: list[Drafted], speculation: SpeculationConfig, rows: int
) -> None:
    """As guidance does. What the draft reads are the states of the text all the same."""

    class Calls(LogitsProcessor):
        reads_prefix_only = True

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            llama(ids[:, -4:].expand(rows, -1))
            return scores

    assistant = reading(llama, speculation)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [Calls()]}
    plain = llama.generate(prompt(), **options)
    assert torch.equal(llama.generate(prompt(), assistant_model=assistant, **options), plain)
    assert worst(assistant, llama, drafted) < 1e-4


@pytest.mark.daily("conditioned", takes=5)
def test_several_threads(reading: Making, llama: CausalLM, drafted: list[Drafted]) -> None:
    """Passes of the same target in other threads are not caught."""
    assistant = reading(llama)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = llama.generate(prompt(), **options)
    with ThreadPoolExecutor(4) as pool:
        calls = [{"assistant_model": assistant}, {}] * 4
        texts = list(pool.map(lambda call: llama.generate(prompt(), **options, **call), calls))
    assert all(torch.equal(text, plain) for text in texts)
    assert worst(assistant, llama, drafted) < 1e-4


@pytest.mark.apart
@pytest.mark.daily("conditioned")
def test_a_forward_that_was_compiled_without_hooks(reading: Making, llama: CausalLM, drafted: list[Drafted]) -> None:
    assistant = reading(llama)
    llama.forward = torch.compile(llama.forward, backend="eager")
    plain = llama.generate(prompt(), max_new_tokens=8, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "assistant_model": assistant}
    if not RETURNS_CHOSEN:
        with pytest.raises(RuntimeError, match=r"did not call them.*use model.compile\(\)"):
            llama.generate(prompt(), **options)
        return
    assert torch.equal(llama.generate(prompt(), **options), plain)
    llama.forward = llama.forward._torchdynamo_orig_callable
    assert worst(assistant, llama, drafted) < 1e-4


def test_what_is_the_targets_takes_no_memory(reading: Making, llama: CausalLM) -> None:
    """A draft's own are its fusion, or its EAGLE-3 layer, which shares embeddings and LM head."""
    drafter = reading(llama).ready_drafter()
    own = {tensor.data_ptr() for tensor in (*llama.parameters(), *llama.buffers())}
    tensors = (*drafter.model.parameters(), *drafter.model.buffers(), *drafter.parameters())
    surplus = {t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in own}
    assert drafter.fusion is not None
    trained = [*drafter.fusion.parameters()]
    if isinstance(drafter.model, Eagle3Model):
        trained += [*drafter.model.norm.parameters(), *drafter.model.decoder.layers[0].parameters()]
        trained += [*drafter.model.decoder.buffers()]  # of its rotations
    assert sum(surplus.values()) == sum(tensor.nbytes for tensor in trained)


def test_a_fusion_of_another_target(llama: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"Fusion was trained for \{'hidden_size': 32.*the draft, Llama.* has .*64"):
        SpecDecPPAssistant.from_conditioned(tiny("llama", hidden_size=64), 2, fusion=random_fusion(llama))
    with pytest.raises(ValueError, match=r"reads layers \[7\] of its target, and .* has 3"):
        SpecDecPPAssistant.from_conditioned(llama, 1, reads=[7])
