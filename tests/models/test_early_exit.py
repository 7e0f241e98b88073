"""An early exit shares its target's tensors: it costs the memory of its adapter and heads, and changes none of them."""

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.files.repos import save_adapter
from support.targets.models import assistant_for, assistant_of, partly_agreeing, tiny
from support.targets.snapshots import FIXED, generate, has_our_methods, of_own_class, snapshot
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import early_exit


def bytes_of(tensors: Any, without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in without)


def all_tensors(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def adapter_for(target: CausalLM, folder: Path) -> str:
    """Of the first two layers of the target."""
    return save_adapter(copy.deepcopy(early_exit(target, 2)), folder, targets=["q_proj"])


@pytest.mark.parametrize(("made", "own"), [
    ({}, 0),
    ({"draft_vocab": range(0, 48, 3)}, 16 * 32 * 8 + 16 * 8),  # the head's rows, and their ids
    ({"adapter": ...}, 2 * 4 * (2 * 32) * 8),  # A and B of rank 4 at 32 x 32 in two layers
    ({"adapter": ..., "merge": True}, 2 * 32 * 32 * 8),  # q_proj of two layers
], ids=str)  # fmt: skip
def test_an_early_exit_shares_the_targets_tensors(made: dict[str, Any], own: int, tmp_path: Path) -> None:
    target = tiny("llama").train()
    target.get_input_embeddings().requires_grad_(False)
    before, shared = snapshot(target), {t.untyped_storage().data_ptr() for t in all_tensors(target)}
    adapter = {"adapter": adapter_for(target, tmp_path)} if "adapter" in made else {}
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=FIXED, **{"merge": False, **made, **adapter})
    drafter = assistant.ready_drafter()
    assert bytes_of([*all_tensors(drafter.model), *all_tensors(drafter)], without=shared) == own
    assert {**snapshot(target), "class": None} == {**before, "class": None}
    assert torch.equal(generate(target, assistant_model=assistant), generate(target))
    assistant.detach()
    assert snapshot(target) == before


def test_moving_an_early_exit_assistant_leaves_the_target(tmp_path: Path) -> None:
    target = tiny("llama")
    before, folder = snapshot(target), adapter_for(target, tmp_path)
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, speculation=FIXED, merge=False)
    assistant.half()
    assistant.train()
    assistant.requires_grad_(False)
    assert {**snapshot(target), "class": None} == {**before, "class": None}
    assert torch.equal(generate(target, assistant_model=assistant), generate(target))
    assistant.detach()


# --- a target in training ---


@torch.no_grad()
def train(target: CausalLM) -> None:
    """A step: it changes every weight."""
    for weight in target.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))  # which autograd does not count


def logits_of(drafter: Any) -> Tensor:
    with torch.no_grad():
        return drafter.head_logits(drafter.hidden_states(torch.tensor([[3, 4, 5]])))


@pytest.mark.parametrize("part", ["layers", "rows of the head", "adapter beside them"])
def test_a_draft_of_its_layers_follows_a_target_in_training(part: str, tmp_path: Path) -> None:
    target = tiny("llama")
    own: dict[str, Any] = {"rows of the head": {"draft_vocab": range(2, 40)}}.get(part, {})
    if part.startswith("adapter"):
        own = {"adapter": adapter_for(target, tmp_path), "merge": False}
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=FIXED, **own)
    before, parameters = logits_of(assistant.drafter), dict(assistant.drafter.named_parameters())
    train(target)
    assistant.setup()
    for name, parameter in assistant.drafter.named_parameters():
        assert parameter is parameters[name], "what was compiled with it goes on"
    now = SpecDecPPAssistant.from_early_exit(copy.deepcopy(target), 2, speculation=FIXED, **own)
    assert torch.equal(logits_of(assistant.drafter), logits_of(now.drafter))
    assert not torch.allclose(logits_of(now.drafter), before, atol=0.1)


def test_forwards_that_trainers_set_are_left_to_the_target() -> None:
    """TRL's go on to the forward of the whole model; accelerate's compute in another precision."""
    target = tiny("llama").float()
    expected = logits_of(SpecDecPPAssistant.from_early_exit(copy.deepcopy(target), 2).drafter)
    whole = target.forward
    target.forward = MethodType(lambda _, *args, **kwargs: whole(*args, **kwargs), target)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(mixed_precision="bf16", cpu=True).prepare(target)
        set_by_them, assistant = vars(target)["forward"], SpecDecPPAssistant.from_early_exit(target, 2)
        assert torch.equal(logits_of(assistant.drafter), expected)
        assert vars(target)["forward"] is set_by_them
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# --- parameters that are replaced by others ---


def one_weight(target: CausalLM) -> None:
    projection = target.model.layers[0].self_attn.o_proj
    projection.weight = nn.Parameter(0.9 * projection.weight.detach())


def all_weights(target: CausalLM) -> None:
    state = {name: 1.02 * tensor for name, tensor in target.state_dict().items()}
    target.load_state_dict(state, assign=True)


def head(target: CausalLM) -> None:
    target.lm_head = copy.deepcopy(target.lm_head)
    train(target.lm_head)


def tied(target: CausalLM) -> None:
    target.lm_head.weight = target.model.embed_tokens.weight


REPLACED = [one_weight, all_weights, head, tied, lambda target: target.resize_token_embeddings(56)]


@pytest.mark.daily(
    "all_weights-draft_vocab-after a call", "head-eagle3-not at all", "tied-adapter-at once",
    "<lambda>-early_exit-not at all",
)  # fmt: skip
@pytest.mark.parametrize("moves", ["not at all", "after a call", "at once"])
@pytest.mark.parametrize("kind", ["early_exit", "conditioned", "eagle3", "adapter", "draft_vocab"])
@pytest.mark.parametrize("replace", REPLACED)
def test_a_draft_of_its_layers_follows_replaced_parameters(replace: Any, kind: str, moves: str, tmp_path: Path) -> None:
    target = tiny("llama")
    own: dict[str, Any] = {"draft_vocab": {"draft_vocab": range(2, 40)}}.get(kind, {})
    if kind == "adapter":
        own = {"adapter": adapter_for(target, tmp_path), "merge": False}
    is_exit = kind in ("early_exit", "adapter", "draft_vocab")
    assistant: Any = SpecDecPPAssistant.from_early_exit(target, 2, **own) if is_exit else assistant_of(kind, target)
    assistant.speculation = FIXED
    generate(target, assistant_model=assistant)
    replace(target)
    if moves == "after a call":
        generate(target, assistant_model=assistant)
    if moves != "not at all":
        target.to(torch.float32)
    assert torch.equal(generate(target, assistant_model=assistant), generate(target))
    assert assistant.drafter.dtype == target.dtype
    theirs = {id(each) for each in target.parameters()}
    kept, drafter = assistant.drafter, assistant.drafter.model
    if is_exit:
        ours = {name for name, each in drafter.named_parameters() if id(each) not in theirs}
        assert all("lora" in name for name in ours)
    generate(target, assistant_model=assistant)
    assert assistant.drafter is kept, "it is made anew once"


def test_without_looking_a_draft_keeps_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant."""
    target = tiny("llama")
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=FIXED)
    monkeypatch.setattr(SpecDecPPAssistant, "_renew_draft", lambda _: None)
    one_weight(target)
    target.to(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        generate(target, assistant_model=assistant)


@pytest.mark.parametrize("make", [SpecDecPPAssistant.from_early_exit, SpecDecPPAssistant.from_conditioned])
def test_a_target_with_tensor_subclasses_can_be_moved(make: Any) -> None:
    """PyTorch swaps these tensors, which it refuses if they have weak references."""
    target = tiny("llama")
    projection = target.model.layers[2].mlp.up_proj
    weights = projection.weight.detach(), projection.weight.detach().clone()
    projection.weight = nn.Parameter(TwoTensor(*weights), requires_grad=False)
    assistant = make(target, 2)
    target.double()
    assert (target.dtype, assistant.setup().drafter.dtype) == (torch.float64, torch.float64)
    assistant.detach()
    target.float()
    assert {each.dtype for each in target.parameters()} == {torch.float32}


# An assistant has no state of a generation: repeated calls, several targets, several assistants, several threads. -----


@pytest.mark.daily("before", takes=2)
@pytest.mark.parametrize("how", ["before", "by a call"])
def test_two_targets_share_an_assistant(how: str) -> None:
    targets = [tiny("llama"), tiny("mistral", seed=3)]
    assistant = SpecDecPPAssistant.from_draft(partly_agreeing(targets[0]), speculation=FIXED)
    if how == "before":
        for target in targets:
            assistant.attach(target)
    for target in (*targets, *targets):
        plain = generate(target)
        assert torch.equal(generate(target, assistant_model=assistant), plain)
        assert assistant.stats.decided["attached"] == how
    assistant.detach(targets[0])
    for target in targets:
        assert torch.equal(generate(target, assistant_model=assistant), generate(target))
        assert assistant.stats.decided["attached"] == ("by a call" if target is targets[0] else how)


def test_attaching_twice_counts_once() -> None:
    target = of_own_class(tiny("llama"))
    assistant = assistant_for(target)
    assistant.attach(target)
    assistant.detach()
    assert not has_our_methods(target)
