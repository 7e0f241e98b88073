"""The further outputs of `return_dict_in_generate`, with one entry per token as in plain `generate()`."""

from __future__ import annotations

import copy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.caches.masks import layer_types
from hf_specdecpp.models.causal_lm import CACHE, cache_among

KINDS = ("scores", "logits", "hidden_states", "attentions")


class TokenRecords:
    """Scores, logits, hidden states and attentions of a sequence. `kept`: for each requested name a tuple by token."""

    def __init__(self, config: GenerationConfig, text_config: Any) -> None:
        asked = [name for name in KINDS if config.return_dict_in_generate and getattr(config, f"output_{name}")]
        self.kept: dict[str, tuple[Any, ...]] = dict.fromkeys(asked, ())
        self._text_config = text_config

    @classmethod
    def of_batch(cls, rows: list[TokenRecords], count: int) -> TokenRecords:
        """Combine scores and logits of a batch's rows: `[batch, vocab]` for each of the first `count` tokens, with
        zeros for rows that have ended."""
        together = copy.copy(rows[0])
        together.kept = {name: _by_step([row.kept[name][:count] for row in rows]) for name in together.kept}
        return together

    def output(self, sequences: Tensor, cache: Any) -> GenerateDecoderOnlyOutput:
        """The output of `generate()` with token ids `sequences` `[batch, length]`, these records and the `cache`."""
        output: Any = {"sequences": sequences, **self.kept, CACHE: cache}
        return GenerateDecoderOnlyOutput(**output)

    def add_scores(self, scores: Tensor, logits: Tensor, count: int) -> None:
        """Append the first `count` rows of processed `scores` and raw `logits`, both `[n, vocab]`. Rows are copied,
        because views would keep all n rows in memory."""
        for name, rows in (("scores", scores), ("logits", logits)):
            if name in self.kept:
                self.kept[name] += tuple(row.clone() for row in rows[:count].split(1))

    def add_states(
        self, outputs: Any, count: int, num_candidates: int, path: list[int] | None = None, again: int = 0
    ) -> None:
        """Append the hidden states and attentions from which the first `count` emitted tokens were chosen.

        The first call is for the prompt's pass: one entry with all positions. A later pass reads `again` pending
        tokens, the last token and `num_candidates` candidates; each emitted token has an entry with one position. In a
        tree these positions are `path`, counted from the last token: 0 and those of the accepted candidates."""
        path = list(range(count)) if path is None else path[:count]
        if "hidden_states" in self.kept:
            layers = tuple(outputs.hidden_states)
            entries = [tuple(_position(layer, again + place) for layer in layers) for place in path]
            self._append("hidden_states", layers, entries)
        if "attentions" in self.kept:
            layers = tuple(layer[:, :, again:] for layer in outputs.attentions)  # none with sdpa
            windows = _windows(cache_among(outputs).layers, self._text_config, len(layers)) if layers else []
            pairs = list(zip(layers, windows, strict=True))
            paths = [path[: i + 1] for i in range(count)]
            entries = [tuple(_attention_row(*pair, nodes, num_candidates) for pair in pairs) for nodes in paths]
            self._append("attentions", layers, entries)

    def _append(self, name: str, of_prompt: tuple[Tensor, ...], entries: list[tuple[Tensor, ...]]) -> None:
        self.kept[name] += tuple(entries) if self.kept[name] else (of_prompt,)


def _by_step(rows: list[Any]) -> tuple[Tensor, ...]:
    """For each token the records `[1, vocab]` of all rows together: `[batch, vocab]`."""
    return tuple(map(torch.cat, zip_longest(*rows, fillvalue=torch.zeros_like(rows[0][0]))))


def _position(layer: Tensor, place: int) -> Tensor:
    """A copy of one position of a layer's states `[1, length, ...]`, in Gemma 3n `[streams, 1, length, size]`."""
    row = layer[:, place : place + 1] if layer.shape[0] == 1 else layer[..., place : place + 1, :]
    return row.clone()


def _windows(layers: list[Any], config: Any, count: int) -> list[int | None]:
    """The sliding window (keys; `None`: none) of each of `count` attention layers, from the `layers` of a cache."""
    kinds = layer_types(config, len(layers))  # in transformers 5.18 layers that share keys are not in the cache
    sizes: dict[str, int | None] = {}
    for kind, layer in zip(kinds, layers, strict=False):
        if isinstance(layer, CacheLayerMixin):  # other layers share keys or have none
            sizes[kind] = getattr(layer, "sliding_window", None)
    # Dory runs its middle layers several times, then its last ones. The cache holds those of later runs at its end.
    if (loops := getattr(config, "n_recurrent_loops", 1)) > 1:
        first, last = config.n_input_layers, config.num_hidden_layers - config.n_output_layers
        kinds = [*kinds[:first], *kinds[first:last] * loops, *kinds[last : config.num_hidden_layers]]
    return [sizes[kind] for kind in kinds if kind in sizes] if any(sizes.values()) else [None] * count


def _attention_row(attention: Tensor, window: int | None, path: list[int], num_candidates: int) -> Tensor:
    """Attention `[1, heads, 1, keys]` of the last node of `path`, with the keys of a pass over that token alone."""
    num_text = attention.shape[-1] - num_candidates - 1
    row = attention[:, :, path[-1] : path[-1] + 1]
    if path == list(range(len(path))):
        row = row[..., : num_text + len(path)]
    else:
        row = torch.cat((row[..., :num_text], row[..., num_text:][..., path]), dim=-1)
    return (row[..., -window:] if window is not None else row).clone()
