"""An EAGLE-3 layer begins like the target's last layer: heads that attend to their own place carry what it lacks."""

from typing import Any

import pytest
import torch
from support.distillation_files import states_of
from support.models import prompt, tiny
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.training.distillation import initial_layer

READS, LAST = [0, 1], 2
SIZE, HEAD, OWN = 32, 8, 3  # of four heads
TEXTS = [prompt(60, seed) for seed in range(60)]
NEW = [prompt(60, seed) for seed in range(100, 106)]


def target_of(family: str = "llama") -> CausalLM:
    """Its embeddings have something in common, as those of trained models do."""
    target = tiny(family).float()
    with torch.no_grad():
        target.get_input_embeddings().weight.add_(0.4)
    return target


def begun(target: CausalLM) -> Eagle3Model:
    model = initial_layer.untrained(initial_layer.settings_for(target, READS, None), target, None)
    initial_layer.fit(model, target, TEXTS)
    return model


def outputs(target: CausalLM, layer: int, ids: Tensor) -> Tensor:
    """The outputs `[1, n, hidden_size]` of a layer of the target along a text."""
    catching = StateReader()
    catching.hidden_size, catching.reads, catching.reads_final = SIZE, [layer], False
    return states_of(target, catching, ids)


@torch.no_grad()
def off(model: Eagle3Model, target: CausalLM, step: int) -> float:
    """The squared error of the draft's state beside the target's own, in units of its square. In a later step the draft
    goes on from a state like its own, for which the target's is taken."""
    errors, sizes = [], []
    for ids in NEW:
        read = torch.cat([outputs(target, layer, ids) for layer in (READS if step == 1 else [LAST])], -1)
        inputs = model.reader(read[:, :-1], target.get_input_embeddings()(ids[:, 1:]))
        wanted = outputs(target, LAST, ids)[:, 1:]
        errors.append((model.decoder(inputs_embeds=inputs).last_hidden_state - wanted).square().sum())
        sizes.append(wanted.square().sum())
    return float(sum(errors) / sum(sizes))


@torch.no_grad()
def on_own_place(model: Eagle3Model, target: CausalLM) -> Tensor:
    """How much each of the heads attends to its own place: `[texts, heads, n]`."""
    found, first = [], model.decoder.layers[0]
    attention: Any = first.self_attn
    for ids in NEW:
        read = torch.cat([outputs(target, layer, ids) for layer in READS], -1)
        e, g = model.reader(read[:, :-1], target.get_input_embeddings()(ids[:, 1:])).chunk(2, -1)
        both = torch.cat((first.input_layernorm(e), first.hidden_norm(g)), -1)
        products = attention.q_proj, attention.k_proj
        query, key = (product(both).unflatten(-1, (-1, HEAD)).transpose(1, 2) for product in products)
        places = torch.arange(both.shape[1])[None]
        query, key = apply_rotary_pos_emb(query, key, *model.decoder.rotary_emb(both, places))
        scores = query @ key.transpose(-1, -2) * HEAD**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(later, -torch.inf).softmax(-1).diagonal(dim1=-2, dim2=-1)[0])
    return torch.stack(found)


def without_phase(model: Eagle3Model) -> Eagle3Model:
    """The mutant: RoPE turns nothing, so that all places look alike."""
    model.decoder.rotary_emb.inv_freq.zero_()
    return model


@torch.no_grad()
def plain(model: Eagle3Model) -> Eagle3Model:
    """Without what the heads carry: the residual is g, and no more."""
    model.decoder.layers[0].self_attn.o_proj.weight[:, -OWN * HEAD :] = 0
    return model


def test_heads_attend_to_their_own_place() -> None:
    target = target_of()
    attended = on_own_place(begun(target), target)
    assert float(attended[:, -OWN:].mean()) > 0.98
    assert float(attended[:, -OWN:].quantile(0.02)) > 0.9
    assert float(on_own_place(without_phase(begun(target)), target)[:, -OWN:].mean()) < 0.2


@pytest.mark.parametrize("step", [1, 2])
def test_it_computes_what_the_last_layer_does(step: int) -> None:
    target = target_of()
    ours = off(begun(target), target, step)
    assert ours < 0.05
    assert off(without_phase(begun(target)), target, step) > 2 * ours
    assert off(plain(begun(target)), target, step) > 3 * ours


def test_fc_makes_the_final_state_of_what_is_read() -> None:
    target = target_of()
    model = begun(target)
    assert model.reader.fc is not None
    read = torch.cat([torch.cat([outputs(target, layer, ids) for layer in READS], -1)[0] for ids in TEXTS])
    final = torch.cat([outputs(target, LAST, ids)[0] for ids in TEXTS])
    unit = final / final.square().mean(-1, keepdim=True).sqrt()
    best = read @ torch.linalg.lstsq(read, unit).solution * final.square().mean().sqrt()
    with torch.no_grad():
        error = model.reader.fc(read) - best
    assert float(error.square().mean()) < 0.05 * float(best.square().mean())


def test_the_target_is_left_alone() -> None:
    target = target_of("gemma3_text")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    begun(target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert not any(module._forward_hooks for module in target.modules())
