"""`SpecDecPPAssistant`: what users hold. It owns the draft, the head, the speculation config and the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.utils import logging

from hf_specdecpp.drafting.drafter import check_head
from hf_specdecpp.drafts.kind import Loading
from hf_specdecpp.drafts.known import draft_name
from hf_specdecpp.estimation.estimators import DraftProbability, Estimator
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.doors import attached
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.hub import publishing
from hf_specdecpp.making import Making
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.models.vocabulary import check_hash, check_same_tokenizer
from hf_specdecpp.provenance import warn_of_drift
from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.warming.rehearsal import warm_up

logger = logging.get_logger("hf_specdecpp")


class SpecDecPPAssistant(Making):
    """Drafts for a target: `model.generate(**inputs, assistant_model=assistant)`.

    Make one with `from_pretrained`, `from_draft`, `from_mtp`, `from_early_exit`, `from_conditioned` or `from_lookup`.
    With `target=` it is attached, which is faster, measures more and handles everything that `generate()` offers;
    without it transformers' own assisted generation runs it. The output is the target's in both cases.

    Attributes:
        speculation: the settings of a run; change them at any time between two calls.
        stats: `SpeculationStats` of the latest `generate()`.
        head: the acceptance head, or `None`.
        memory: what was learned of targets while generating, and earlier answers if lookups search them
            (`memory.answers`); `memory.clear()` forgets both.
        drafter: the draft, or `None` for one made of a target that it has not met yet.
        kind: what kind of draft that is.
    """

    # Using one -------------------------------------------------------------------------------------------------------

    def attach(self, target: CausalLM, default: bool = False) -> None:
        """Make `target.generate(assistant_model=self)` use our decoding loop. May be called for several targets.

        Nothing else about the target changes, and `detach` restores it exactly.

        Args:
            target: the model to draft for.
            default: whether `target.generate()` without an assistant uses it, too. A call that it cannot help with is
                a plain one, and says so once, with the reason (`stats.refusal`). The target keeps its default assistant
                alive. Attaching again changes this, and the latest default of a target is its only one.

        Raises:
            TypeError: the target is no model.
            ValueError: it cannot be assisted, or speaks other tokens than the draft.
        """
        target = causal_lm.base_model(target)
        check_hash(target, self.config.vocab_hash, self.config.target_id)
        warn_of_drift(target, self.config.target_id, self.config.target_revision)
        if self.kind.rests_on == "target":
            with self._made_for(target):
                self._draft_with(target)
        elif (model := self.ready_drafter().model) is not None:
            check_same_tokenizer(target, model)
        attached.attach(self, target)
        attached.set_default(self, target, default)
        self.config.note_target(target)

    def detach(self, target: CausalLM | None = None) -> None:
        """Undo `attach` for `target`, or for all targets: class, attributes and logits are as before."""
        targets = attached.targets_of(self) if target is None else [causal_lm.base_model(target)]
        for model in targets:
            if attached.is_attached(self, model):
                attached.detach(self, model)
                self.packed.clear()
                self.int8.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls without an assistant are plain ones, though this is a target's default assistant.

        `assistant_model=None` says nothing to transformers, so a single call cannot leave its default out.
        """
        with attached.paused(self):
            yield

    @contextmanager
    def as_default(self, target: CausalLM) -> Iterator[None]:
        """Within, calls of `target` in this thread that name no assistant use this one, which is attached to it.

        The target's default assistant stays what it is: for other threads, and afterwards.
        """
        with attached.as_default(self, causal_lm.base_model(target)):
            yield

    def warm_up(self, max_length: int, target: CausalLM | None = None, **options: Any) -> float:
        """Capture all that single texts of up to `max_length` tokens need as CUDA graphs, so that no text waits for it.

        A text is generated that makes what texts may make: a pass of the target of each width that `speculation` may
        lead to, the draft's steps, in a cache of each size; with `rule="throughput"` costs are measured if they are
        not known. Nothing is learned of it: statistics, estimates, known costs and torch's generators stay as they
        are. Afterwards `generate()` captures nothing for texts of up to that length, with these options and settings.

        Args:
            max_length (tokens): of prompt and answer together, at most.
            target: an attached one, where there are several.
            options: of `generate()`, as later calls will have them, such as `do_sample`.

        Returns:
            Seconds that it took.

        Raises:
            ValueError: nothing can be captured here, the length makes no sense, or the target is not attached.
        """
        targets = attached.targets_of(self) if target is None else [causal_lm.base_model(target)]
        if len(targets) != 1 or not attached.is_attached(self, targets[0]):
            raise ValueError(
                f"This assistant is attached to {len(attached.targets_of(self))} targets, so it is not known whose "
                "passes to capture. Attach it, assistant.attach(model), and pass target=model where there are several."
            )
        return warm_up(self.setup(), targets[0], max_length, options)

    @property
    def estimator(self) -> Estimator:
        """What judges candidates: the head, or without one the draft's own probability."""
        return self.head or DraftProbability()

    @property
    def last_tree(self) -> DrawnTree | None:
        """The tree of the latest round that drafted one, with its accepted path; `str()` draws it."""
        return self.stats.last_tree

    def ready_drafter(self) -> Any:
        """The drafter.

        Raises:
            ValueError: an early-exit assistant that has not met its target.
        """
        if self.drafter is None:
            raise ValueError(
                f"This assistant drafts with {draft_name(self.config)}, so it must be attached to it: "
                "SpecDecPPAssistant.from_pretrained(repo, target=model), or assistant.attach(model). In a pipeline "
                "pass the assistant object made in this way, not its name."
            )
        return self.drafter

    def setup(self) -> DraftSetup:
        """What a generation needs of this assistant.

        Raises:
            ValueError: an early-exit assistant that has not met its target, or whose target has been moved since.
        """
        drafter = self.ready_drafter()
        drafter.check_unmoved(has_adapter=self.parts.adapter is not None)
        drafter.renew()
        drafter.capture_steps(self.speculation.graphs == "auto", self.speculation.compile)
        return DraftSetup(
            drafter=drafter,
            head=self.head,
            speculation=self.speculation,
            memory=self.memory,
            packed=self.packed,
            int8=self.int8,
            rates=self.config.acceptance_by_rank,
            vocab_size=self.config.vocab_size,
            trainable=self._trainable(),
        )

    def _trainable(self) -> frozenset[str]:
        """`DraftSetup.trainable`."""
        if self.kind.trainable is None:
            return frozenset()
        lacks = {"training": self.parts.adapter is None and self.parts.module is None, "head": self.head is None}
        return frozenset(name for name, is_missing in lacks.items() if is_missing)

    def start_generation(
        self,
        target: CausalLM | None,
        config: GenerationConfig,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        attention_mask: Tensor | None = None,
        rows: int = 1,
        products: FasterProducts | None = None,
    ) -> SpecDecPPCandidateGenerator:
        """Begin one `generate()` call of `target`, or of a target that this assistant is not attached to (`None`).

        Args:
            rows: how many sequences the call has; each is begun by itself.
            products: those of the rows begun before, which all share.

        Raises:
            ValueError: the generation cannot be assisted.
        """
        setup = replace(self.setup(), rows=rows)
        generator = SpecDecPPCandidateGenerator(
            setup, config, logits_processor, attention_mask, target=target, products=products
        )
        self.stats = generator.stats
        return generator

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The draft model's own forward, for measuring it."""
        return self.ready_drafter().model(input_ids, **kwargs)

    # Storing one -----------------------------------------------------------------------------------------------------

    def contents(self, calibration: bool = False) -> publishing.Contents:
        """What the repository of this assistant is made of; `calibration` as in `save_pretrained`.

        Raises:
            ValueError: the draft carries a PEFT adapter that no folder holds.
        """
        config, drafter = self.config, self.drafter
        if drafter is not None and self.parts.adapter is None and hasattr(drafter.model, "peft_config"):
            raise ValueError(
                f"The draft {config.draft_id!r} carries a PEFT adapter in memory, which the saved assistant would "
                "lack. Save the adapter and name its folder: from_draft(draft, adapter=folder)."
            )
        learned = self.memory.calibrations() if calibration else None
        return publishing.Contents(config, self.speculation, self.head, self.parts, learned)

    # This and `push_to_hub` take other arguments than transformers' own, which are about shards of a model's weights.
    def save_pretrained(self, folder: str | Path, calibration: bool = False, **_: Any) -> None:  # type: ignore[override]
        """Write the repository of this assistant into `folder`: config, head, adapter, draft vocabulary, card.

        Args:
            folder: is created if it is missing.
            calibration: also what generating has taught about the estimates; whoever loads the assistant begins there.

        Raises:
            ValueError: an independent draft has neither a Hub id nor a folder to load it from again.
        """
        publishing.save(self.contents(calibration), Path(folder))

    def push_to_hub(self, repo_id: str, calibration: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload what `save_pretrained` writes. See `publishing.push` for the other arguments."""
        return publishing.push(self.contents(calibration), repo_id, **kwargs)

    # Details ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _made_for(self, target: CausalLM) -> Iterator[None]:
        """What does not fit a target within is said together with whose assistant it is."""
        made_for, name = self.config.target_id, target.config.name_or_path
        try:
            yield
        except ValueError as error:
            if made_for in (None, name):
                raise
            raise ValueError(f"{error} This assistant was made for {made_for!r}, and the target is {name!r}.") from None

    def _draft_with(self, target: CausalLM) -> None:
        """Make the draft of this target."""
        if attached.is_attached(self, target):
            return
        if attached.targets_of(self):
            raise ValueError(
                "This assistant drafts with the layers of the target that it is attached to. Call detach() first, or "
                "make a new one for this target."
            )
        self.drafter = self.kind.draft(self.config, self.parts, Loading(target=target))
        TargetStates(target, self.drafter.reads)  # where the target has no such layers, that is said now
        if self.head is not None:
            self.head.to(self.drafter.device)
            check_head(self.head, self.drafter, draft_name(self.config))


def drafts_by_itself(target: CausalLM) -> SpecDecPPAssistant:
    """An assistant of which nothing has to be trained or named: with the multi-token layers of the target's checkpoint,
    or where none can be read with candidates that are looked up in the text.

    Raises:
        ValueError: the target cannot be assisted.
    """
    try:
        return SpecDecPPAssistant.from_mtp(target)
    except (ValueError, OSError):
        return SpecDecPPAssistant.from_lookup(target)
