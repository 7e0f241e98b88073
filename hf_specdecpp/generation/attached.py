"""Attach an assistant to a target and detach it: a class swap that keeps the class's name.

transformers looks its decoding method up on the class of the model, so the target's class is replaced by a subclass of
it. Nothing else of the target is touched, and only calls with an attached assistant take another path.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

from torch import Tensor, nn
from transformers import GenerationConfig

from hf_specdecpp.caches.rollback import check_states
from hf_specdecpp.caches.static_targets import as_static, forward_of, prepare_static
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.batch import BatchDecoding
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.ranks import RankDecoding, check_ranks, is_spread
from hf_specdecpp.generation.refusals import check_batch, check_inputs, check_mode
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing, for_row


class Assistant(Protocol):
    """What this door asks of an assistant, which is a module (`SpecDecPPAssistant`)."""

    speculation: SpeculationConfig
    stats: SpeculationStats

    def start_generation(
        self,
        target: CausalLM,
        config: GenerationConfig,
        logits_processor: Any,
        attention_mask: Tensor | None,
        rows: int = 1,
        products: FasterProducts | None = None,
    ) -> SpecDecPPCandidateGenerator:
        """Begin one `generate()` call of `target`, or one of the `rows` of a batch."""


# Which assistants are attached to which target. Kept here, so that a target's attributes stay as they are.
_attached: WeakKeyDictionary[CausalLM, WeakSet[nn.Module]] = WeakKeyDictionary()

# Arguments of transformers' decoding method that are not for the model's forward.
MODE_KWARGS = ("synced_gpus", "tokenizer", "assistant_tokenizer")


def attach(assistant: nn.Module, target: CausalLM) -> None:
    """Make `target.generate(assistant_model=assistant)` run our decoding loop.

    Raises:
        ValueError: the target cannot be assisted.
    """
    check_target(target, recurrent=True)
    check_states(target)
    if not isinstance(target, AttachedMixin):
        original = type(target)
        names: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            # Read by assisted generation only. Some classes say that they keep a recurrent state though this model of
            # theirs, as `check_target` found, has none.
            "_is_stateful": False,
        }
        target.__class__ = type(original.__name__, (AttachedMixin, original), names)
    assistants = _attached.setdefault(target, WeakSet())
    if assistant not in assistants:
        assistants.add(assistant)
        finalize(assistant, _restore_class, ref(target)).atexit = False


def detach(assistant: nn.Module, target: CausalLM) -> None:
    """Undo `attach`. The target's class is restored when its last assistant leaves."""
    assistants = _attached.get(target)
    if assistants is None or assistant not in assistants:
        return
    assistants.discard(assistant)
    _restore_class(ref(target))


def _restore_class(target_ref: ref[CausalLM]) -> None:
    """Give a target its own class back once no assistant is attached to it any more, detached or deleted."""
    target = target_ref()
    if target is not None and target in _attached and not list(_attached[target]):
        del _attached[target]
        target.__class__ = original_class(target)


def is_attached(assistant: Any, target: CausalLM) -> bool:
    return assistant in _attached.get(target, ())


def targets_of(assistant: nn.Module) -> list[CausalLM]:
    """All targets that an assistant is attached to."""
    return [target for target, assistants in _attached.items() if assistant in assistants]


def original_class(target: CausalLM) -> type[CausalLM]:
    """The class that the target had before anything was attached."""
    return type(target).__mro__[2] if isinstance(target, AttachedMixin) else type(target)


class AttachedMixin:
    """Overrides of an attached target. Calls without an attached assistant go to the original methods."""

    def _validate_generation_mode(
        self: CausalLM, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]
    ) -> None:
        original: Any = super()
        assistant: Any = mode_kwargs.get("assistant_model")
        if is_attached(assistant, self):
            check_target(self, recurrent=True)
            check_states(self)
            check_mode(mode, config, mode_kwargs)
            # transformers' own check compares padded vocabulary sizes; tokenizers were compared when attaching.
            mode_kwargs = {name: value for name, value in mode_kwargs.items() if name != "assistant_model"}
            # Nor are several sequences a matter for it.
            config = copy.copy(config)
            config.num_return_sequences = 1
        original._validate_generation_mode(mode, config, mode_kwargs)

    # `inputs_tensor` is named because transformers reads from the signature whether to pass it.
    def _assisted_decoding(
        self: CausalLM,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        original: Any = super()
        if not is_attached(assistant_model, self):
            kwargs |= {"inputs_tensor": inputs_tensor, "assistant_model": assistant_model, "streamer": streamer}
            return original._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
            )
        model_kwargs = {name: value for name, value in kwargs.items() if name not in MODE_KWARGS}
        check_inputs(input_ids, model_kwargs)
        assistant: Assistant = assistant_model
        most_in_tree = assistant.speculation.most_tokens if assistant.speculation.tree is not None else 0
        prepare_static(self, input_ids, model_kwargs, generation_config, most_in_tree)
        mask = model_kwargs.get("attention_mask")
        count = input_ids.shape[0]
        if is_spread(self):
            check_ranks(self, assistant.speculation, Processing(logits_processor), count)
        if count > 1:
            has_trees = assistant.speculation.tree is not None
            check_batch(self, model_kwargs, generation_config, logits_processor, stopping_criteria, streamer, has_trees)
            masks = [None] * count if mask is None else mask.split(1)
            generators: list[SpecDecPPCandidateGenerator] = []
            for row, own in enumerate(masks):
                processors = for_row(logits_processor, row, count)
                products = generators[0].products if generators else None
                generators.append(assistant.start_generation(self, generation_config, processors, own, count, products))
            try:
                return BatchDecoding(self, generators, stopping_criteria, generation_config, model_kwargs).run(
                    input_ids
                )
            finally:
                assistant.stats = SpeculationStats.of_batch([each.stats for each in generators])
        # First, since the layers of a compiled target keep their own products.
        forward = forward_of(self, model_kwargs, generation_config)
        known_as = as_static(generation_config, model_kwargs)
        generator = assistant.start_generation(self, known_as, logits_processor, mask)
        kind = RankDecoding if is_spread(self) else AssistedDecoding
        decoding = kind(self, generator, stopping_criteria, generation_config, streamer, model_kwargs, forward)
        return decoding.run(input_ids)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle of an attached target is an ordinary, unattached model. Made by `object.__new__`, since
        # pickle takes its usual constructor for the very class of the object only.
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (object.__new__, (original_class(self),), *state)
