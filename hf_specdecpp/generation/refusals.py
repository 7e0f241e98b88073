"""What assisted generation cannot serve, refused before any work, with the reason."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from hf_specdecpp.models.checks import check_cache


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if this kind of generation cannot be assisted."""
    if config.num_beams not in (None, 1) or mode is not GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"An assistant cannot help with {mode.value.replace('_', ' ')} (num_beams={config.num_beams}): it proposes "
            f"one continuation of one sequence. Set num_beams=1, or generate without assistant_model=."
        )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False, given to generate() or in the model's own config: verifying candidates needs the "
            "target's key-value cache. Pass use_cache=True to generate()."
        )
    if config.cache_implementation not in (None, "dynamic", "offloaded"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be rolled back when a candidate is rejected. "
            "Leave it unset, or generate without assistant_model=."
        )
    check_lossless(config)
    if mode_kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True: ranks would run different numbers of rounds. Generate without assistant_model= under "
            "FSDP or ZeRO-3."
        )


def check_lossless(config: GenerationConfig) -> None:
    """Raise `ValueError` if assisted generation is asked to change the output."""
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the output; hf_specdecpp is lossless. Leave it unset.")


def check_single(input_ids: Tensor) -> None:
    """Raise `ValueError` for several sequences, which transformers' own loop cannot assist."""
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"A batch of {input_ids.shape[0]} sequences: transformers' own assisted generation takes one at a time. "
            "Attach the assistant, assistant.attach(model), which takes batches, or call generate() once a sequence."
        )


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for inputs that cannot be assisted. Runs before the first forward."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("The prompt was given as inputs_embeds, which the draft cannot read. Pass input_ids.")
    if input_ids.shape[1] == 0:
        raise ValueError("The prompt is empty: input_ids holds no token that could be continued. Pass at least one.")
    if model_kwargs.get("cross_attention_mask") is not None:
        raise ValueError(
            "The target keeps its image in cross-attention layers, whose cache cannot be rolled back when a candidate "
            "is rejected. Generate without assistant_model= where the prompt has an image."
        )
    check_cache(model_kwargs.get("past_key_values"))
