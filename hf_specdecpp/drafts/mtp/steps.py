"""Several multi-token layers in captured rounds (`LayerSteps`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from hf_specdecpp.captured.rooms import RoomCache
from hf_specdecpp.drafting.round_steps import RoundSteps, Unrolled, Window, at_last, read, read_chain


class LayerSteps(RoundSteps):
    """As `LayersReading`, but that all layers read the rows of the window anew: of a row that read a candidate nothing
    is kept.

    Example: two layers, and a window of b c d after the text `a`. The first layer reads b, c, d with the target's
    states at a, b and c, which gives the candidate e. The second reads c, d, e with what the first returned there.
    When e and f stand and g follows, the next window is d e f g: the second layer reads e, f, g and a candidate.

    Args:
        layers: in the order in which they draft; their models are captured.
        vocab_size: width of the target's logits.
    """

    draws_trees = False

    def __init__(self, layers: Sequence[Any], vocab_size: int) -> None:
        self.layers = layers
        super().__init__(self.layers[0], vocab_size, tuple(map(id, layers)), self.layers[0].fusion.width)
        self.num_layers, self.again, self.least = len(layers), len(layers) - 1, len(layers)

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:  # noqa: ARG002 - chains alone
        parts = [cache.part(place, 1) for place in range(len(self.layers))]  # each layer is the first of its model
        tokens, count = functional.pad(window.tokens, (0, len(parts))), window.tokens.shape[1]
        states: Any = window.states
        for place, (layer, part) in enumerate(zip(self.layers, parts, strict=True)):
            states = read_chain(layer, part, layer.known(tokens[:, place : place + count]), states)
            hidden = at_last(states, window.last)
            level = yield layer.logits(hidden, self.vocab_size)[:, None], hidden[:, None]
            tokens = tokens.scatter(1, window.last[:, None] + 1 + place, level.tokens)
        cache.length.add_(window.last + 1)
        while True:
            own = Window(layer.known(level.tokens), hidden[:, None], window.last.new_zeros(len(hidden)))
            logits, hidden = read(layer, part, own, self.vocab_size)
            level = yield logits[:, None], hidden[:, None]
