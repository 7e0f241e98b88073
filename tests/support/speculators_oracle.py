"""EAGLE-3 drafts of the `speculators` package, whose forward pass was written without ours (`make test-formats`).

A draft of theirs is made at random (`random_draft`) or of a checkpoint (`draft_of`). Its logits (`their_logits`) have
the form of ours (`our_logits`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.models.causal_lm import CausalLM
from support.eagle3_files import DRAFT_VOCAB, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCAB

IDS = [2, 1, 3]  # of layers, as the package counts them; not in order: it is kept
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SIZES = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
}  # fmt: skip


def package(module: str = "models.eagle3") -> Any:
    """A module of it. Skips where it is not installed, and fails where it is and cannot be imported."""
    if find_spec("speculators") is None:
        pytest.skip("speculators is not installed: make test-formats")
    return importlib.import_module(f"speculators.{module}")


def config_of(layer: Mapping[str, Any], **settings: Any) -> Any:
    """The config of a tiny draft.

    Args:
        layer: what differs from `SIZES`, by transformers' names.
        settings: those of `FLAGS` that are set, and other fields of the config.
    """
    sizes = {**SIZES, **layer}
    inner = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    inner._attn_implementation = "sdpa"  # eager computes the softmax in float32, and flex attention is compiled
    fields = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": IDS, **settings}
    return package().Eagle3SpeculatorConfig(transformer_layer_config=inner, **fields)


@torch.no_grad()
def random_draft(config: Any, seed: int = 0) -> Any:
    """A draft of the package in float64 with random weights and a random vocabulary; `save_pretrained` writes it."""
    draft = package().Eagle3DraftModel(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in draft.named_parameters():  # embeddings and LM head are NaN before
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    if draft.use_draft_vocab:
        ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        kept = torch.isin(torch.arange(VOCAB), ids)
        draft.load_vocab_mappings(kept, ids - torch.arange(len(ids)))
    return draft


def draft_of(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM) -> Any:
    """A draft of the package with the weights of a checkpoint, in float64.

    Args:
        raw: its `config.json`, in either dialect.
        tensors: by the names of either dialect. Embeddings that they lack are the target's.
    """
    flags = {flag: raw.get(flag, False) for flag in FLAGS}
    count = tensors["fc.weight"].shape[1] // target.config.hidden_size
    vocab = {"draft_vocab_size": len(tensors["lm_head.weight"])}
    # Of the ids of layers its forward pass needs no more than how many there are.
    ids = {"eagle_aux_hidden_state_layer_ids": list(range(2, 2 + count))}
    config = config_of(raw.get("transformer_layer_config", raw), **flags, **vocab, **ids)
    draft = package().Eagle3DraftModel(config).double().eval()
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    shared = {"embed_tokens.weight": target.get_input_embeddings().weight.detach()}
    missing, unknown = draft.load_state_dict({**shared, **named}, strict=False)
    assert not unknown, unknown
    assert set(missing) == {"verifier_lm_head.weight", "verifier_norm.weight"}, missing
    return draft


def random_states(text: Tensor, width: int = 3 * HIDDEN, seed: int = 1) -> Tensor:
    """`[1, n, width]` float64, in the place of a target's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*text.shape, width, generator=generator, dtype=torch.float64)


@torch.no_grad()
def their_logits(draft: Any, text: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """For each step s = 1, 2, ... the logits `[n - s, VOCAB]` at the tokens s to n - 1 of a text; -inf where none are.

    Example: the text is a b c d. The package is given b c d beside the states at a b c. Its row 0 reads b in the first
    step, and in the second one c, with its own state at b. Its last row has no token in the second step.

    Args:
        text: `[1, n]`.
        states: `[1, n, width]`, the target's at each token.
    """
    caught: list[Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _inputs, logits: caught.append(logits[0]))
    ids, count = text[:, 1:], text.shape[1] - 1
    places = torch.arange(count)[None]  # as ours; by default the package counts them from 1
    with hook, torch.compiler.set_stance("force_eager"):  # with a GPU at hand its forward pass is compiled
        draft(states[:, :-1], ids, torch.zeros_like(ids), position_ids=places, ttt_steps=steps)
    kept = slice(None) if draft.t2d is None else draft.t2d
    found = []
    for step, logits in enumerate(caught):
        found.append(logits.new_full((count - step, VOCAB), float("-inf")))
        found[-1][:, kept] = logits[: count - step]
    return found


@torch.no_grad()
def our_logits(drafter: Any, text: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """The same of a draft of ours."""
    found = enumerate(unrolled(drafter, text, states, steps), start=1)
    return [drafter.logits(hidden[0, step:], VOCAB).double() for step, hidden in found]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Infinite where only one of them has a token."""
    both = zip(ours, theirs, strict=True)
    return float(torch.stack([(one - other).abs()[one != other].max() for one, other in both]).max())
