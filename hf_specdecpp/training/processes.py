"""Which of several processes is this (`accelerate launch`), and on what device?"""

from __future__ import annotations

import platform

import torch
from accelerate import PartialState


def process_state() -> PartialState:
    """This process among those of the run.

    accelerate overlooks its siblings on a machine without accelerator unless told that the CPU is meant, and then each
    would take itself for the only one and write the same files.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


def device_name(device: torch.device) -> str:
    """What the card calls a device: its model where torch knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})" if device.type == "cpu" else device.type
