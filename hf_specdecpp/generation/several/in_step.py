"""Verification of the rows of a batch in step (`InStep`), for processors that are asked about all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.several.target import TargetOfRows
from hf_specdecpp.generation.text import Round, Walk


class InStep(AssistedDecoding):
    """The rows of a batch, a token of each at a time: processors are asked as plain `generate()` asks them.

    So a round ends for all rows where it ends for one that goes on, and texts that have not ended are equally long.

    Example: of three rows the target accepts two, three and one candidate. Each row gets two tokens, after which the
    third has nothing more to go on from.

    Args:
        processors: those of the call; rows have none of their own here.
    """

    side: TargetOfRows

    def __init__(self, processors: Callable[[Tensor, Tensor], Tensor], *parts: Any) -> None:
        super().__init__(*parts)
        self.processors = processors

    def verify(self, rounds: list[Round]) -> None:
        walks = {}
        for each in rounds:
            logits = each.outputs.logits[0, -len(each.tree) - 1 :]
            each.text.learn(each.rows, logits)
            walks[id(each.text)] = Walk(each.text, each.rows, logits)
        going = list(walks.values())
        while going:
            for walk, scores in zip(going, self._process(walks, going), strict=True):
                walk.step(scores)
            if all(walk.text.end_length <= walk.ids.shape[1] for walk in walks.values()):
                break  # rows that go on behind their end do so until all rows have ended
            if any(walk.node is None and not (walk.ended and self.side.pads) for walk in going):
                break
            going = [walk for walk in going if walk.node is not None]
        for each in rounds:
            each.verdict = walks[id(each.text)].verdict

    def _process(self, walks: dict[int, Walk], going: list[Walk]) -> list[Tensor]:
        """The processed scores `[vocab]` of those that are `going`. Texts that have ended are padded, as plain
        generation pads them; their scores count for nothing, and are 0."""
        places = [place for place, text in enumerate(self.texts) if walks.get(id(text)) in going]
        texts = [walks[id(text)].ids if id(text) in walks else text.ids for text in self.texts]
        length, pad = going[0].ids.shape[1], self.side.config._pad_token_tensor
        value = 0 if pad is None else int(pad)
        ids = [functional.pad(each, (0, length - each.shape[1]), value=value) for each in texts]
        raw = torch.stack([walk.raw for walk in going])
        scores = raw.new_zeros((len(texts), raw.shape[1])).index_copy(0, torch.tensor(places, device=raw.device), raw)
        return list(self.processors(torch.cat(ids), scores)[places])
