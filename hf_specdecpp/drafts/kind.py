"""What others ask of a kind of draft: `Kind`. Its instances hold nothing of an assistant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.files import Repository, save_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.serving.destination import Destination, Exported

Feat = Literal["replays", "training", "stays untrained", "late verdicts", "draft vocabulary"]


@dataclass(frozen=True)
class Parts:
    """What an assistant has of a draft, beside its config.

    Attributes:
        adapter: folder of its PEFT adapter.
        draft_vocab: `[n]` token ids that it may propose; `None` for all.
        module: what else was trained of it (`Kind.module_files`).
        merge: merge the adapter into the weights, or into copies of them.
    """

    adapter: Path | None = None
    draft_vocab: Tensor | None = None
    module: Any = None
    merge: bool = True


@dataclass(frozen=True)
class Loading:
    """How a draft that is a model of its own is loaded.

    Attributes:
        draft: it, or where it is, in the place of what the config names.
        target: in whose dtype and on whose device it is loaded, unless these are given.
        hub_kwargs: for downloads.
    """

    draft: CausalLM | str | Path | None = None
    target: CausalLM | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfCheck:
    """How well a draft guesses what a target says, as it is read and as it may have to be read.

    Attributes:
        readings: a name, and how often the first, second, ... candidate of a round is the target's choice.
        remarks: what follows from them, in sentences.
    """

    readings: list[tuple[str, list[float]]]
    remarks: list[str]


class Kind:
    """A kind of draft.

    Attributes:
        name: `config.draft_kind`.
        rests_on: whose weights it drafts with: `"draft"`, a model of its own; `"target"`, which it meets when the
            assistant is attached; or `"nothing"`.
        module_files: names that the file with what was trained beside an adapter can have; none where there is nothing.
        own_layer: whether it drafts with layers of its own, all of which are trained, and no adapter.
        drafts_blocks: whether one pass of it proposes several candidates.
        foreign_files: patterns of the files of a repository that others trained such a draft in.
        can_be_misread: whether what others trained may mean several drafts, so that `self_check` is of use.
        cannot: what cannot be done with it, with the reason: `"replays"` (of texts that were recorded once),
            `"training"`, `"stays untrained"`, `"late verdicts"` (a head that judges a candidate after the draft has
            read it), `"draft vocabulary"`.
    """

    name: ClassVar[str]
    rests_on: ClassVar[Literal["draft", "target", "nothing"]]
    module_files: ClassVar[tuple[str, ...]] = ()
    own_layer: ClassVar[bool] = False
    drafts_blocks: ClassVar[bool] = False
    foreign_files: ClassVar[tuple[str, ...]] = ()
    can_be_misread: ClassVar[bool] = False
    cannot: ClassVar[Mapping[Feat, str]] = {}

    def owns(self, raw: Mapping[str, Any]) -> bool:
        """Whether a `config.json` describes this kind."""
        default = SpecDecPPConfig().draft_kind
        return raw.get("model_type") == SpecDecPPConfig.model_type and raw.get("draft_kind", default) == self.name

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether a `config.json` describes a draft of this kind that others trained, and no assistant."""
        return False

    def read_config(self, raw: dict[str, Any], source: Repository, commit: str | None) -> SpecDecPPConfig:  # noqa: ARG002
        """The config that such a `config.json` describes; `ValueError` if it is damaged or too new.

        Args:
            source, commit: where it is from.
        """
        config: SpecDecPPConfig = SpecDecPPConfig.from_dict(raw)
        return config

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """The draft in a few words, for messages, cards and reports."""
        raise NotImplementedError

    def override(self, config: SpecDecPPConfig, values: Any) -> None:
        """Read the draft otherwise than its own config says; `ValueError` where there is nothing to override."""
        raise ValueError(
            f"eagle3={values} says how an EAGLE-3 draft that others trained is to be read, and this assistant drafts "
            f"with {self.describe(config)}. Leave it out."
        )

    def is_foreign(self, config: SpecDecPPConfig) -> bool:  # noqa: ARG002
        """Whether the draft is as others trained it, in a repository that is not of our format."""
        return False

    def facts(self, module: Any) -> dict[str, str]:  # noqa: ARG002
        """What `inspect` shows of what was trained, by label."""
        return {}

    def check_foreign(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> None:
        """Raise `ValueError` unless a config and tensors of others make such a draft."""
        raise NotImplementedError(f"Nobody else trains {self.name}.")

    def self_check(self, config: SpecDecPPConfig, module: Any, target: CausalLM, tokenizer: Any) -> SelfCheck:
        """How well the draft guesses what `target` says."""
        raise NotImplementedError(f"{self.name} can be read in one way only.")

    def check_storable(self, config: SpecDecPPConfig) -> None:
        """Raise `ValueError` if nobody could load this draft again."""

    def check_shareable(self, config: SpecDecPPConfig) -> None:
        """Raise `ValueError` if nobody else could."""

    def module_file(self, config: SpecDecPPConfig) -> str | None:  # noqa: ARG002
        """The file of the assistant's own repository with what was trained beside an adapter, if there is one."""
        return self.module_files[0] if self.module_files else None

    def read_module(self, config: SpecDecPPConfig, path: Path) -> nn.Module:
        """What is in `module_file`; `ValueError` if it is damaged or not what the config describes."""
        raise NotImplementedError(f"{self.name} has no such file.")

    def tensors_of(
        self, module: Any, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """The tensors of layers of its own, as a file has them.

        Args:
            state: of the module, where other processes have parts of it.
            dtype: of its weights; as they are by default.
        """
        raise NotImplementedError(f"{self.name} has no layers of its own.")

    def read_layers(self, arguments: dict[str, Any], path: Path) -> Any:
        """Layers of its own that were trained here, with these settings, whose tensors are in `path`.

        Raises:
            ValueError: the settings make no sense, or the file is damaged or does not fit them.
        """
        raise NotImplementedError(f"{self.name} has no layers of its own.")

    def load_module(
        self,
        config: SpecDecPPConfig,
        repository: Repository,
        draft: CausalLM | str | Path | None = None,  # noqa: ARG002
    ) -> Any:
        """What was trained beside an adapter, of the assistant's repository or of one that the config names.

        Args:
            draft: where the latter is, in the place of what the config names.
        """
        file = self.module_file(config)
        return None if file is None else self.read_module(config, repository.file(file))

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        """Describe what was trained in the config that is stored."""
        raise NotImplementedError(f"{self.name} has nothing beside an adapter.")

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        """Write `module_file`."""
        save_tensors(module.state_dict(), folder / str(self.module_file(config)))

    def load(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft | None:
        """The draft of an assistant that is loaded; `None` where it is made of a target (`make`)."""
        raise NotImplementedError

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> Draft:
        """The draft, made of the target that the assistant is attached to."""
        raise NotImplementedError(f"{self.name} is a model of its own.")

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """Write the draft into `to.folder` in a form that other engines serve.

        Raises:
            ValueError: none serves such a draft, or this one; with the reason, and what to do instead.
        """
        raise NotImplementedError

    def usual_layers(self, depth: int) -> int | list[int]:
        """The target's layers that draft unless a training run says otherwise, of so many."""
        raise NotImplementedError(f"{self.name} has no layers of the target.")
