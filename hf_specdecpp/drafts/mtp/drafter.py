"""Several multi-token layers as one generation sees them (`MtpDraft`), and their side of a text (`LayersReading`).

A single layer is a `Drafter`: from candidate to candidate it reads its own states, as other drafts do that read the
target's. Of several, the last does so once each has drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.state_draft import StateDraft
from hf_specdecpp.models.causal_lm import CausalLM


class MtpDraft(StateDraft):
    """Drafts with several multi-token layers, of which each proposes one candidate of a round; the last goes on alone.

    Args:
        layers: in the order in which they draft, each with its input.
        target: whose they are.
    """

    def __init__(self, layers: Sequence[Drafter], target: CausalLM) -> None:
        self.layers, self.first = list(layers), layers[0]
        super().__init__(self.first.model, self.first.fusion, target)
        self.lacks = {
            "trees": f"The target has {len(self.layers)} multi-token layers, and each of them reads the rows of the "
            "one before it, which differ from path to path: nodes of a tree share none. Draft chains (tree=None); a "
            "single multi-token layer drafts trees, too.",
        }

    @property
    def parts(self) -> list[nn.Module]:
        return list(dict.fromkeys(part for layer in self.layers for part in layer.parts))

    @property
    def max_length(self) -> float:
        return self.first.max_length

    def session(self, vocab_size: int) -> Reading:
        return LayersReading(self.layers, vocab_size)

    def describe(self) -> dict[str, Any]:
        return {**self.first.describe(), "multi_token_layers": len(self.layers)}


class Rows:
    """What one layer has read: its cache, and the states that it reads.

    Row r of the layer k (from 0) reads the token at r + k + 1 with the state of row r: the target's at r for the first
    layer, what the layer before returned in that row for others.

    Attributes:
        count: rows in the cache.
        states: `[1, n, hidden_size]`, those of the rows from `first` on; `None` before there were any.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.cache = drafter, DynamicCache(config=drafter.text_config)
        self.cache.activate_past_recording()  # of the prompt, too, its last rows are taken back
        self.count = self.first = 0
        self.states: Any = None

    def offer(self, states: Tensor, row: int) -> None:
        """States of the rows from `row` on, in the place of what was known of them."""
        if self.states is None:
            self.states, self.first = states, row
        else:
            self.states = torch.cat((self.states[:, : row - self.first], states), dim=1)

    def forget(self, count: int, kept: int) -> None:
        """Keep the first `count` rows at most, and the states from `kept` rows before these on."""
        if self.count:
            self.cache.crop(-max(self.count - count, 0))  # without any to drop, too: windows shrink back
        self.count = min(self.count, count)
        drop = max(self.count - kept - self.first, 0)
        if self.states is not None and drop:
            self.states, self.first = self.states[:, drop:].clone(), self.first + drop

    def read(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Read rows `[1, n]`: what the layer returns in them, `[1, n, hidden_size]`."""
        hidden = self.drafter.hidden_states(tokens, self.cache, states)
        self.count += tokens.shape[1]
        return hidden


class LayersReading(Reading):
    """What the layers have read of one text.

    Example: two layers, after the text `a b c d` with the target's states at a, b and c. The first layer reads b, c, d
    with these, which gives the candidate e. The second reads c, d, e with what the first returned there, which gives f.
    For a third candidate it goes on, and reads f with what it has just returned. Of these rows that of e stands if e is
    accepted; the last one never does.

    Args:
        layers: in the order in which they draft.
        vocab_size: width of the target's logits.
    """

    def __init__(self, layers: Sequence[Drafter], vocab_size: int) -> None:
        super().__init__()
        self.layers, self.vocab_size, self.embed = [Rows(layer) for layer in layers], vocab_size, layers[0].embed
        self.device = layers[0].device
        self._text: Tensor = torch.empty(1, 0, dtype=torch.long, device=self.device)
        self._last: Any = None  # what the last layer returned in its last row, `[1, 1, hidden_size]`

    @property
    def length(self) -> int:
        return self._text.shape[1]

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        if states is None:
            raise ValueError("Multi-token layers read the target's states, and none were handed over.")
        before = self.length
        for place, layer in enumerate(self.layers):
            # Rows that read a token of the text that stands; further ones of the last layer read states of its own.
            layer.forget(max(min(before - 1, before + num_accepted - 1 - place), 0), len(self.layers))
        tokens, states = new_tokens.to(self.device), states.to(self.device)
        if not before:  # fewer states than tokens where a cache is carried on
            tokens = tokens[:, -(states.shape[1] + 1) :]
        self._text = torch.cat((self._text, tokens), dim=1)
        rows = self.length - 1
        states = states[:, -min(states.shape[1], rows) :]
        self.layers[0].offer(states, rows - states.shape[1])
        self.unread, self.passes = rows - self.layers[0].count, 0

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        place = min(len(candidates), len(self.layers) - 1)
        layer, rows = self.layers[place], self.length - 1
        if len(candidates) < len(self.layers):
            begin = layer.count
            first = begin + place + 1  # the token that the first unread row reads
            drawn = [each.view(1, 1) for each in candidates[max(first - self.length, 0) :]]
            states = layer.states[:, begin - layer.first : rows - layer.first]
            hidden = layer.read(torch.cat((self._text[:, first:], *drawn), dim=1), states)
            if place + 1 < len(self.layers):
                self.layers[place + 1].offer(hidden, begin)
        else:
            hidden = layer.read(candidates[-1].view(1, 1), self._last)
        self._last, self.unread = hidden[:, -1:], 0
        self.passes += 1
        return layer.drafter.logits(hidden[0, -1], self.vocab_size), hidden[0, -1]
