"""Checks whether a call supports speculation, before its first pass or after the prompt's; errors name the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria, MaxTimeCriteria
from transformers.utils import logging

from hf_specdecpp.caches.masks import MASKED, layer_types, unknown_window, why_no_holes
from hf_specdecpp.caches.trial import can_be_saved
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CACHE, CACHE_NAMES, CausalLM, cache_among, why_no_positions
from hf_specdecpp.models.checks import check_cache, frequency_changes
from hf_specdecpp.models.foreign import ForeignPasses, foreign_passes
from hf_specdecpp.sampling.processors import class_of, name_of, remembers

logger = logging.get_logger("hf_specdecpp")

# Arguments of a forward that are supported in batches.
BATCH_KWARGS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "output_attentions",
    "output_hidden_states", "cache_position",
}  # fmt: skip


# Settings of transformers' own speculation, and the corresponding settings here.
INSTEAD = {
    "num_assistant_tokens": "assistant.speculation = SpeculationConfig(rule='fixed', num_tokens={})",
    "num_assistant_tokens_schedule": "assistant.speculation.rule",
    "assistant_confidence_threshold": "assistant.speculation = SpeculationConfig(rule='threshold', threshold=0.7)",
    "prompt_lookup_num_tokens": "assistant.speculation.lookup = True",
    "max_matching_ngram_size": "assistant.speculation.lookup = True",
    "assistant_early_exit": "SpecDecPPAssistant.from_early_exit(model, layers={})",
}
OWN_SPECULATION = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")

NO_BATCH = "A batch of sequences cannot be assisted here: {}. Call generate() once a sequence."
# Arguments of decoding methods that are not passed to the model's forward.
MODE_KWARGS = ("synced_gpus", "tokenizer", "assistant_tokenizer")


@dataclass(frozen=True)
class Call:
    """A `generate()` call as prepared by transformers; `model_kwargs` are arguments of the target's forward method."""

    target: CausalLM
    processors: Any
    criteria: Any
    config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, target: CausalLM, processors: Any, criteria: Any, config: GenerationConfig, streamer: Any = None,
        **kwargs: Any,
    ) -> Call:  # fmt: skip
        """A `Call` from the arguments of a decoding method of transformers, such as `_sample`."""
        model_kwargs = {name: value for name, value in kwargs.items() if name not in MODE_KWARGS}
        return cls(target, processors, criteria, config, streamer, model_kwargs)


class LateRefusalError(ValueError):
    """A call is not supported, which was found only after the prompt's pass, before any token was emitted. With a
    default assistant, the call falls back to plain `generate()`; with `assistant_model=`, it raises this error."""


class PlainCallError(ValueError):
    """Hooks or patches of the target rule out verification, so the call falls back to plain `generate()`."""


def check_object(assistant: object) -> None:
    """Raise `TypeError` if `assistant` is a name, a path or a class."""
    if isinstance(assistant, str | Path | type):
        name = assistant.__name__ if isinstance(assistant, type) else repr(str(assistant))
        raise TypeError(
            f"assistant_model={name} is not an assistant but its name or class. Make one: assist(model, 'org/head')."
        )


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if the mode of generation or a setting of the call does not support speculation."""
    if getattr(config, "dola_layers", None) is not None:
        raise ValueError(
            f"dola_layers={config.dola_layers!r}: DoLa decodes from differences between layers, which no candidate can "
            "be verified by here. Leave it unset, or generate without an assistant."
        )
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the output; hf_specdecpp is lossless. Leave it unset.")
    if config.num_beams not in (None, 1) or mode is not GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"An assistant cannot help with {mode.value.replace('_', ' ')} (num_beams={config.num_beams}): it proposes "
            f"one continuation of one sequence. Set num_beams=1, or generate without an assistant."
        )
    for name, draft in (("speculation_type", "draft"), ("use_mtp", "'mtp'")):
        if value := getattr(config, name, None):
            raise ValueError(
                f"{name}={value!r} is transformers' own speculation, and this assistant drafts and verifies by itself. "
                f"Leave it out. Such a draft works here by assist(model, {draft})."
            )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False, given to generate() or in the model's own config: verifying candidates needs the "
            "target's key-value cache. Pass use_cache=True to generate()."
        )
    if config.cache_implementation not in (None, "dynamic", "offloaded", "static"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be rolled back when a candidate is rejected. "
            'Leave it unset, choose "static", or generate without an assistant.'
        )
    if mode_kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True: ranks would run different numbers of rounds. Generate without an assistant under "
            "FSDP or ZeRO-3."
        )


def own_speculation(config: GenerationConfig, target: CausalLM) -> tuple[str, bool]:
    """For a call with a setting of transformers' own speculation: a message why the default assistant is not used, and
    whether the setting comes from the model's generation config, so that the user may not know it."""
    name = next(name for name in OWN_SPECULATION if getattr(config, name, None))
    value = getattr(config, name)
    is_model_s = getattr(target.generation_config, name, None) == value
    where = "in the model's generation_config" if is_model_s else "given to generate()"
    return (
        f"{name}={value!r}, {where}, asks for transformers' own speculation, which runs in its place. To use the "
        "assistant set it to None.",
        is_model_s,
    )


def warn_of_ignored(config: GenerationConfig) -> None:
    """Warn once of settings of `config` that have no effect on an assistant, and name the settings to use instead."""
    usual = config._get_default_generation_params()
    for name, instead in INSTEAD.items():
        if (value := getattr(config, name, None)) not in (None, usual.get(name)):
            logger.warning_once(
                f"{name}={value!r}, given to generate() or in the model's generation_config, has no effect on this "
                f"assistant. Its own settings say how it drafts: {instead.format(value)}."
            )


def ends_predictably(criterion: Any, config: GenerationConfig) -> bool:
    """Whether a stopping criterion ends sequences only where `config` alone predicts it (length, EOS, time)."""
    if class_of(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    if class_of(criterion) is EosTokenCriteria:
        return causal_lm.eos_ids(config).issuperset(criterion.eos_token_id.tolist())
    return class_of(criterion) is MaxTimeCriteria  # time limits may be noticed a round later


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for unsupported inputs. Runs before the first forward pass."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("The prompt was given as inputs_embeds, which the draft cannot read. Pass input_ids.")
    if input_ids.shape[1] == 0:
        raise ValueError("The prompt is empty: input_ids holds no token that could be continued. Pass at least one.")
    if model_kwargs.get("cross_attention_mask") is not None:
        raise ValueError(
            "The target keeps its image in cross-attention layers, whose cache cannot be rolled back when a candidate "
            "is rejected. Generate without an assistant where the prompt has an image."
        )
    others = [name for name, value in model_kwargs.items() if name not in CACHE_NAMES and _is_state(value)]
    if others:
        raise ValueError(
            f"{', '.join(others)}: beside its cache the target goes through a state that cannot be taken back when a "
            "candidate is rejected. Generate without an assistant."
        )
    check_cache(cache_among(model_kwargs))


def check_foreign(target: CausalLM, cache: Cache, rows: int) -> ForeignPasses | None:
    """For a target with hooks or patches, the results so far of their test (`Trial`); else `None`. `PlainCallError` if
    they make passes over several tokens wrong, or if these cannot be compared with passes over one token."""
    passes = foreign_passes(target, cache)
    can_compare = rows == 1 and can_be_saved(cache) and causal_lm.num_processes(target) == 1
    if passes is None or (passes.reason is None and can_compare):
        return passes
    kinds = ", ".join(sorted({type(each).__name__ for each in (cache, *cache.layers)}))
    of = f"a batch of {rows}" if rows > 1 else f"several processes, or of a text in {kinds}"
    not_compared = (
        f"{type(target).__name__} runs {passes.name}, which may treat several tokens otherwise than one. Passes of "
        f"{of} are not compared with passes over one token"
    )
    raise PlainCallError(f"{passes.reason or not_compared}.")


def check_prompt(target: CausalLM, outputs: Any, mask: Tensor | None) -> None:
    """Called after the prompts' pass with its `outputs`: raises `LateRefusalError` if its cache cannot be rolled back,
    or if padding makes logits NaN, as in eager attention with sliding windows. `mask`: `[rows, length]` or `None`.

    Plain generation emits wrong tokens then, until the padding has left the windows. Here a cache that can be rolled
    back keeps the padding longer, and 0 times NaN is NaN."""
    try:
        check_cache(cache_among(outputs))
    except ValueError as reason:
        raise LateRefusalError(str(reason)) from reason
    if mask is None or bool(mask.all()):
        return
    spoilt = [row for row, own in enumerate(outputs.logits) if bool(own[-1].isnan().any())]
    if padded := [row for row in spoilt if not bool(mask[row].all())]:
        raise LateRefusalError(
            f"Row {padded[0]} of the prompts has padding, in which {type(target).__name__} computes NaN with "
            f"attn_implementation={target.config._attn_implementation!r}: plain generate() gives a wrong text, too. "
            'Load the target with attn_implementation="sdpa", or call generate() for each prompt without padding.'
        )


def _is_state(value: object) -> bool:
    """Whether an argument of the forward method changes from pass to pass: another cache, or an iterator of inputs."""
    return isinstance(value, Cache | Iterator) or type(value).__name__.endswith("Cache")


def no_positions(target: CausalLM) -> str:
    """The reason, for a message, why a target whose forward takes no position ids does not support batches."""
    why = why_no_positions(target) if "forward" in vars(target) else "takes no positions of its own for each row"
    return f"this target {why}, which rows of different length need"


def gives_positions(target: CausalLM, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether transformers prepares position ids for the target's forward; some families count positions themselves."""
    inputs = target.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
    return inputs.get("position_ids") is not None


def check_processors(processors: Iterable[Any]) -> None:
    """Raise the `ValueError` of plain `generate()` for processors that take more than token ids and scores."""
    nothing: Any = None
    for each in processors:
        if len(signature(each.__call__).parameters) > 2:
            LogitsProcessorList([each])(nothing, nothing)


def check_batch(call: Call, has_trees: bool) -> None:
    """Raise `ValueError` for unsupported batches. Runs before the first forward pass."""
    target, model_kwargs, criteria, config = call.target, call.model_kwargs, call.criteria, call.config
    if in_order := [each for each in (*call.processors, *criteria) if remembers(each)]:
        raise ValueError(
            f"{name_of(in_order[0])} may keep state from call to call, for all rows of a batch together. If it depends "
            "on its arguments alone, give it the attribute reads_prefix_only = True; otherwise call generate() once a "
            "sequence."
        )
    mask, cache = model_kwargs.get("attention_mask"), cache_among(model_kwargs)
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError(
            "The batch is padded on the right, so rows would go on after padding. Use padding_side='left', as plain "
            "generate() needs, too."
        )
    reason = None
    if call.streamer is not None:
        reason = "a streamer prints one sequence"
    elif has_trees:
        reason = "trees are verified for one sequence at a time: set tree=False"
    elif config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        reason = "hidden states and attentions are returned for single sequences"
    elif config._pad_token_tensor is None and any(class_of(each) is not MaxLengthCriteria for each in criteria):
        reason = "rows that end early are padded, and there is no pad_token_id"
    elif others := sorted(name for name in set(model_kwargs) - BATCH_KWARGS if _is_given(model_kwargs[name])):
        reason = f"{', '.join(others)} are for single sequences"
    elif (positions := model_kwargs.get("position_ids")) is None or positions.dim() != 2:
        reason = no_positions(target)
    elif cache.get_seq_length() > 0 and any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        reason = "a cache with windows that is carried on has dropped tokens, and the rows need them"
    elif (unfit := _unfit_for_length(target, criteria)) is not None:
        reason = unfit
    elif _adapter_names(target):
        reason = "each row has an adapter of its own (adapter_names), and PEFT expects all rows in every pass"
    elif (unfit := _unfit_for_rows(target)) is not None:
        reason = f"{type(target).__name__} {unfit}, so rows of different length cannot share its cache"
    if reason is not None:
        raise ValueError(NO_BATCH.format(reason))


def _is_given(value: object) -> bool:
    """Whether an argument has a value; without an image transformers passes an empty mapping."""
    return value is not None and not (isinstance(value, Mapping) and not value)


def _unfit_for_length(target: CausalLM, criteria: Iterable[Any]) -> str | None:
    """The reason why sequences of the length allowed by `criteria` are not supported in batches, or `None`."""
    changes = frequency_changes(target.config.get_text_config(decoder=True))
    longest = min((each.max_length for each in criteria if class_of(each) is MaxLengthCriteria), default=None)
    if not changes or (longest is not None and longest <= changes[0].length):
        return None
    return (
        f"the texts may grow beyond {changes[0].length} tokens, where the rotary frequencies of "
        f"{type(target).__name__} change for all rows together, and rows get there at different times. Keep them "
        "shorter (max_length)"
    )


def _adapter_names(target: CausalLM) -> bool:
    """Whether each row has an adapter of its own: PEFT then passes `adapter_names` to its layers by hooks."""
    hooks = (hook for module in causal_lm.modules_of(target) for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def _unfit_for_rows(target: CausalLM) -> str | None:
    """The reason why rows of the target's cache cannot advance by different numbers of tokens, or `None`.
    `BatchContext` checks the layers of the cache."""
    config = target.config.get_text_config(decoder=True)
    if (reason := why_no_holes(config)) is not None:
        return reason
    if config.model_type == "git":
        return "widens its mask by an image's rows, whether its cache has them or not"
    kinds = set(layer_types(config, config.num_hidden_layers))
    if "chunked_attention" in kinds:
        return "attends in chunks of the cache"
    if "sliding_attention" in kinds and config._attn_implementation not in MASKED:
        return f"has windows, and attn_implementation={config._attn_implementation!r} takes no mask that they need"
    return unknown_window(target, config)
