"""Which of several processes is this (`accelerate launch`)?"""

from __future__ import annotations

import torch
from accelerate import PartialState


def process_state() -> PartialState:
    """This process among those of the run.

    accelerate overlooks its siblings on a machine without accelerator unless told that the CPU is meant, and then each
    would take itself for the only one and write the same files.
    """
    return PartialState(cpu=not torch.accelerator.is_available())
