"""`SpecDecPPAssistant`, the class for users: constructors of assistants, saving and uploading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from huggingface_hub import CommitInfo
from numpy.typing import NDArray
from torch import Tensor

from hf_specdecpp.assistant_model import AssistantModel
from hf_specdecpp.config.assistant_config import SpecDecPPConfig, special_tokens
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.value_checks import check_options, check_values, hints_of
from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.draft_kinds.draft_kind import DraftKind, Loading, Parts
from hf_specdecpp.draft_kinds.known import CONDITIONED, EARLY_EXIT, INDEPENDENT, kind_of, ready_made
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import DownloadOptions, Repository
from hf_specdecpp.hub import publishing
from hf_specdecpp.hub.repository import AUTO_KWARGS, find_adapter, load_config, load_parts
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.early_exit import check_layers
from hf_specdecpp.models.loading import check_hash
from hf_specdecpp.provenance import commit_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Options(TypedDict, total=False):
    """Options of all constructors of `SpecDecPPAssistant` except `from_pretrained`.

    Attributes:
        head: an acceptance head that was trained for this draft.
        speculation: settings for drafting, such as the stopping rule.
        default: make this the target's default assistant, also used by calls that name none (`attach`).
        adapter: folder or Hub id of a PEFT (LoRA) adapter for the draft.
        draft_vocab: `[n]` token ids that the draft may propose; by default all.
        merge: merge the adapter into copies of the weights that it changes (default). `False` saves the memory of these
            layers, but each draft step computes the adapter and takes about twice as long. For a draft given by name
            the adapter is always merged; model objects are never changed.
    """

    head: AcceptanceHead | None
    speculation: SpeculationConfig | None
    default: bool
    adapter: str | Path | None
    draft_vocab: Tensor | NDArray[Any] | Sequence[int] | None
    merge: bool


class DraftOptions(Options, DownloadOptions):
    """Options of `from_draft`: `Options`, and `DownloadOptions` for a draft given by name. Except `revision` and
    `subfolder` these are also for an adapter given by Hub id."""


class LoadingOptions(DownloadOptions, total=False):
    """How `from_pretrained` finds and reads files: `DownloadOptions` for the assistant's repository, whose token and
    cache are also those of the draft's repository, and the following.

    Attributes:
        dtype, device: of a draft that is a separate model; by default the target's, without a target its own and CPU.
        draft: a copy of the draft model that the repository names, if that cannot be downloaded: a folder, or a model
            object, whose dtype and device are kept.
        merge: for early exits, as in `Options`.
        eagle3: corrections for a published EAGLE-3 draft whose config is incomplete or wrong: `norm_before_residual`,
            `norm_output`, `rope_theta`, `own_embeddings=False` to use the target's, or `reads`, the indices of the
            target's layers whose outputs the draft reads (docs/ready-made.md). `stats.agreement` shows the effect.
    """

    dtype: torch.dtype | str | None
    device: torch.device | str | None
    draft: CausalLM | str | Path | None
    merge: bool
    eagle3: Any


class SpecDecPPAssistant(AssistantModel):
    """Makes a target model faster: `model.generate(**inputs, assistant_model=assistant)`, with the same output.

    The first such call attaches the assistant to the model (`attach`). `assist` makes an assistant and attaches it at
    once, so that the first call need not wait. `from_pretrained` loads an assistant; the other constructors make one
    from a draft model or from the target's own layers."""

    # Making one ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, repo_or_folder: str | Path, target: CausalLM | None = None, speculation: SpeculationConfig | None = None,
        default: bool = False, **loading: Unpack[LoadingOptions],
    ) -> Self:  # fmt: skip
        """Load draft, adapter, head and settings from a Hub repository or a folder.

        Args:
            repo_or_folder: Hub id (`org/repo` or `org/repo/folder`) or local folder, as written by `save_pretrained` or
                `specdecpp train`; or a published EAGLE-3, DFlash or DSpark draft, in the original format or that of
                `speculators`, or a Gemma 4 assistant.
            target: the model to attach to; by default `attach` or the first call attaches the assistant.
            speculation: settings that replace those of the repository.
            default: make this the target's default assistant, also used by calls that name none (`attach`).
            loading: how files are found and read (`LoadingOptions`).

        Raises:
            ValueError: a file is damaged, or draft, head and target do not fit one another or have different tokens.
            TypeError: an argument is unknown or has a wrong type.
            OSError, huggingface_hub errors: a file or repository is missing or cannot be downloaded.
        """
        check_values({"repo_or_folder": repo_or_folder}, {"repo_or_folder": str | Path}, error=TypeError)
        options: dict[str, Any] = {name: value for name, value in loading.items() if name not in AUTO_KWARGS}
        check_options(options, hints_of(LoadingOptions), ("target", "speculation", "default"))
        dtype, device, draft, eagle3 = map(options.get, ("dtype", "device", "draft", "eagle3"))
        target = None if target is None else causal_lm.base_model(target)
        repository = Repository.of(repo_or_folder, options)
        config = load_config(repository)
        if target is not None:  # before gigabytes are downloaded or read
            check_hash(target, config.vocab_hash, config.target_id)
        if eagle3 is not None:
            kind_of(config).override(config, eagle3)
        head, parts = load_parts(repository, config, draft, target)
        parts = replace(parts, merge=options.get("merge", True))
        kind, how = kind_of(config), Loading(draft, target, dtype, device, repository.hub_kwargs)
        drafter = None if kind.rests_on == "target" else kind.make(config, parts, how)
        return cls(config, drafter, head, parts, speculation)._begun(target, default)

    @classmethod
    def from_draft(
        cls, draft: CausalLM | str | Path, target: CausalLM | None = None, **options: Unpack[DraftOptions]
    ) -> Self:
        """Make an assistant from a separate draft model. `ValueError` if draft, head or vocabulary do not fit.

        Args:
            draft: a causal LM (also a PEFT model) or a published EAGLE-3, DFlash, DSpark or Gemma 4 draft (such as made
                by `Eagle3.read`): the object, its Hub id or its folder.
            target: the model to attach to. A draft given by name is loaded in its dtype and on its device.
            options: `DraftOptions`; `revision` and `subfolder` only for a draft given by name.
        """
        parts = _parts(options, DraftOptions)
        is_named = isinstance(draft, str | Path)
        given: Any = None if is_named else draft
        source = Repository.of(str(draft) if is_named else "", options)
        target = None if target is None else causal_lm.base_model(target)
        kind = ready_made(source if is_named else given)
        if not is_named and kind is None:
            causal_lm.base_model(given)  # raises where this is no model
        if not is_named and (source.revision or source.subfolder):
            raise TypeError("revision, subfolder: for a draft given by name, not a model object. Leave them out.")
        if kind is None:
            named = SpecDecPPConfig(draft_id=source.full_name, draft_revision=source.revision)
            drafter = INDEPENDENT.make(named, parts, Loading(given, target, hub_kwargs=source.hub_kwargs))
            config = _config_of(drafter.model, INDEPENDENT, **special_tokens(drafter.model))
            return cls.of_parts(config, drafter, parts, target, options)
        if parts.adapter is not None or parts.draft_vocab is not None:
            raise ValueError(f"A {kind.name} draft is taken as it is: leave adapter and draft_vocab out.")
        config = load_config(source) if given is None else _config_of(given, kind)
        return cls.of_parts(config, None, Parts(module=kind.load(config, source, given, target)), target, options)

    @classmethod
    def from_early_exit(cls, target: CausalLM, layers: int | Sequence[int], **options: Unpack[Options]) -> Self:
        """Make an assistant that drafts with some of the target's own layers, and attach it to the target. Weights are
        shared and never changed. `ValueError` if a layer does not exist, or adapter, head or vocabulary do not fit.

        Args:
            target: the model to draft for, already on its device.
            layers: the number of first layers, such as 4, or ascending indices, such as [0, 1, 2, 29].
        """
        return cls._of_layers(EARLY_EXIT, target, layers, _parts(options), options)

    @classmethod
    def from_conditioned(
        cls, target: CausalLM, layers: int | Sequence[int], reads: Sequence[int] = (), fusion: Fusion | None = None,
        **options: Unpack[Options],
    ) -> Self:  # fmt: skip
        """Make an assistant that drafts with some of the target's own layers, whose inputs include the target's hidden
        states, and attach it to the target. `ValueError` if a layer does not exist, or a part does not fit.

        One layer is enough, but needs training (`specdecpp train --draft conditioned`).

        Args:
            target, layers: as in `from_early_exit`.
            reads: indices of the target's layers whose outputs are read in addition to its final hidden state.
            fusion: a trained module that combines these inputs and has its own `reads`; by default an untrained one.
        """
        given = {"reads": reads, "fusion": fusion}
        check_values(given, {"reads": Sequence[int], "fusion": Fusion | None}, error=TypeError)
        fusion = fusion or Fusion.untrained(causal_lm.base_model(target), reads)
        return cls._of_layers(CONDITIONED, target, layers, replace(_parts(options), module=fusion), options)

    @classmethod
    def _of_layers(
        cls, kind: DraftKind, target: CausalLM, layers: int | Sequence[int], parts: Parts, options: Options
    ) -> Self:
        target = causal_lm.base_model(target)
        check_target(target, recurrent=True)
        chosen = check_layers(layers, target.config.get_text_config(decoder=True).num_hidden_layers)
        return cls.of_parts(SpecDecPPConfig(draft_kind=kind.name, draft_layers=chosen), None, parts, target, options)

    @classmethod
    def of_parts(
        cls, config: SpecDecPPConfig, drafter: Draft | None, parts: Parts, target: CausalLM | None,
        options: Mapping[str, Any],
    ) -> Self:  # fmt: skip
        """Make an assistant from its parts and the `head`, `speculation` and `default` among `options`, and attach it
        to `target`, if given. Without `drafter`, attaching makes the draft from the target. `ValueError` if the parts
        do not fit."""
        assistant = cls(config, drafter, options.get("head"), parts, options.get("speculation"))
        return assistant._begun(target, options.get("default", False))

    def _begun(self, target: CausalLM | None, default: bool) -> Self:
        """Attach this assistant to `target`, if given, and return it. `ValueError` for `default` without a target."""
        if target is not None:
            self.attach(target, default)
        elif default:
            raise ValueError(
                "default=True makes this the default assistant of a model, and none was given. Pass target=model, or "
                "call assistant.attach(model, default=True)."
            )
        return self.eval()

    # Storing one -----------------------------------------------------------------------------------------------------

    def contents(self, calibration: bool = False) -> publishing.Contents:
        """What `save_pretrained` writes, with the same argument. `ValueError` for an unsaved PEFT adapter."""
        config, drafter = self.config, self.drafter
        if drafter is not None and self.parts.adapter is None and hasattr(drafter.model, "peft_config"):
            raise ValueError(
                f"The draft {config.draft_id!r} carries a PEFT adapter in memory, which the saved assistant would "
                "lack. Save the adapter and name its folder: from_draft(draft, adapter=folder)."
            )
        learned = self.memory.calibrations() if calibration else None
        own_head = None if self.head is not None and self.head.is_published else self.head
        return publishing.Contents(config, self.speculation, own_head, self.parts, learned)

    # The arguments here and in `push_to_hub` differ from transformers', which concern shards of a model's weights.
    def save_pretrained(self, folder: str | Path, calibration: bool = False, **_: Any) -> None:  # type: ignore[override]
        """Write the repository of this assistant to `folder`: config, head, adapter, draft vocabulary, model card.

        Args:
            folder: created if missing.
            calibration: also save the calibration learned while generating, from which loaded assistants then start.

        Raises:
            ValueError: a separate draft has neither Hub id nor folder to load it from, or has an unsaved PEFT adapter.
            NotADirectoryError: `folder` is a file.
        """
        if Path(folder).is_file():
            raise NotADirectoryError(f"{str(folder)!r} is a file, and an assistant is stored in a folder. Name one.")
        publishing.save(self.contents(calibration), Path(folder))

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, calibration: bool = False, *, card: str | None = None,
        commit_message: str | None = "Upload SpecDec++ assistant", commit_description: str | None = None,
        private: bool | None = None, token: bool | str | None = None, revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:  # fmt: skip
        """Upload what `save_pretrained` writes. Further arguments are those of transformers' `push_to_hub`.

        Args:
            card: text of the model card; by default the repository's card is kept, or a new one is made.

        Raises:
            ValueError: the draft is a local folder, so others could not load it.
            huggingface_hub errors: the upload failed.
        """
        return publishing.push(
            self.contents(calibration), repo_id, card, private, token, revision=revision, create_pr=create_pr,
            commit_message=commit_message, commit_description=commit_description,
        )  # fmt: skip


def _config_of(draft: CausalLM, kind: DraftKind, **fields: Any) -> SpecDecPPConfig:
    """The config of an assistant that drafts with the model `draft`, of this `kind`; `fields`: its other fields."""
    name, commit = draft.config.name_or_path or None, commit_of(draft)
    return SpecDecPPConfig(draft_kind=kind.name, draft_id=name, draft_revision=commit, **fields)


def _parts(options: Any, kind: Any = Options) -> Parts:
    """Adapter and draft vocabulary among `options`, whose names and types are checked by the class `kind`."""
    check_options(options, hints_of(kind), ["target"])
    adapter, vocab = options.get("adapter"), options.get("draft_vocab")
    place = {**options, "revision": None, "subfolder": None}  # which are the draft's
    folder = None if adapter is None else find_adapter(Repository.of(adapter, place), None)
    ids = None if vocab is None else torch.as_tensor(vocab)
    return Parts(folder, ids, merge=options.get("merge", True))
