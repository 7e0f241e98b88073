"""`SpecDecPPAssistant`: what users hold. It owns the draft, the head, the speculation config and the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.utils import logging

from hf_specdecpp.config.assistant import SpecDecPPConfig, special_tokens
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.compiled import compile_steps
from hf_specdecpp.drafting.drafter import Drafter, check_head, check_unmoved
from hf_specdecpp.estimation.estimators import DraftProbability, Estimator
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.generation import attached
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.unattached import ModelInterface
from hf_specdecpp.hub import publishing
from hf_specdecpp.hub.repository import Repository, check_hub_kwargs, load_config, load_parts
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.conditioning import Fusion
from hf_specdecpp.models.cpu_products import FasterProducts, PackedWeights
from hf_specdecpp.models.early_exit import check_layers, early_exit
from hf_specdecpp.models.int8_products import quantise
from hf_specdecpp.models.loading import load_draft
from hf_specdecpp.models.vocabulary import check_hash, check_same_tokenizer
from hf_specdecpp.provenance import commit_of, warn_of_drift
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.trees.drawing import DrawnTree

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.get_logger("hf_specdecpp")


class SpecDecPPAssistant(ModelInterface):
    """Drafts for a target: `model.generate(**inputs, assistant_model=assistant)`.

    Make one with `from_pretrained`, `from_draft`, `from_early_exit` or `from_conditioned`. With `target=` it is
    attached, which is faster, measures more and handles everything that `generate()` offers; without it transformers'
    own assisted generation runs it. The output is the target's in both cases.

    Attributes:
        speculation: the settings of a run; change them at any time between two calls.
        stats: `SpeculationStats` of the latest `generate()`.
        head: the acceptance head, or `None`.
        memory: what was learned of targets while generating; `memory.clear()` forgets it.
        drafter: the draft model, or `None` for one of the target's layers that has not met its target yet.
    """

    config: SpecDecPPConfig
    config_class = SpecDecPPConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(
        self,
        config: SpecDecPPConfig,
        drafter: Drafter | None = None,
        head: AcceptanceHead | None = None,
        adapter: Path | None = None,
        draft_vocab: Tensor | None = None,
        speculation: SpeculationConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        super().__init__(config)
        self.drafter = drafter
        self.head = head
        self.speculation = speculation or SpeculationConfig.from_dict(config.speculation)
        self.stats = SpeculationStats()
        self.adapter_folder = adapter
        self.merge_adapter = True
        self.draft_vocab = draft_vocab
        self.fusion = fusion
        self.memory = Memory(config.calibration)
        self.packed, self.int8 = PackedWeights(), PackedWeights(quantise)
        if head is not None and drafter is not None:
            check_head(head, drafter, config.draft_name)

    # Making one ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        repo_or_folder: str | Path,
        target: CausalLM | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        speculation: SpeculationConfig | None = None,
        draft: CausalLM | str | Path | None = None,
        merge: bool = True,
        **hub_kwargs: Any,
    ) -> Self:
        """Load draft, adapter, head and options from a Hub repo or a folder.

        Args:
            repo_or_folder: Hub id or local folder, as written by `save_pretrained` or `specdecpp train`.
            target: attach to this model. An early-exit assistant needs it here or in a later `attach`.
            revision, subfolder: of the assistant's repository.
            dtype, device: of an independent draft; by default the target's, without a target the draft's own and CPU.
            speculation: replaces the repository's defaults.
            draft: a copy of the draft that the repository names, where that cannot be reached: its folder, or a model
                object, which is left as and where it is.
            merge: of an early exit, as in `from_early_exit`.
            hub_kwargs: `token`, `cache_dir`, `local_files_only`, `force_download`: passed to every download.

        Raises:
            ValueError: a file is damaged, something does not fit, or the assistant was trained for other tokens.
            TypeError: an argument is not known.
            OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
        """
        hub_kwargs = check_hub_kwargs(hub_kwargs)
        repository = Repository(str(repo_or_folder), revision, subfolder, hub_kwargs)
        config = load_config(repository)
        head, draft_vocab, fusion, adapter = load_parts(repository, config)

        drafter = None
        if config.draft_kind == "independent":
            chosen, pinned = (config.draft_id, config.draft_revision) if draft is None else (draft, None)
            model = load_draft(chosen, pinned, target, dtype, device, hub_kwargs)
            if adapter is not None:
                model = add_adapter(model, adapter, merge=isinstance(chosen, str | Path))
            drafter = Drafter(model, draft_vocab)
        elif draft is not None:
            raise ValueError(f"{repository.name!r} drafts with {config.draft_name}, so draft= must be left out.")
        assistant = cls(config, drafter, head, adapter, draft_vocab, speculation, fusion)
        assistant.merge_adapter = merge
        if device is None and (placed := drafter or target) is not None:
            device = placed.device
        if device is not None:
            assistant.to(device)  # type: ignore[arg-type]
        if target is not None:
            assistant.attach(target)
        return assistant.eval()

    @classmethod
    def from_draft(
        cls,
        draft_model_or_id: CausalLM | str | Path,
        target: CausalLM | None = None,
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Self:
        """Draft with a model of its own.

        Args:
            draft_model_or_id: a causal LM (a PEFT model too), its Hub id or its folder.
            target: attach to this model; a draft given by name is loaded in its dtype and on its device.
            adapter: folder or Hub id of a PEFT adapter for the draft. It is merged into a draft given by name; a model
                object is left as it is.
            head: acceptance head trained for this draft.
            draft_vocab: token ids that the draft may propose, all by default.
            speculation: settings of a run.

        Raises:
            ValueError: the draft, head or vocabulary does not fit.
        """
        draft = load_draft(draft_model_or_id, None, target)
        folder = Repository(str(adapter)).adapter(None) if adapter is not None else None
        if folder is not None:
            draft = add_adapter(draft, folder, merge=isinstance(draft_model_or_id, str | Path))
        config = SpecDecPPConfig(
            draft_kind="independent",
            draft_id=draft.config.name_or_path or None,
            draft_revision=commit_of(draft),
            **special_tokens(draft),
        )
        vocab = _as_ids(draft_vocab)
        assistant = cls(config, Drafter(draft, vocab), head, folder, vocab, speculation)
        if head is not None:
            head.to(draft.device)
        if target is not None:
            assistant.attach(target)
        return assistant.eval()

    @classmethod
    def from_early_exit(
        cls,
        target: CausalLM,
        layers: int | Sequence[int],
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        merge: bool = True,
    ) -> Self:
        """Draft with some of the target's own layers, and attach to it. Move the target to its device before.

        Args:
            target: the model to draft for and with. Its tensors are shared, not copied, and never changed.
            layers: number of first layers (4), or ascending indices ([0, 1, 2, 29]).
            adapter, head, draft_vocab, speculation: as in `from_draft`.
            merge: merge the adapter into copies of the weights that it changes. `False` saves their memory, which is
                that of `layers`, but a draft step computes the adapter each time and takes about twice as long.

        Raises:
            ValueError: the layers do not exist, or adapter, head or vocabulary do not fit.
        """
        return cls._from_layers(target, layers, None, adapter, head, draft_vocab, speculation, merge)

    @classmethod
    def from_conditioned(
        cls,
        target: CausalLM,
        layers: int | Sequence[int],
        reads: Sequence[int] = (),
        fusion: Fusion | None = None,
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        merge: bool = True,
    ) -> Self:
        """Draft with some of the target's own layers that read its hidden states, and attach to it.

        One layer is enough: the states that each verification computes anyway tell it what the target thinks. It has to
        be trained (`specdecpp train --draft conditioned`), and needs an attached target.

        Args:
            target, layers: as in `from_early_exit`.
            reads: indices of the target's layers whose outputs are read beside its final state.
            fusion: trained, with its own `reads`; by default an untrained one.
            adapter, head, draft_vocab, speculation, merge: as in `from_early_exit`.

        Raises:
            ValueError: the layers do not exist, or fusion, adapter, head or vocabulary do not fit.
        """
        fusion = fusion or Fusion.untrained(causal_lm.base_model(target), reads)
        return cls._from_layers(target, layers, fusion, adapter, head, draft_vocab, speculation, merge)

    @classmethod
    def _from_layers(
        cls,
        target: CausalLM,
        layers: int | Sequence[int],
        fusion: Fusion | None,
        adapter: str | Path | None,
        head: AcceptanceHead | None,
        draft_vocab: Tensor | Sequence[int] | None,
        speculation: SpeculationConfig | None,
        merge: bool,
    ) -> Self:
        """What the two above have in common."""
        target = causal_lm.base_model(target)
        check_target(target, recurrent=True)
        chosen = check_layers(layers, target.config.get_text_config(decoder=True).num_hidden_layers)
        config = SpecDecPPConfig(draft_kind="conditioned" if fusion else "early_exit", draft_layers=chosen)
        folder = Repository(str(adapter)).adapter(None) if adapter is not None else None
        assistant = cls(config, None, head, folder, _as_ids(draft_vocab), speculation, fusion)
        assistant.merge_adapter = merge
        if head is not None:
            head.to(target.device)
        assistant.attach(target)
        return assistant.eval()

    # Using one -------------------------------------------------------------------------------------------------------

    def attach(self, target: CausalLM) -> None:
        """Make `target.generate(assistant_model=self)` use our decoding loop. May be called for several targets.

        Nothing else about the target changes, and `detach` restores it exactly.

        Raises:
            ValueError: the target cannot be assisted, or speaks other tokens than the draft.
        """
        target = causal_lm.base_model(target)
        check_hash(target, self.config.vocab_hash, self.config.target_id)
        warn_of_drift(target, self.config.target_id, self.config.target_revision)
        if self.drafter is None or self.drafter.shares_target:
            self._exit_early(target)
        else:
            check_same_tokenizer(target, self.drafter.model)
        attached.attach(self, target)
        self.config.note_target(target)

    def detach(self, target: CausalLM | None = None) -> None:
        """Undo `attach` for `target`, or for all targets: class, attributes and logits are as before."""
        targets = attached.targets_of(self) if target is None else [causal_lm.base_model(target)]
        for model in targets:
            if attached.is_attached(self, model):
                attached.detach(self, model)
                self.packed.clear()
                self.int8.clear()

    @property
    def estimator(self) -> Estimator:
        """What judges candidates: the head, or without one the draft's own probability."""
        return self.head or DraftProbability()

    @property
    def last_tree(self) -> DrawnTree | None:
        """The tree of the latest round that drafted one, with its accepted path; `str()` draws it."""
        return self.stats.last_tree

    def ready_drafter(self) -> Drafter:
        """The drafter.

        Raises:
            ValueError: an early-exit assistant that has not met its target.
        """
        if self.drafter is None:
            raise ValueError(
                f"This assistant drafts with layers {self.config.draft_layers} of its target "
                f"({self.config.target_id}), so it must be attached to it: "
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
        check_unmoved(drafter, has_adapter=self.adapter_folder is not None)
        compile_steps(drafter, self.speculation.compile)
        return DraftSetup(
            drafter=drafter,
            head=self.head,
            speculation=self.speculation,
            memory=self.memory,
            packed=self.packed,
            int8=self.int8,
            rates=self.config.acceptance_by_rank,
            vocab_size=self.config.vocab_size,
        )

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
        if drafter is not None and self.adapter_folder is None and hasattr(drafter.model, "peft_config"):
            raise ValueError(
                f"The draft {config.draft_id!r} carries a PEFT adapter in memory, which the saved assistant would "
                "lack. Save the adapter and name its folder: from_draft(draft, adapter=folder)."
            )
        learned = self.memory.calibrations() if calibration else None
        return publishing.Contents(
            config, self.speculation, self.head, self.adapter_folder, self.draft_vocab, self.fusion, learned
        )

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

    def _exit_early(self, target: CausalLM) -> None:
        if attached.is_attached(self, target):
            return
        if attached.targets_of(self):
            raise ValueError(
                "This assistant drafts with the layers of the target that it is attached to. Call detach() first, or "
                "make a new one for this target."
            )
        draft = early_exit(target, self.config.draft_layers or [])
        if self.adapter_folder is not None:
            draft = add_adapter(draft, self.adapter_folder, merge=self.merge_adapter)
        if self.fusion is not None:
            self.fusion.to(draft.device, draft.dtype)
        self.drafter = Drafter(draft, self.draft_vocab, shares_target=True, fusion=self.fusion)
        if self.head is not None:
            self.head.to(self.drafter.device)
            check_head(self.head, self.drafter, self.config.draft_name)


def _as_ids(draft_vocab: Tensor | Sequence[int] | None) -> Tensor | None:
    return None if draft_vocab is None else torch.as_tensor(draft_vocab, dtype=torch.long)
