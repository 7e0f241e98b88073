"""Where the training of a block draft begins: with what least squares predict of the target's last layer.

Nothing but attention can bring the text to the rows of a block. So the first layer begins with heads that look at one
place each, the anchor (the last token) or the verified token before it, and what they pass on are maps that are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.config.bounds import ROPE
from hf_specdecpp.drafts.dflash.config import DFlashSettings
from hf_specdecpp.drafts.dflash.drafter import DFlashDraft
from hf_specdecpp.drafts.dflash.kind import meet
from hf_specdecpp.drafts.dflash.model import DFlashModel
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, num_embeddings
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.training.distillation.initial.fusion import OUTLIER, RIDGE
from hf_specdecpp.training.distillation.initial.layer import COPIED, USUAL_LENGTH, logit_factor, size_of
from hf_specdecpp.training.distillation.initial.layer_behind import LayerBehind, copy_norm

SHARPNESS = 4.0  # of attention by distance: with it nine tenths of a row's weight or more are on one place
FASTEST = 0.4  # radians a token: faster rotations count less, so that attention falls with the distance
LEAST = 1e-9  # where texts are too short for a second place, its map is zero
KINDS = 4  # of heads: the first row's and the later ones', each for the text before the anchor and for the anchor
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def settings_for(
    target: CausalLM, reads: Sequence[int], block_size: int, num_layers: int, mask_token: int
) -> DFlashSettings:
    """A draft of the target's width, whose first row proposes, too, and whose rows see no later ones.

    So a shorter block would propose the same, and the first candidate is judged where the target's own row stands.

    Args:
        reads: the target's layers whose outputs it reads.
        block_size: candidates.
        mask_token: id of the token in the places to be guessed.

    Raises:
        ValueError: the target has no such token.
    """
    config = target.config.get_text_config(decoder=True)
    if mask_token >= num_embeddings(target):
        raise ValueError(
            f"distill.mask_token={mask_token} is no token of the target, which has ids up to "
            f"{num_embeddings(target) - 1}. Choose one that texts do not have, or leave it out."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    rope = {name: rope[name] for name in ROPE if name in rope}
    width = config.hidden_size
    head_dim = size_of(config, "head_dim") or width // (size_of(config, "num_attention_heads") or 8)
    heads = KINDS * -(-width // (2 * head_dim)) + 1  # half of a full map for each kind, and one that counts places
    layer = {name: size for name in COPIED if (size := size_of(config, name)) is not None}
    return DFlashSettings(
        layer={
            "hidden_act": "silu", "vocab_size": config.vocab_size, "hidden_size": width,
            "intermediate_size": 4 * width, **layer, "num_hidden_layers": num_layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "head_dim": head_dim,
            "max_position_embeddings": size_of(config, "max_position_embeddings") or USUAL_LENGTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        },
        reads=list(reads),
        block_size=block_size,
        mask_token_id=mask_token,
        output_multiplier=logit_factor(config),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        is_causal=True,
        samples_anchor=True,
        num_target_layers=config.num_hidden_layers,
    )  # fmt: skip


@torch.no_grad()
def untrained(settings: DFlashSettings, target: CausalLM) -> DFlashModel:
    """A draft whose final norm is the target's, and in which no layer adds anything; float32.

    What it reads last is its context as it is, and what it reads beside that adds nothing at first.
    """
    model = DFlashModel(settings).float()
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.reader.fc.weight.zero_()
    model.reader.fc.weight[:, -model.reader.hidden_size :].fill_diagonal_(1.0)
    copy_norm(inner_decoder(target), "norm", model.norm)
    meet(model, target, "The block draft")
    return model.float()


@torch.no_grad()
def fit(model: DFlashModel, target: CausalLM, texts: Iterable[Tensor], decay: float) -> None:
    """Begin like the last layer of the target, where the draft can.

    Let x be what the MLP of the target's last layer reads and adds to, c what the draft knows of a token, and e an
    embedding, normed. By least squares x - e = M c + G e in the first row of a block, and x - m = M' c + G' e + z s in
    the later ones, with c of the token before the anchor, e of the anchor, m the mask token's embedding and s the share
    of mask tokens among the rows up to this one: 0, 1/2, 2/3, ... These maps become values and outputs of the first
    layer's heads; MLP and norm of the last are the target's. Where the target has no such MLP, x is what its final norm
    reads.

    Args:
        model: untrained, has met the target; is changed.
        texts: `[1, n]` each.
        decay: of the weights of places, in places.
    """
    stack, last = layer_stack(inner_decoder(target), target)[1], model.layers[-1]
    with LayerBehind(stack[-1]) as behind:
        weights = [behind.weight(name) for name in MLP]
        has_mlp = all(
            weight is not None and weight.shape == last.get_submodule(name).weight.shape
            for name, weight in zip(MLP, weights, strict=True)
        )
        norm = dict(stack[-1].named_children()).get(behind.before_mlp) if has_mlp else None
        norm = norm or dict(inner_decoder(target).named_children()).get("norm")
        if norm is None:
            return
        sums = _sums(model, target, norm, texts, decay)
    _set_attention(model, sums)
    if has_mlp:
        for name in MLP:
            weight: Any = behind.weight(name)
            last.get_submodule(name).weight.copy_(weight)
        copy_norm(stack[-1], behind.before_mlp, last.post_attention_layernorm)


@dataclass
class _Sums:
    """Means over places of texts; H is the width, knowns are [c; e].

    Attributes:
        first, first_wanted: squares `[2H, 2H]` of the first row's knowns, and their products `[2H, H]` with x - e.
        later, later_wanted: of the later rows, by weight: `[2H + 1, 2H + 1]` and `[2H + 1, H]`.
        mean: `[2H]`, of the knowns.
        mask: `[H]`, the mask token's normed embedding.
    """

    first: Tensor
    first_wanted: Tensor
    later: Tensor
    later_wanted: Tensor
    mean: Tensor
    mask: Tensor


def _sums(model: DFlashModel, target: CausalLM, module: nn.Module, texts: Iterable[Tensor], decay: float) -> _Sums:
    draft, reader = DFlashDraft(model, target), Reader(target)
    norm, width, size = model.layers[0].input_layernorm, model.reader.hidden_size, model.settings.places
    masked = draft.embed(torch.tensor([model.settings.mask_token_id], device=target.device)).float()
    sums = [torch.zeros(*shape) for shape in ((2 * width,) * 2, (2 * width, width), (2 * width + 1,) * 2)]
    sums += [torch.zeros(2 * width + 1, width), torch.zeros(2 * width)]
    count, weight_of_later, caught_inputs = 0, 0.0, list[Tensor]()
    with ExitStack() as hooks:
        handle = module.register_forward_pre_hook(lambda _module, inputs: caught_inputs.append(inputs[0]))
        hooks.callback(handle.remove)
        caught = hooks.enter_context(TargetStates(target, model.reader))
        for ids in texts:
            caught_inputs.clear()
            reader.hidden_states(ids)
            states: Any = caught.take()
            wanted = caught_inputs[-1].view(ids.shape[1], width).float().cpu()
            embeddings = draft.embed(ids)[0].float()
            known = torch.cat((model.reader(states.float())[0, :-1], norm(embeddings)[1:]), dim=-1).cpu()
            embeddings, sizes = embeddings.cpu(), wanted.norm(dim=-1)
            usual = sizes < OUTLIER * sizes.median()
            rows = usual[1:]
            sums[0] += known[rows].T @ known[rows]
            sums[1] += known[rows].T @ (wanted[1:] - embeddings[1:])[rows]
            sums[4] += known[rows].sum(0)
            count += int(rows.sum())
            for place in range(1, min(size, len(known))):
                rows, weight = usual[1 + place :], math.exp(-place / decay)
                share = torch.full((len(rows), 1), place / (place + 1))
                before = torch.cat((known[: len(rows)], share), dim=-1)[rows]
                sums[2] += weight * (before.T @ before)
                sums[3] += weight * (before.T @ (wanted[1 + place :] - masked.cpu())[rows])
                weight_of_later += weight * len(before)
    mean = sums[4] / count
    totals = (count, count, *[max(weight_of_later, LEAST)] * 2)
    first, first_wanted, later, later_wanted = (each / total for each, total in zip(sums[:4], totals, strict=True))
    return _Sums(first, first_wanted, later, later_wanted, mean, norm(masked)[0].cpu())


def _solve(squares: Tensor, products: Tensor) -> Tensor:
    ridge = (RIDGE * squares.diagonal().mean() + LEAST) * torch.eye(len(squares))
    return torch.linalg.solve(squares + ridge, products)


def _set_attention(model: DFlashModel, sums: _Sums) -> None:
    """Write the maps into the first layer's attention.

    Of a product whose output is one number times a fixed vector the norm of queries and keys leaves the number's sign.
    So heads can be told which rows ask and which are seen: by functions that are about 1 or -1 on contexts, on
    embeddings and on the mask token's (`_sign`). Among what is seen the nearest gets the weight.

    A row for which a head is not meant sees with it what the head does not mean. Of a head of the first row that is
    the mask token in all later rows, whose value is zero. Of a head of the later rows that is, in the first row, the
    anchor or the token before it, which adds further linear maps, so the first row's are fitted less those.
    """
    width, attention = len(sums.mask), model.layers[0].self_attn
    solved = _solve(sums.later, sums.later_wanted).T
    of_context, of_anchor, counted = solved.split((width, width, 1), dim=1)
    others = torch.cat((of_anchor, of_context), dim=1)  # with them the first row sees the other one of the two
    unmasked = torch.eye(width) - torch.outer(sums.mask, sums.mask) / sums.mask.square().sum()
    without = torch.block_diag(unmasked, unmasked)
    first = _solve(without @ sums.first @ without, without @ (sums.first_wanted - sums.first @ others.T)).T @ without
    context, anchor = sums.first[:width, :width], sums.first[width:, width:]
    is_context, is_anchor = _sign(sums, 1, -1, -1), _sign(sums, -1, 1, -1)
    asks_first = _sign(sums, 0, 1, -1)
    kinds = [
        (first[:, :width], context, is_context, asks_first),
        (first[:, width:], anchor, is_anchor, asks_first),
        (of_context, context, is_context, -asks_first),
        (of_anchor, anchor, is_anchor, -asks_first),
    ]
    head_dim = attention.head_dim
    each = (attention.config.num_attention_heads - 1) // KINDS
    rotations = _frequencies(model, head_dim)
    slow = (rotations <= rotations.median()).float()
    for place, (wanted, squares, key, query) in enumerate(kinds):
        rows = slice(place * each * head_dim, (place + 1) * each * head_dim)
        output, value = _factors(wanted, squares, each * head_dim)
        attention.v_proj.weight[rows].copy_(value)
        attention.o_proj.weight[:, rows].copy_(output)
        attention.k_proj.weight[rows].copy_(key.expand(each * head_dim, -1))
        attention.q_proj.weight[rows].copy_(query.expand(each * head_dim, -1))
    rows = slice(KINDS * each * head_dim, None)  # sees the block's rows alike, and a mask token's value is 1
    attention.k_proj.weight[rows].copy_(torch.outer(slow, _sign(sums, -1, 1, 1)))
    attention.q_proj.weight[rows].copy_(torch.outer(slow, -asks_first))
    attention.v_proj.weight[rows].zero_()
    attention.v_proj.weight[rows][0].copy_(_sign(sums, 0, 0, 1))
    attention.o_proj.weight[:, rows].zero_()
    attention.o_proj.weight[:, rows][:, :1].copy_(counted)
    share = (FASTEST / rotations).clamp_max(1.0).square()
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.copy_((SHARPNESS * math.sqrt(head_dim) / 2 * share / share.mean()).sqrt())


def _frequencies(model: DFlashModel, head_dim: int) -> Tensor:
    """Radians a token that each number of a query is turned by, `[head_dim]`."""
    found = model.rotary_emb.inv_freq.float().cpu()
    return torch.cat((found, found))[:head_dim]


def _sign(sums: _Sums, of_context: float, of_embedding: float, of_mask: float) -> Tensor:
    """`[H]`: what a vector is multiplied with so that contexts, embeddings and the mask token's give these numbers."""
    width, mask = len(sums.mask), sums.mask
    squares = sums.first[:width, :width] + sums.first[width:, width:] + torch.outer(mask, mask)
    products = of_context * sums.mean[:width] + of_embedding * sums.mean[width:] + of_mask * mask
    return _solve(squares, products[:, None])[:, 0]


def _factors(wanted: Tensor, squares: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`[H, rank]` and `[rank, H]`, whose product is about `wanted` for inputs with these squares."""
    rank_of_both = min(rank, len(wanted))
    outputs = torch.linalg.eigh(wanted @ squares @ wanted.T).eigenvectors[:, -rank_of_both:]
    outputs = nn.functional.pad(outputs, (0, rank - rank_of_both))
    return outputs, outputs.T @ wanted
