"""The keys and values in a target's cache that a draft without any of its own attends to (`SharedRows`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp.drafting.reading import TargetText


@dataclass(frozen=True)
class SharedRows:
    """What the draft sees in one round: the verified text but for its last token, which the target has not read yet.

    Attributes:
        rows: by kind of layer: keys and values, `[1, kv_heads, n, head_dim]` each.
        masks: by kind of layer: bool `[1, 1, 1, n]`, or `None` where all of them are seen.
        position: `[1, 1]`, of the text's last token. All candidates of a round stand there.
    """

    rows: dict[str, tuple[Tensor, Tensor]]
    masks: dict[str, Tensor | None]
    position: Tensor


def sources(config: Any) -> dict[str, int]:
    """The target's layer whose keys and values the draft's layers of each kind read: the last that has its own.

    Example: of six layers `s s f s s f` the last two read those of others. Layer 3 is the source of kind s, 2 of f.
    """
    with_own = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    return {kind: place for place, kind in enumerate(with_own)}


def heads_of(attention: Any) -> tuple[int, int]:
    """How many heads of keys a layer attends to, and how many numbers they have."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


def check_readable(cache: Any) -> None:
    """Raise `ValueError` if the keys and values of a cache do not lie in the order of the text."""
    if isinstance(cache, StaticCache) or (cache is not None and cache.offloading):
        raise ValueError(
            f"A Gemma 4 assistant reads the keys and values in the target's cache, which a {type(cache).__name__} "
            "keeps in another order or on another device (cache_implementation='static' or 'offloaded'). Leave "
            "cache_implementation unset."
        )


def rows_of(text: TargetText, found: Mapping[str, int], window: int, device: torch.device) -> SharedRows:
    """What a draft sees of a target's text.

    Args:
        found: by kind of layer: where its keys and values are (`sources`).
        window: of layers with a window, which see as much as the target's: the token itself, and `window - 1` before.
        device: the draft's.
    """
    shown, rows, masks = text.shown, {}, {}
    for kind, place in found.items():
        layer = text.cache.layers[place]
        first = max(layer.keys.shape[2] - window + 1, 0) if kind == "sliding_attention" else 0
        keys, values = (each[:, :, first:].to(device) for each in (layer.keys, layer.values))
        rows[kind] = keys, values
        masks[kind] = None if shown is None else _mask(shown[shown.shape[0] - keys.shape[2] :].to(device))
    return SharedRows(rows, masks, text.position.to(device))


def _mask(shown: Tensor) -> Tensor | None:
    """Hides what the prompt masked, unless that is all there is."""
    return shown[None, None, None] if bool(shown.any()) else None
