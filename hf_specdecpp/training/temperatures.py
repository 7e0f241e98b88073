"""The temperatures that a head is trained for."""

from __future__ import annotations

from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig


def sampling_at(config: TrainingConfig, temperature: float) -> Sampling:
    """How the head's labels see texts written at `temperature`: as they were written, unless `head.top_k` differs."""
    return Sampling(temperature, config.rollouts.top_k if config.head.top_k is None else config.head.top_k)


def head_temperatures(config: TrainingConfig) -> list[float]:
    """The temperatures that the head is for."""
    return config.rollouts.temperatures if config.head.temperature is None else [config.head.temperature]
