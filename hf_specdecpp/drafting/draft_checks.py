"""Checks of a draft model, and of a head or fusion that was trained for it. Each error names the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.caches.states import why_no_rollback
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM, positions_of, trying
from hf_specdecpp.models.target_states import StateReader


def check_draft_vocab(ids: Tensor, num_ids: int) -> None:
    """Raise `ValueError` unless `ids` are distinct token ids below `num_ids`."""
    is_list = ids.numel() and ids.dim() == 1 and not ids.is_floating_point()
    if not is_list or int(ids.min()) < 0 or int(ids.max()) >= num_ids or ids.unique().numel() != ids.numel():
        span = f"{ids.min():g} to {ids.max():g}" if ids.numel() else "none"
        raise ValueError(
            f"draft_vocab must list distinct token ids from 0 to {num_ids - 1}; got {ids.numel()} ids, {span}. It was "
            "probably made for another draft."
        )


def check_can_draft(model: CausalLM) -> None:
    """Raise `ValueError` unless `model` is a decoder-only causal LM that can roll back rejected tokens."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{name} has no LM head, so it cannot predict tokens. Load it with AutoModelForCausalLM.")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; a draft must be a decoder-only causal LM.")
    if (reason := why_no_rollback(model)) is not None:
        raise ValueError(f"{name} {reason}, so it cannot draft. Use a draft whose layers all use attention.")


def check_sizes(part: AcceptanceHead | StateReader, drafter: Any, draft_name: str) -> None:
    """Raise `ValueError` unless a head or fusion was made for states and embeddings of the sizes of `drafter`."""
    reads_embeddings = getattr(part, "inputs", "before") == "before"  # all fusions do
    sizes = ("hidden_size", "embedding_size") if reads_embeddings else ("hidden_size",)
    ours, theirs = ({size: getattr(each, size) for size in sizes} for each in (part, drafter))
    if ours != theirs:
        raise ValueError(
            f"The {type(part).__name__} was trained for {ours} but the draft, {draft_name}, has {theirs}, so it cannot "
            "read the draft's states. Load the draft that it was trained with, or train one for this draft."
        )


def check_logits(drafter: Any) -> None:
    """Raise `ValueError` unless `drafter` (a `Drafter`), which calls decoder and LM head separately, computes the
    logits of the model's own forward pass, up to rounding. Compares the logits after one token."""
    model = drafter.model
    probe = torch.zeros((1, 1), dtype=torch.long, device=drafter.device)
    with trying(model) as read:
        try:
            expected = read(probe).logits[0, -1].float()
            hidden = drafter.hidden_states(probe, **positions_of(drafter._decoder, probe))[0, -1]
            actual = drafter.head_logits(hidden)
        except Exception as failure:  # a forward pass that gets inputs of another kind may raise any error
            raise ValueError(
                f"{type(model).__name__} does not read a token by itself, or has layers between its decoder and its LM "
                f"head ({type(failure).__name__}: {failure}), so it cannot draft. Use another model."
            ) from failure
    # Inkling drops rows that pad its head, and a model on several devices returns logits on its first one.
    actual = actual[: len(expected)].to(expected.device)
    tolerance = 1e-3 if drafter.dtype in (torch.float32, torch.float64) else 5e-2
    error = float((actual - expected).abs().max())
    if not error <= tolerance * max(1.0, float(expected.abs().max())):
        raise ValueError(
            f"{type(model).__name__} turns hidden states into logits in a way that hf_specdecpp does not know "
            f"(largest difference {error:.3g}), so its probabilities would be wrong. Use another model."
        )
