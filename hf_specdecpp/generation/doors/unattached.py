"""The unattached door: transformers' own candidate generator calls `assistant.generate()` once a round.

transformers passes an assistant neither the target nor its cache nor the stopping criteria. So the frame of its loop is
inspected once a generation, and what the loop would answer wrongly is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticCache

from hf_specdecpp.caches.masks import check_windows
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.refusals import (
    check_inputs,
    check_lossless,
    check_single,
    ends_as_told,
    warn_of_ignored,
)
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, eos_ids
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.foreign import foreign_passes
from hf_specdecpp.sampling.processors import Processing, name_of, reads_prefix_only, remembers
from hf_specdecpp.trees.tree import DraftTree

# Families whose prompt is a prefix in which every token sees every other, and those whose token types may say so.
PREFIX_ATTENTION, PREFIX_BY_TYPES = {"paligemma"}, {"hrm_text"}
# Families that note where the first pass ended.
COUNT_FROM_PROMPT = {"glm_image", "unlimited_ocr"}
# Where configs name the tokens that an image, a video or a sound is put in the place of.
PLACEHOLDERS = [f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index")]
ATTACH = "Attach the assistant to the target, which handles this: assistant.attach(model)."

COUNTS = (
    "{}: keeps count of its calls, and transformers' assisted generation calls logits processors for candidates, too, "
    "which would change the output. " + ATTACH
)


@dataclass
class DraftOutput:
    """What transformers reads from an assistant's `generate()`."""

    sequences: Tensor
    scores: tuple[Tensor, ...]
    cache: DraftState

    @property
    def past_key_values(self) -> DraftState:
        """The name of `cache` before transformers 5.24."""
        return self.cache


class AssistantGenerationConfig(GenerationConfig):
    """What transformers' loop reads of an assistant. Its settings of drafting have no effect, so they refuse."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__(
            num_assistant_tokens=most_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in vars(self) and "assistant" in name:
            raise AttributeError(
                f"{name}={value!r} has no effect on this assistant, whose own settings say how far it drafts: "
                "assistant.speculation = SpeculationConfig(rule='fixed', num_tokens=5)."
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, _: Any) -> GenerationConfig:
        # transformers takes a copy, to which it adds its own defaults.
        copied = GenerationConfig()
        vars(copied).update({name: value for name, value in vars(self).items() if name != "_is_made"})
        return copied


class DraftState:
    """Travels as the assistant's cache from round to round, so that the assistant itself has no state."""

    def __init__(self, generator: SpecDecPPCandidateGenerator, length: int, num_drafted: int) -> None:
        self.generator = generator
        self.length = length
        self.num_drafted = num_drafted

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """transformers rolls back here; the session rolls itself back when it sees what was emitted."""


@dataclass(frozen=True)
class Round:
    """What `transformers.generation.AssistedCandidateGenerator` asks for in a round."""

    input_ids: Tensor  # `[1, length]`, everything emitted so far
    config: GenerationConfig
    processors: list[Any]  # the target's, but for its minimum length
    min_new_tokens: int  # before a text may end
    max_new_tokens: int  # candidates at most


def draft_round(
    start: Callable[[], SpecDecPPCandidateGenerator], asked: Round, state: DraftState | None
) -> DraftOutput:
    """One round for transformers' loop: `sequences` `[1, length + k]`, `scores` k tensors `[1, vocab]` that q is the
    softmax of. `start` begins a generation, and `state` is what the previous round returned, `None` in the first."""
    input_ids, processors = asked.input_ids, asked.processors
    length, device = input_ids.shape[1], str(input_ids.device)
    if state is None:
        generator = start()
        generator.stats.complete = False
    else:
        generator = state.generator
        emitted = length - state.length
        generator.update_candidate_strategy(input_ids, None, min(emitted - 1, state.num_drafted))
        generator.stats.generated += emitted
    eos = list(eos_ids(asked.config))
    if asked.min_new_tokens > 0 and eos:
        # transformers takes the target's minimum length out of the processors and passes it like this. It comes first
        # again: after top-k it could forbid the only token left.
        processors.insert(0, MinNewTokensLengthLogitsProcessor(length, asked.min_new_tokens, eos, device))
    if state is None and (placeholders := _placeholders()):
        # The loop reads these candidates together with the prompt's images, and would look for one for each.
        processors.insert(0, SuppressTokensLogitsProcessor(placeholders, device))
        if generator.lookup is not None:
            generator.lookup.text.never |= frozenset(placeholders)
    generator.draft_processing = Processing(processors)
    if own := [name_of(each) for each in processors if name_of(each).startswith("transformers.") and remembers(each)]:
        raise ValueError(COUNTS.format(", ".join(own)))
    before = _states(processors)
    with generator.products:
        chain = generator.propose(input_ids, asked.max_new_tokens)
    if changed := [name for (name, old), (_, new) in zip(before, _states(processors), strict=True) if old != new]:
        raise ValueError(COUNTS.format(", ".join(changed)))
    state = DraftState(generator, length, len(chain))
    if not len(chain):  # transformers needs a candidate all the same
        chain = DraftTree.chain([int(input_ids[0, -1])])
    return DraftOutput(
        sequences=torch.cat((input_ids, input_ids.new_tensor([chain.candidates])), dim=1),
        scores=tuple(scores[None] for scores in generator.scores_of(chain, input_ids.device)),
        cache=state,
    )


def _placeholders() -> list[int]:
    """Ids of the tokens that the target of the loop puts images or sound in the place of."""
    loop = _loop_frame()
    config = None if loop is None else loop.f_locals["self"].config
    found = (getattr(config, name, None) for name in PLACEHOLDERS)
    return [token for token in found if isinstance(token, int)]


def _states(processors: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """What processors of the user's own remember in the open: numbers, texts and the lengths of lists."""
    states = []
    for processor in processors:
        if not reads_prefix_only(processor):
            values = {name: len(v) if isinstance(v, list) else v for name, v in vars(processor).items()}
            simple = {name: v for name, v in values.items() if isinstance(v, int | float | str | None)}
            states.append((name_of(processor), simple))
    return states


def check_loop(ready: Callable[[], object]) -> None:
    """Raise `ValueError` for what transformers' assisted decoding would silently get wrong, as `ready` does if the
    assistant cannot draft yet. Asked as that sets up its candidate generator; elsewhere it does nothing."""
    loop = _loop_frame()
    if loop is None or "candidate_generator" in loop.f_locals:
        return
    ready()
    target, config, model_kwargs = (loop.f_locals[name] for name in ("self", "generation_config", "model_kwargs"))
    check_target(target)
    check_windows(target)
    check_lossless(config)
    warn_of_ignored(config)
    if config.output_hidden_states or config.output_attentions:
        raise ValueError(
            "transformers returns the wrong hidden states and attentions for the first round of assisted generation. "
            + ATTACH
        )
    if config.do_sample and loop.f_locals["assistant_tokenizer"] is not None:
        raise ValueError(
            "assistant_tokenizer: transformers samples with a draft of another vocabulary by rebuilding its LM head, "
            "which this assistant cannot lend it. Use a draft with the target's tokenizer, or do_sample=False."
        )
    check_single(loop.f_locals["input_ids"])
    check_inputs(loop.f_locals["input_ids"], model_kwargs)
    _check_inputs_of_loop(target, model_kwargs)
    if (foreign := foreign_passes(target, cache_among(model_kwargs))) is not None:
        raise ValueError(
            f"The target runs {foreign.name}, which may treat several tokens otherwise than one, and transformers' "
            "assisted generation does not find out. " + ATTACH
        )
    per_token = [
        name_of(criterion) for criterion in loop.f_locals["stopping_criteria"] if not ends_as_told(criterion, config)
    ]
    if per_token:
        raise ValueError(
            f"{', '.join(per_token)}: transformers asks stopping criteria once a round, so the answer would run past "
            "the point where it should stop. " + ATTACH
        )


def _check_inputs_of_loop(target: CausalLM, model_kwargs: dict[str, Any]) -> None:
    cache = cache_among(model_kwargs)
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"{CACHE} holds an earlier turn, and transformers' assisted generation would feed the whole prompt "
            "on top of it and answer wrongly. " + ATTACH
        )
    if isinstance(cache, StaticCache) and cache.offloading:  # transformers up to 5.23 refuses all static ones itself
        raise ValueError(
            "Static caches that are offloaded cannot be taken back when a candidate is rejected. Use another cache, or "
            "generate without an assistant."
        )
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        raise ValueError(
            f"{type(target).__name__} keeps states of convolutions in its cache, which transformers' assisted "
            "generation leaves too short after short prompts, and gets wrong after padding that is read in chunks. "
            + ATTACH
        )
    kind = target.config.model_type
    if kind in PREFIX_ATTENTION or (kind in PREFIX_BY_TYPES and model_kwargs.get("token_type_ids") is not None):
        raise ValueError(
            f"{type(target).__name__} reads its prompt in both directions, and in transformers' assisted generation "
            "the first candidates would be part of the prompt. " + ATTACH
        )
    if kind in COUNT_FROM_PROMPT:
        raise ValueError(
            f"{type(target).__name__} counts places and windows from where the prompt ends, and in transformers' "
            "assisted generation the first candidates would be part of the prompt. " + ATTACH
        )
    if target.device.type == "meta":
        raise ValueError(
            "The target is offloaded, and transformers' assisted generation would move tokens to the device of its "
            "weights, which is meta. " + ATTACH
        )


def streamer_of_loop() -> Any:
    """The streamer of transformers' loop that asks for a round, if it has one."""
    loop = _loop_frame()
    return None if loop is None else loop.f_locals.get("streamer")


def _loop_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_assisted_decoding":
        frame = frame.f_back
    return frame
