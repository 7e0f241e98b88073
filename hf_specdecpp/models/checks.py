"""Errors for models and caches that cannot be assisted, and limits of draft lengths by rotary frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache, QuantizedCache

from hf_specdecpp.models.causal_lm import CausalLM, base_model, cache_argument, forward_parameters
from hf_specdecpp.models.quantised import quantised_activations

WITHOUT_ASSISTANT = "Generate without an assistant"
ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def check_target(target: CausalLM, recurrent: bool = False) -> None:
    """Raise `ValueError` if the model cannot be a target. `recurrent`: accept models with recurrent states."""
    name = type(target).__name__
    if not target.can_generate():
        raise ValueError(f"{name} cannot generate, so there is nothing to assist. Load it with AutoModelForCausalLM.")
    # During generation a PEFT model sets its own method on the model inside.
    if isinstance(owner := getattr(target.prepare_inputs_for_generation, "__self__", None), PeftModel):
        base_model(owner)
    if (reason := _no_assistance(target, recurrent)) is not None:
        raise ValueError(f"{name} {reason}. {WITHOUT_ASSISTANT}.")


def _no_assistance(target: CausalLM, recurrent: bool) -> str | None:
    """Why the model cannot be a target, as the predicate of an error message; `None` if it can."""
    config = target.config
    if config.is_encoder_decoder:
        return (
            "is an encoder-decoder model, and hf_specdecpp assists decoder-only ones. transformers itself takes a "
            "smaller model of its kind as assistant_model= (for Whisper a distil-whisper)"
        )
    if not recurrent and keeps_recurrent_state(target):
        return "keeps a recurrent state, which cannot be rolled back when a candidate is rejected"
    parameters = sorted(forward_parameters(type(target)))
    if cache_argument(target) not in parameters or not target._supports_default_dynamic_cache():
        return "does not use a key-value cache of transformers, which candidates need to be verified and taken back"
    if others := [name for name in parameters if name.endswith("_cache") and not name.startswith("use_")]:
        return f"keeps {', '.join(others)} beside its cache, which cannot be taken back when a candidate is rejected"
    if next(each for each in type(target).__mro__ if "_sample" in vars(each)) is not GenerationMixin:
        return "generates with a loop of its own (_sample), which assisted generation would not run"
    if config.model_type == "prophetnet":
        return "reads one token at a time once it has a cache, so it cannot verify several at once"
    if config.model_type == "blt":
        return "reads bytes in patches, which rejected candidates would change"
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird
        return 'attends to blocks that depend on the tokens of a pass; load it with attention_type="original_full"'
    if (chosen := getattr(config.get_text_config(), "index_topk", None)) is not None:  # DeepSeek V3.2, GLM 5
        return (
            f"attends to the index_topk={chosen} tokens that an indexer chooses, and in transformers the choice "
            "depends on how many tokens a pass reads, so a longer text would be another one"
        )
    if config.model_type == "cpmant":
        return "reads the tokens of a pass in both directions, so candidates would see those that follow them"
    width = config.get_text_config().vocab_size
    if (predicted := getattr(target.get_output_embeddings(), "out_features", width)) < width:
        return f"predicts {predicted} of its {width} tokens, so candidates cannot be compared with it"
    if (layers := quantised_activations(target)) is not None:
        return (
            f"quantizes activations ({layers}), so a rounding difference between a pass over several candidates and "
            "passes over each grows to whole steps of the quantization, and the text would be another one. Quantize "
            "weights only: torchao's Int8WeightOnlyConfig, or bitsandbytes' load_in_4bit"
        )
    return None


def keeps_recurrent_state(model: CausalLM) -> bool:
    """Whether a layer of the model has a recurrent state, which cannot be rolled back.

    transformers marks whole classes (`_is_stateful`), but a model of such a class may have attention only (Granite 4).
    """
    types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if "linear_attention" in types:
        return True
    return getattr(model, "_is_stateful", False) and not (types and types <= ATTENTION)


def check_cache(cache: object) -> None:
    """Raise `ValueError` unless the target's `cache` is one of transformers' caches that can drop rejected tokens."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The target keeps no key-value cache of transformers ({type(cache).__name__}), so candidates cannot be "
            f"verified and taken back. {WITHOUT_ASSISTANT}."
        )
    if isinstance(cache, QuantizedCache | EncoderDecoderCache):
        raise ValueError(
            f"{type(cache).__name__} cannot be rolled back when a candidate is rejected. Use a DynamicCache, or "
            "generate without an assistant."
        )


@dataclass(frozen=True)
class FrequencyChange:
    """A sequence length at which the rotary frequencies of a model change.

    transformers rotates all tokens of a pass by the frequencies of the last token. With `rope_type="longrope"` these
    change after `original_max_position_embeddings` tokens, with `"dynamic"` at every token after
    `max_position_embeddings`. Candidates beyond a change would alter the keys of earlier tokens, which are cached.

    Example: with `length` 4096 a sequence of 4094 tokens, the last of them unread, may have 2 candidates. Sequences of
    4096 and 4097 tokens may have none: their passes are the last before the change and the first after it, in which
    Phi-3 reads the whole sequence again. Longer sequences may have any number, unless `every_token`."""

    length: int  # tokens of the longest sequence before the change
    every_token: bool  # whether the frequencies change again at every further token

    def max_candidates(self, length: int) -> int | None:
        """The most candidates after a sequence of `length` tokens, of which the last is unread; `None`: no limit."""
        if length <= self.length:
            return self.length - length
        return 0 if self.every_token or length == self.length + 1 else None


def frequency_changes(config: Any) -> list[FrequencyChange]:
    """The changes in a model with this text config, by length: usually none, at most one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]
    changes = set()
    for kind in kinds:
        if "dynamic" in kind["rope_type"]:
            changes.add(FrequencyChange(config.max_position_embeddings, every_token=True))
        elif kind["rope_type"] == "longrope":
            changes.add(FrequencyChange(kind["original_max_position_embeddings"], every_token=False))
    return sorted(changes, key=lambda change: change.length)
