"""Where the training of a block draft begins: with what least squares predict of the target's last layer.

Nothing but attention can bring the text to the rows of a block. So the first layer begins with heads that look at one
place each, the anchor (the last token) or the verified token before it, and what they pass on are maps that are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdecpp.drafts.dflash.config import DFlashSettings
from hf_specdecpp.drafts.dflash.kind import meet
from hf_specdecpp.drafts.dflash.model import DFlashDraft, DFlashModel
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.distillation import least_squares
from hf_specdecpp.training.distillation.least_squares import LastLayer, layer_sizes, logit_factor, size_of

# Places: the n-th after the first candidate weighs exp(-n / 4), since it counts only where all before stand.
DECAY = 4.0
SHARPNESS = 4.0  # of attention by distance: with it nine tenths of a row's weight or more are on one place
FASTEST = 0.4  # radians a token: faster rotations count less, so that attention falls with the distance
KINDS = 4  # of heads: the first row's and the later ones', each for the text before the anchor and for the anchor


def settings_for(
    target: CausalLM, reads: Sequence[int], block_size: int, num_layers: int, mask_token: int
) -> DFlashSettings:
    """A draft of the target's width, whose first row proposes, too, and whose rows see no later ones: a shorter block
    would propose the same, and the first candidate is judged where the target's own row stands."""
    config = target.config.get_text_config(decoder=True)
    head_dim = size_of(config, "head_dim") or config.hidden_size // (size_of(config, "num_attention_heads") or 8)
    heads = KINDS * -(-config.hidden_size // (2 * head_dim))  # half of a full map for each kind
    own = {"num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    return DFlashSettings(
        layer={**layer_sizes(config), **own, "head_dim": head_dim},
        reads=list(reads),
        block_size=block_size,
        mask_token_id=mask_token,
        output_multiplier=logit_factor(config),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        is_causal=True,
        samples_anchor=True,
        num_target_layers=config.num_hidden_layers,
    )


@torch.no_grad()
def untrained(settings: DFlashSettings, target: CausalLM) -> DFlashModel:
    """A draft with the target's final norm, in which no layer adds anything; its context is what it reads last."""
    model = DFlashModel(settings).float()
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.reader.fc.weight.zero_()
    model.reader.fc.weight[:, -model.reader.hidden_size :].fill_diagonal_(1.0)
    least_squares.copy_final_norm(target, model.norm)
    meet(model, target, "The block draft")
    return model.float()


@torch.no_grad()
def fit(model: DFlashModel, target: CausalLM, texts: Iterable[Tensor], decay: float = DECAY) -> None:
    """Begin like the last layer of the target, where the draft, which has met it untrained, can; texts are `[1, n]`
    each.

    Let x be what the MLP of the target's last layer reads and adds to, c what the draft knows of a token, and e an
    embedding, normed. By least squares x - e = M c + G e in the first row of a block, and x - m = M' c + G' e in the
    later ones, with c of the token before the anchor, e of the anchor and m the mask token's embedding. These maps
    become values and outputs of the first layer's heads; MLP and norm of the last are the target's. Where the target
    has no such MLP, x is what its last layer makes. Weights of places fall by `decay`, in places.
    """
    last = LastLayer(target, model.layers[-1])
    _set_attention(model, _means(model, target, texts, last, decay))
    last.copy_mlp()


@dataclass
class _Means:
    """Means over places of texts: squares `[2H, 2H]` of the first and of later rows' knowns [c; e], and their products
    with x - e and x - m `[2H, H]`; the knowns' mean; and the mask token's normed embedding m."""

    first: Tensor
    first_wanted: Tensor
    later: Tensor
    later_wanted: Tensor
    known: Tensor
    mask: Tensor


def _means(model: DFlashModel, target: CausalLM, texts: Iterable[Tensor], last: LastLayer, decay: float) -> _Means:
    draft, norm, width = DFlashDraft(model, target), model.layers[0].input_layernorm, model.reader.hidden_size
    masked = draft.embed(torch.tensor([model.settings.mask_token_id], device=target.device)).float()
    first, later = torch.zeros(2, 2 * width, 2 * width)
    first_wanted, later_wanted = torch.zeros(2, 2 * width, width)
    mean = torch.zeros(2 * width)
    count, weight_of_later = 0, 0.0
    for ids, states, inputs in least_squares.observed(target, model.reader, texts, last):
        embeddings = draft.embed(ids).float()
        known = torch.cat((model.reader(states[None])[0, :-1], norm(embeddings)[1:]), dim=-1).cpu()
        wanted, usual = inputs.cpu(), least_squares.is_usual(inputs).cpu()
        rows = usual[1:]
        first += known[rows].T @ known[rows]
        first_wanted += known[rows].T @ (wanted[1:] - embeddings[1:].cpu())[rows]
        mean += known[rows].sum(0)
        count += int(rows.sum())
        for place in range(1, min(model.settings.places, len(known))):
            rows, weight = usual[1 + place :], math.exp(-place / decay)
            before = known[: len(rows)][rows]
            later += weight * (before.T @ before)
            later_wanted += weight * (before.T @ (wanted[1 + place :] - masked.cpu())[rows])
            weight_of_later += weight * len(before)
    count, below = max(count, 1), max(weight_of_later, least_squares.LEAST)
    return _Means(
        first / count, first_wanted / count, later / below, later_wanted / below, mean / count, norm(masked)[0].cpu()
    )


def _set_attention(model: DFlashModel, means: _Means) -> None:
    """Write the maps into the first layer's attention.

    Of a product whose output is one number times a fixed vector the norm of queries and keys leaves the number's sign.
    So heads can be told which rows ask and which are seen: by functions that are about 1 or -1 on contexts, on
    embeddings and on the mask token's (`_sign`). Among what is seen the nearest gets the weight.

    A row for which a head is not meant sees with it what the head does not mean. Of a head of the first row that is
    the mask token in all later rows, whose value is zero. Of a head of the later rows that is, in the first row, the
    anchor or the token before it, which adds further linear maps, so the first row's are fitted less those.
    """
    width, attention = len(means.mask), model.layers[0].self_attn
    of_context, of_anchor = least_squares.solved(means.later, means.later_wanted).chunk(2, dim=1)
    others = torch.cat((of_anchor, of_context), dim=1)  # with them the first row sees the other one of the two
    unmasked = torch.eye(width) - torch.outer(means.mask, means.mask) / means.mask.square().sum()
    without = torch.block_diag(unmasked, unmasked)
    left = means.first_wanted - means.first @ others.T
    first = least_squares.solved(without @ means.first @ without, without @ left) @ without
    context, anchor = means.first[:width, :width], means.first[width:, width:]
    is_context, is_anchor = _sign(means, 1, -1, -1), _sign(means, -1, 1, -1)
    asks_first = _sign(means, 0, 1, -1)
    kinds = [
        (first[:, :width], context, is_context, asks_first),
        (first[:, width:], anchor, is_anchor, asks_first),
        (of_context, context, is_context, -asks_first),
        (of_anchor, anchor, is_anchor, -asks_first),
    ]
    head_dim = attention.head_dim
    each = attention.config.num_attention_heads // KINDS
    rotations = model.rotary_emb.inv_freq.float().cpu().repeat(2)[:head_dim]  # radians a token
    for place, (wanted, squares, key, query) in enumerate(kinds):
        rows = slice(place * each * head_dim, (place + 1) * each * head_dim)
        output, value = least_squares.low_rank(wanted, squares, each * head_dim)
        attention.v_proj.weight[rows][: len(value)].copy_(value)
        attention.o_proj.weight[:, rows][:, : len(value)].copy_(output)
        attention.k_proj.weight[rows].copy_(key.expand(each * head_dim, -1))
        attention.q_proj.weight[rows].copy_(query.expand(each * head_dim, -1))
    share = (FASTEST / rotations).clamp_max(1.0).square()
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.copy_((SHARPNESS * math.sqrt(head_dim) / 2 * share / share.mean()).sqrt())


def _sign(means: _Means, of_context: float, of_embedding: float, of_mask: float) -> Tensor:
    """`[H]`: what a vector is multiplied with so that contexts, embeddings and the mask token's give these numbers."""
    width, mask = len(means.mask), means.mask
    squares = means.first[:width, :width] + means.first[width:, width:] + torch.outer(mask, mask)
    products = of_context * means.known[:width] + of_embedding * means.known[width:] + of_mask * mask
    return least_squares.solved(squares, products[:, None])[0]
