"""The unattached door: transformers' own candidate generator calls `assistant.generate()` once a round.

transformers passes an assistant neither the target nor its cache nor the stopping criteria. So the frame of its loop is
inspected once a generation, and what the loop would answer wrongly is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_specdecpp.caches.masks import check_windows
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.refusals import check_inputs, check_lossless, check_single
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, eos_ids
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.sampling.processors import Processing, reads_prefix_only
from hf_specdecpp.trees.tree import DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

# Families whose prompt is a prefix in which every token sees every other, and those whose token types may say so.
PREFIX_ATTENTION, PREFIX_BY_TYPES = {"paligemma"}, {"hrm_text"}
# Families that note where the first pass ended.
COUNT_FROM_PROMPT = {"glm_image", "unlimited_ocr"}
# Where configs name the tokens that an image, a video or a sound is put in the place of.
PLACEHOLDERS = [f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index")]
ATTACH = "Attach the assistant to the target, which handles this: assistant.attach(model)."


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


def draft_round(
    start: Callable[[GenerationConfig, Any, Tensor | None], SpecDecPPCandidateGenerator],
    input_ids: Tensor,
    generation_config: GenerationConfig,
    logits_processor: list[Any] | None,
    state: DraftState | None,
    attention_mask: Tensor | None,
    min_new_tokens: int,
    max_new_tokens: int,
) -> DraftOutput:
    """One round as `transformers.generation.AssistedCandidateGenerator` asks for it.

    Args:
        start: begins a generation; called in the first round.
        input_ids: `[1, length]`, everything emitted so far.
        state: what the previous round returned, `None` in the first.

    Returns:
        `sequences` `[1, length + k]`, `scores` k tensors `[1, vocab]` that q is the softmax of.
    """
    if state is None:
        generator = start(generation_config, logits_processor, attention_mask)
        generator.stats.complete = False
    else:
        generator = state.generator
        emitted = input_ids.shape[1] - state.length
        generator.update_candidate_strategy(input_ids, None, min(emitted - 1, state.num_drafted))
        generator.stats.generated += emitted
    processors = list(logits_processor or [])
    eos = list(eos_ids(generation_config))
    if min_new_tokens > 0 and eos:
        # transformers takes the target's minimum length out of the processors and passes it like this. It comes first
        # again: after top-k it could forbid the only token left.
        minimum = MinNewTokensLengthLogitsProcessor(input_ids.shape[1], min_new_tokens, eos, str(input_ids.device))
        processors.insert(0, minimum)
    if state is None and (placeholders := _placeholders()):
        # The loop reads these candidates together with the prompt's images, and would look for one for each.
        processors.insert(0, SuppressTokensLogitsProcessor(placeholders, str(input_ids.device)))
        if generator.lookup is not None:
            generator.lookup.text.never |= frozenset(placeholders)
    generator.draft_processing = Processing(processors)
    before = _states(processors)
    with generator.products:
        chain = generator.propose(input_ids, max_new_tokens)
    if changed := [name for (name, old), (_, new) in zip(before, _states(processors), strict=True) if old != new]:
        raise ValueError(
            f"{', '.join(changed)}: keeps count of its calls, and transformers' assisted generation calls logits "
            "processors for candidates, too, which would change the output. " + ATTACH
        )
    state = DraftState(generator, input_ids.shape[1], len(chain))
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
            states.append((type(processor).__name__, simple))
    return states


def check_loop(ready: Callable[[], object]) -> None:
    """Raise `ValueError` for what transformers' assisted decoding would silently get wrong.

    Asked as that sets up its candidate generator, before the target has done any work. Elsewhere it does nothing.

    Args:
        ready: raises `ValueError` if the assistant cannot draft yet.
    """
    loop = _loop_frame()
    if loop is None or "candidate_generator" in loop.f_locals:
        return
    ready()
    target, config, model_kwargs = (loop.f_locals[name] for name in ("self", "generation_config", "model_kwargs"))
    check_target(target)
    check_windows(target)
    check_lossless(config)
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
    per_token = [
        type(criterion).__name__
        for criterion in loop.f_locals["stopping_criteria"]
        if not _heeded_within_rounds(criterion, config)
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
            "generate without assistant_model=."
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


def _heeded_within_rounds(criterion: object, config: GenerationConfig) -> bool:
    # transformers cuts a round at its own maximum length and end-of-sequence ids, not at those of a user's criterion.
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    if type(criterion) is EosTokenCriteria:
        return eos_ids(config).issuperset(criterion.eos_token_id.tolist())
    return type(criterion) is MaxTimeCriteria  # the clock may be read a round late


def _loop_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_assisted_decoding":
        frame = frame.f_back
    return frame


class ModelInterface(PreTrainedModel):
    """What transformers asks of an assistant as if it were a model: rounds of its own loop, device and dtype, copies.

    The base of `SpecDecPPAssistant`, which brings what is declared here.
    """

    drafter: Any
    head: Any
    speculation: Any
    ready_drafter: Any
    start_generation: Any

    def generate(
        self,
        input_ids: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: list[Any] | None = None,
        cache: DraftState | None = None,
        attention_mask: Tensor | None = None,
        min_new_tokens: int = 0,
        max_new_tokens: int | None = None,
        past_key_values: DraftState | None = None,
        **_: Any,
    ) -> DraftOutput:
        """Draft one round for transformers' assisted generation, which is what calls this.

        Raises:
            ValueError: the generation cannot be assisted, or this was called directly.
        """
        if input_ids is None or generation_config is None or max_new_tokens is None:
            raise ValueError(
                "An assistant does not answer by itself. Pass it to its target: "
                "model.generate(**inputs, assistant_model=assistant)."
            )
        start = partial(self.start_generation, None)
        return draft_round(
            start, input_ids, generation_config, logits_processor, cache or past_key_values, attention_mask,
            min_new_tokens, max_new_tokens,
        )  # fmt: skip

    # A property where models have an attribute: transformers' reading it says that its loop begins.
    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        """Read by transformers' loop: how many candidates a round may have; the rest is decided by our rule.

        Raises:
            ValueError: that loop is being set up for something that it would get wrong.
        """
        check_loop(self.ready_drafter)
        return AssistantGenerationConfig(self.speculation.most_tokens)

    @property
    def device(self) -> torch.device:
        if self.drafter is not None:
            return self.drafter.device
        return self.head.output.weight.device if self.head is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.dtype if self.drafter is not None else torch.float32

    def get_output_embeddings(self) -> None:
        """None: an assistant is not a causal LM. Read where transformers would sample with another tokenizer.

        Raises:
            ValueError: in that case.
        """
        check_loop(self.ready_drafter)

    def _supports_logits_to_keep(self) -> bool:
        return True

    # A copy by value would leave the targets behind that this one is attached to. Harnesses copy the arguments of
    # `generate()`, and mean the same assistant; and a pickle goes to a process where there are no such targets.
    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "An assistant cannot be pickled: it belongs to the targets that it is attached to. Store it with "
            "assistant.save_pretrained(folder) and load it there: SpecDecPPAssistant.from_pretrained(folder, target)."
        )
