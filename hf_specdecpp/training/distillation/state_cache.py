"""The target's hidden states at all training tokens, on disk: later epochs need no pass of the target."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

logger = logging.get_logger("hf_specdecpp")

SPARE = 1.1  # times its size must be free on the disk


class StateCache:
    """States by text, filled as they are computed. A run that goes on finds what it had; processes share the files.

    Args:
        folder: of the two files.
        lengths: tokens of each text.
        width: numbers of a state.
        dtype: of the states.

    Raises:
        OSError: the disk has too little room.
    """

    def __init__(self, folder: Path, lengths: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.lengths, self.begins = list(lengths), [0, *accumulate(lengths)]
        states, known = folder / "states.bin", folder / "known.bin"
        size = self.begins[-1] * width
        needed = size * torch.finfo(dtype).bits // 8
        logger.info(f"The target's states at {self.begins[-1]} tokens take {needed / 1e9:.2f} GB in {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
        present = states.stat().st_size if states.is_file() else 0
        if present != needed:
            known.unlink(missing_ok=True)
        if (free := shutil.disk_usage(folder).free + present) < SPARE * needed:
            raise OSError(
                f"The target's states would take {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free. Make "
                "room, or set distill.cache_states: false, which computes them in each epoch."
            )
        self.states = torch.from_file(str(states), shared=True, size=size, dtype=dtype).view(-1, width)
        self.known = torch.from_file(str(known), shared=True, size=len(self.lengths), dtype=torch.uint8)

    def get(self, rows: Sequence[int], length: int) -> Tensor | None:
        """States `[batch, length, width]` of some texts, padded with zeros, or `None` if those of one are not known."""
        if not all(self.known[row] for row in rows):
            return None
        found = [self.states[self.begins[row] : self.begins[row + 1]] for row in rows]
        return torch.stack([functional.pad(each, (0, 0, 0, length - len(each))) for each in found])

    def put(self, rows: Sequence[int], states: Tensor) -> None:
        """Keep `[batch, length, width]`, which is padded on the right."""
        for row, of_text in zip(rows, states.cpu(), strict=True):
            self.states[self.begins[row] : self.begins[row + 1]] = of_text[: self.lengths[row]]
            self.known[row] = 1  # after the states
