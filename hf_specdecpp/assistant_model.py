"""The base class of assistants (`AssistantModel`): attaching, generating, and what transformers calls on a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.utils import logging

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.config.value_checks import check_values
from hf_specdecpp.draft_kinds import acceptance
from hf_specdecpp.draft_kinds.draft_kind import Loading, Parts, PublishedKind
from hf_specdecpp.draft_kinds.known import describe, draft_name, kind_of
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.draft_checks import check_sizes
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.warm_up import warm_up
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.generation.latest_calls import LatestCalls
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.products import int8_copy, measured_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies
from hf_specdecpp.models.loading import check_hash, check_same_tokenizer, tokenizer_of
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.provenance import warn_of_drift
from hf_specdecpp.throughput.memory import Memory

if TYPE_CHECKING:
    from typing_extensions import Self


logger = logging.get_logger("hf_specdecpp")
CHECKED = {"speculation": SpeculationConfig, "decisions": Decisions, "head": AcceptanceHead | None, "memory": Memory}


class AssistantModel(PreTrainedModel):
    """An assistant made from given parts. Its subclass `SpecDecPPAssistant` adds constructors and saving.

    Attributes:
        speculation: the settings, which may be changed between calls.
        decisions: further choices, to change in experiments only (`config.speculation.Decisions`).
        head: the acceptance head, by default the confidence head of a published draft; `None` takes q as the estimate.
        memory: acceptance and costs learned for each target, and earlier answers if lookups search them
            (`memory.answers`); `memory.clear()` deletes both.
        drafter: the draft; `None` before `attach` if the draft is made from the target.
        kind: how the draft is made and stored, such as a separate model or an early exit (`DraftKind`).
    """

    config: SpecDecPPConfig
    config_class = SpecDecPPConfig
    speculation: SpeculationConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(
        self,
        config: SpecDecPPConfig,
        drafter: Draft | None = None,
        head: AcceptanceHead | None = None,
        parts: Parts | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        super().__init__(config)
        self.kind = kind_of(config)
        self.parts = parts or Parts()
        self.head = head or self.published_head
        self.drafter: Any = drafter
        self.suspect: str | None = None  # this and `agreement`: see `SpeculationStats`
        self.agreement: list[float] = []
        self.speculation = SpeculationConfig.from_dict(config.speculation) if speculation is None else speculation
        self.decisions, self.calls = Decisions(), LatestCalls()
        self.memory = Memory(config.calibration)
        self.copies, self.int8 = WeightCopies(measured_copy), WeightCopies(int8_copy)
        if head is not None and isinstance(drafter, Drafter):
            check_sizes(head.to(drafter.device), drafter, draft_name(config))
        self._attaching, self._met_in_calls = RLock(), WeakSet[Any]()
        attached.answer_calls(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SpeculationConfig.__dataclass_fields__:
            raise AttributeError(f"{name} is a setting. Set assistant.speculation.{name} = {value!r}.")
        if name in CHECKED:
            check_values({name: value}, CHECKED, error=TypeError)
        super().__setattr__(name, value)

    @property
    def published_head(self) -> AcceptanceHead | None:
        """The confidence head that the draft was published with; `None` if it has none."""
        return self.kind.head_of(self.parts.module)

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of the latest `generate()` of this thread or asyncio task; if there was none, of the latest call
        of any thread (`LatestCalls`)."""
        return self.calls.stats

    @stats.setter
    def stats(self, value: SpeculationStats) -> None:
        self.calls.record_call(value)

    # Using one -------------------------------------------------------------------------------------------------------

    def attach(self, target: CausalLM, default: bool = False) -> None:
        """Check that target and draft fit, and let `target.generate()` use this assistant. The first
        `target.generate(assistant_model=self)` does this if necessary. An assistant may have several targets.

        Some methods of the target's class are replaced, nothing else is changed, and `detach` restores them.

        Args:
            target: the model to draft for.
            default: whether calls of `target.generate()` that name no assistant use this one. Calls that it does not
                support fall back to plain `generate()` with a warning (`stats.refusal`). The target keeps its default
                assistant alive, and has only one, the latest. Attaching again can change this.

        Raises:
            TypeError: the target is no model.
            ValueError: the target does not support speculation, or has other tokens than the draft.
        """
        target = causal_lm.base_model(target)
        with self._attaching:
            check_hash(target, self.config.vocab_hash, self.config.target_id)
            warn_of_drift(target, self.config.target_id, self.config.target_revision)
            if self.kind.rests_on == "target":
                self._draft_with(target)
            elif (model := self.ready_drafter().model) is not None:
                size = model.config.get_text_config().vocab_size
                check_same_tokenizer(target, model, size, ids_are_listed=self.parts.draft_vocab is not None)
            attached.attach(self, target)
            attached.set_default(self, target, default)
            self._met_in_calls.discard(target)
            self.config.note_target(target)
            self.setup().products(target)  # starts making copies of weights

    def answer(self, target: CausalLM) -> None:
        """Called by a `generate()` that names this assistant: attaches it, unless attached. Errors as in `attach`."""
        with self._attaching:
            if not attached.is_attached(self, target):
                self.attach(target)
                self._met_in_calls.add(target)

    def detach(self, target: CausalLM | None = None) -> None:
        """Undo `attach` for `target`, by default for all targets. Class, attributes and logits are then as before."""
        targets = attached.targets_of(self) if target is None else [causal_lm.base_model(target)]
        for model in targets:
            if attached.is_attached(self, model):
                attached.detach(self, model)
                self.copies.clear()
                self.int8.clear()

    def paused(self) -> AbstractContextManager[None]:
        """A context in which calls of all threads that name no assistant do not use this one, even if it is a default.
        (Transformers ignores `assistant_model=None`, so a single call cannot disable the default by an argument.)"""
        return attached.paused(self)

    def as_default(self, target: CausalLM) -> AbstractContextManager[None]:
        """A context in which calls of `target` that name no assistant use this one, in this thread or asyncio task. It
        must be attached to `target`, whose default is unchanged elsewhere and afterwards."""
        return attached.as_default(self, causal_lm.base_model(target))

    def warm_up(self, max_length: int | None = None, target: CausalLM | None = None, **options: Any) -> float:
        """Capture all CUDA graphs for single sequences of up to `max_length` tokens, so that later calls need not wait;
        on a CPU wait until all copies of weights are made (`SpeculationConfig.cpu_products`).

        On a GPU this runs rounds of each length and shape that `speculation` allows, or target passes of each width, in
        a cache of each size. Unknown costs are measured; statistics, estimates, known costs and torch's generators are
        unchanged. Afterwards `generate()` with these options captures nothing for sequences of up to that length.

        Args:
            max_length (tokens): largest length of prompt and answer together. By default 2,048, or the target's number
                of positions if smaller. Not needed on a CPU.
            target: one of the attached targets; needed only if there are several.
            options: the options of later `generate()` calls, such as `do_sample`.

        Returns:
            The seconds that this took.

        Raises:
            ValueError: there is nothing to capture or copy, `max_length` is invalid, or the target is not attached.
        """
        targets = attached.targets_of(self) if target is None else [causal_lm.base_model(target)]
        if len(targets) != 1 or not attached.is_attached(self, targets[0]):
            raise ValueError(
                f"This assistant is attached to {len(attached.targets_of(self))} targets, so it is not known whose "
                "passes to capture. Attach it, assistant.attach(model), and pass target=model where there are several."
            )
        return warm_up(self.setup(), targets[0], max_length, options)

    def __repr__(self) -> str:
        """Such as "SpecDecPPAssistant(lookups in earlier text, rule='throughput', default of org/model)"."""
        in_memory = self.kind.rests_on == "draft" and self.config.draft_id is None
        draft = type(self.ready_drafter().model).__name__ if in_memory else describe(self.config)
        head = ", with a head" if self.head is not None else ""
        tree = f", tree={self.speculation.tree!r}" if self.speculation.tree != "auto" else ""
        targets = [
            f"{'default of' if attached.is_default(self, each) else 'attached to'} "
            f"{each.config.name_or_path or type(each).__name__}{' by a call' if each in self._met_in_calls else ''}"
            for each in attached.targets_of(self)
        ]
        where = ", ".join(targets) or "not attached"
        return f"{type(self).__name__}({draft}{head}, rule={self.speculation.rule!r}{tree}, {where})"

    def _draft_with(self, target: CausalLM) -> None:
        """Make the draft from parts of `target`, unless attached to it. `ValueError` if attached to another target."""
        if attached.is_attached(self, target):
            return
        if attached.targets_of(self):
            raise ValueError(
                "This assistant drafts with the layers of the target that it is attached to. Call detach() first, or "
                "make a new one for this target."
            )
        try:
            self._make_draft(target)
        except ValueError as error:
            made_for, name = self.config.target_id, target.config.name_or_path
            if made_for in (None, name):
                raise
            raise ValueError(f"{error} This assistant was made for {made_for!r}, the target is {name!r}.") from None
        self._check_published(target)

    def _make_draft(self, target: CausalLM) -> None:
        if (processes := causal_lm.num_processes(target)) > 1:
            raise ValueError(
                f"{type(target).__name__} is spread over {processes} processes, which would have to draft each token "
                "together, since the draft is made of it. Use an independent draft."
            )
        self._made_of = causal_lm.parameter_ids(target)
        self.drafter = self.kind.make(self.config, self.parts, Loading(target=target))
        self._made_for = target.dtype, causal_lm.input_device(target)
        TargetStates(target, self.drafter.reads)  # raises if the target has no such layers
        if self.head is not None:
            check_sizes(self.head.to(self.drafter.device), self.drafter, draft_name(self.config))

    def _check_published(self, target: CausalLM) -> None:
        """If the draft is a published one, measure and log how often its candidates equal the target's choices."""
        if self.config.draft_id is None or not isinstance(self.kind, PublishedKind):
            return
        name, texts = describe(self.config), acceptance.texts_for(target, tokenizer_of(target))
        self.suspect = name if self.kind.is_whole else None
        self.agreement = list(self.drafter.agreement or acceptance.agreement(self.drafter, target, texts))
        log = logger.warning if acceptance.is_wrong(self.agreement) else logger.info
        log(f"{name}: {acceptance.describe(self.agreement)}")

    # Called during generations ---------------------------------------------------------------------------------------

    def ready_drafter(self) -> Any:
        """The draft (`Draft`); `ValueError` if it is made from the target and the assistant is not attached yet."""
        if self.drafter is None:
            raise ValueError(
                f"This assistant drafts with {draft_name(self.config)}, so it must be attached to it: "
                "assist(model, repo), or assistant.attach(model)."
            )
        return self.drafter

    def _renew_draft(self) -> None:
        """Make a draft from parts of the target again if the target has another device or dtype, or if its parameters
        are other objects, as after `load_state_dict(assign=True)`: the draft would use the old ones."""
        for target in attached.targets_of(self) if self.kind.rests_on == "target" else ():
            now, place = causal_lm.parameter_ids(target), (target.dtype, causal_lm.input_device(target))
            if place != self._made_for or not self._made_of.items() <= now.items():
                try:
                    self._make_draft(target)
                except ValueError:  # after resizing embeddings some drafts cannot be made, but still work
                    if place != self._made_for:
                        raise

    def setup(self) -> DraftSetup:
        """The parts that one generation uses. `ValueError` if the draft needs an attached target (`ready_drafter`), or
        cannot be made from a target that was changed."""
        self._renew_draft()
        drafter = self.ready_drafter()
        drafter.renew()
        trains = not self.kind.untrainable
        lacks = {
            "training": trains and self.parts.adapter is None and self.parts.module is None,
            "head": trains and self.head is None,
            "draft": not drafter.places,
            "throughput": self.speculation.rule != "throughput",
        }
        return DraftSetup(
            drafter=drafter,
            head=self.head,
            speculation=self.speculation,
            decisions=self.decisions,
            memory=Memory(self.config.calibration) if self.speculation.reproducible else self.memory,
            copies=self.copies,
            int8=self.int8,
            rates=self.config.acceptance_by_rank,
            is_independent=self.kind.rests_on == "draft",
            remedies=frozenset(name for name, is_missing in lacks.items() if is_missing),
        )

    def start_generation(
        self,
        target: CausalLM,
        config: GenerationConfig,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        attention_mask: Tensor | None = None,
        rows: int = 1,
        first: SpecDecPPCandidateGenerator | None = None,
    ) -> SpecDecPPCandidateGenerator:
        """Make the candidate generator of one sequence of a `generate()` call; `ValueError` if that is not supported.

        Args:
            rows: number of sequences in the call; this method is called once for each.
            first: the generator of the call's first sequence, whose setup and matrix multiplications are used, too.
        """
        setup = replace(self.setup(), rows=rows) if first is None else first.setup
        parts = setup, config, logits_processor, attention_mask
        generator = SpecDecPPCandidateGenerator(*parts, target=target, first=first)
        generator.stats.decided["attached"] = "by a call" if target in self._met_in_calls else "before"
        generator.stats.suspect, generator.stats.agreement = self.suspect, list(self.agreement)
        if first is not None:
            generator.products = first.products
        return generator

    # Methods of a model ----------------------------------------------------------------------------------------------

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Always raises `ValueError`, as does `generate`: an assistant generates only with its target."""
        raise ValueError(
            "An assistant does not answer by itself. Pass it to its target: "
            "model.generate(**inputs, assistant_model=assistant)."
        )

    generate = forward

    @property
    def device(self) -> torch.device:
        if self.drafter is not None:
            return self.drafter.device
        return self.head.output.weight.device if self.head is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.dtype if self.drafter is not None else torch.float32

    # A copy or a pickle would not be attached to any target: harnesses that copy the arguments of `generate()` need
    # this object.
    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "An assistant cannot be pickled: it belongs to the targets that it is attached to. Store it with "
            "assistant.save_pretrained(folder) and load it there: SpecDecPPAssistant.from_pretrained(folder, target)."
        )
