"""What is stored of a draft (`Stored`): its file in an assistant's repository, or a repository of others (`Format`).

Nothing but safetensors and JSON is opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.files import (
    CHECKPOINT,
    INDEX,
    MOST_CONFIG_BYTES,
    PICKLE,
    Repository,
    Weights,
    read_fields,
    save_tensors,
)
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.serving import Destination, Exported

Config: TypeAlias = Mapping[str, Any]  # what a `config.json` says
Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """What an assistant has of a draft, beside its config.

    Attributes:
        adapter: folder of its PEFT adapter.
        draft_vocab: `[n]` token ids that it may propose; `None` for all.
        module: what else was trained of it (`Stored.load`).
        merge: merge the adapter into the weights, or into copies of them.
    """

    adapter: Path | None = None
    draft_vocab: Tensor | None = None
    module: Any = None
    merge: bool = True


@dataclass(frozen=True)
class OwnFile:
    """The file of an assistant's repository with what was trained of a draft beside an adapter.

    Attributes:
        name: of the file.
        field: of `SpecDecPPConfig`: the arguments that the module is made of, which its `to_config` gives.
        read: the module with these arguments, whose tensors are in a file; `ValueError` if the arguments make no sense,
            or the file is damaged or does not fit them.
        tensors: those of a module, as the file has them; of its `state` where other processes have parts of it, in
            `dtype` if that is given.
    """

    name: str
    field: str
    read: Callable[[dict[str, Any], Path], Any]
    tensors: Callable[..., dict[str, Tensor]] = nn.Module.state_dict

    def load(self, config: SpecDecPPConfig, path: Path) -> Any:
        """The module that a config describes; `ValueError` if it describes none, or as in `read`."""
        if (arguments := getattr(config, self.field)) is None:
            raise ValueError(
                f"config.json does not describe ({self.field}) what is in {self.name}. Save the assistant again."
            )
        return self.read(arguments, path)


@dataclass(frozen=True)
class SelfCheck:
    """How well a draft guesses what a target says, as it is read and as it may have to be read.

    Attributes:
        readings: a name, and how often the first, second, ... candidate of a round is the target's choice.
        remarks: what follows from them, in sentences.
    """

    readings: list[tuple[str, list[float]]]
    remarks: list[str]


class Readings(ABC):
    """What a checkpoint may mean, where its config is silent or wrong."""

    @abstractmethod
    def checked(self, overrides: Any) -> dict[str, Any]:
        """What is to be read otherwise than the config says, if that is known and makes sense; else `ValueError`."""

    @abstractmethod
    def read(self, overrides: dict[str, Any], raw: Config, tensors: Tensors, source: str) -> Any:
        """`Format.read` with these overrides."""

    @abstractmethod
    def self_check(self, config: SpecDecPPConfig, module: Any, target: CausalLM, tokenizer: Any) -> SelfCheck:
        """How well the draft guesses what `target` says, in each way to read it."""


class Format(ABC):
    """A form in which others publish such drafts: repositories that `config.draft_id` names.

    Attributes:
        readings: where checkpoints may mean several drafts.
        no_model: why a model object is none, with which a message goes on; `None` where it can be one.
        served_by: which engines serve such a repository, and how; `None` where it is exported for them.
        is_whole: whether a repository holds the draft and nothing else; else tensors are read as they are asked for.
        most_config_bytes: of its `config.json`.
        cure: what to do where there are no safetensors.
    """

    readings: ClassVar[Readings | None] = None
    no_model: ClassVar[str | None] = None
    served_by: ClassVar[str | None] = None
    is_whole: ClassVar[bool] = True
    most_config_bytes: ClassVar[int] = MOST_CONFIG_BYTES
    cure: ClassVar[str] = (
        "Convert it once, tensors only: specdecpp inspect {name} --convert FOLDER. Then load FOLDER, or ask its author "
        "for safetensors."
    )

    def recognises(self, raw: Config) -> bool:  # noqa: ARG002
        """Whether a `config.json` of others is of such a draft, or of a relative that `read` refuses."""
        return False

    def is_marked(self, raw: Config) -> bool:
        """Whether it says so itself, so that it is of no ordinary model."""
        return self.recognises(raw)

    def fields(self, raw: Config) -> dict[str, Any]:  # noqa: ARG002
        """What it says of an assistant: fields of `SpecDecPPConfig`, such as `target_id`; `ValueError` if damaged."""
        return {}

    @abstractmethod
    def read(self, raw: Config, tensors: Tensors, source: str) -> Any:
        """The draft that a config and its tensors make; these are shared, not copied.

        Args:
            source: where they are from, for messages.

        Raises:
            ValueError: they are of another draft, damaged, or do not go together; with what to do.
        """

    def facts(self, module: Any) -> dict[str, str]:  # noqa: ARG002
        """What `inspect` shows of a draft, by label."""
        return {}

    def of_model(self, draft: CausalLM) -> Any:
        """The draft of a model object, which shares its tensors; `ValueError` if it is none."""
        if self.no_model is not None:
            raise ValueError(f"draft={type(draft).__name__} is a model, and {self.no_model}.")
        return self.read(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)

    def load(self, source: Repository, overrides: dict[str, Any] | None = None) -> Any:
        """The draft in a repository; errors as in `read`, and those of a download.

        Args:
            overrides: what is to be read otherwise than the config says, where there are other `readings`.
        """
        read = self.read if not overrides or self.readings is None else partial(self.readings.read, overrides)
        raw = read_fields(source.file("config.json"), self.most_config_bytes)
        weights = Weights.of(source)
        if not weights:
            raise ValueError(
                f"{source.full_name!r} has neither {CHECKPOINT} nor {INDEX}, and nothing but safetensors is opened "
                f"here: a pickle, such as {PICKLE}, could run code. {self.cure.format(name=source.full_name)}"
            )
        if not self.is_whole:
            return read(raw, weights, source.full_name)
        return read(raw, weights.all(), str(weights.index))


@dataclass(frozen=True)
class Stored:
    """What is stored of a draft beside its adapter and its vocabulary, and what others serve.

    Attributes:
        own: its file, where something was trained beside an adapter.
        format: in which others publish such drafts.
        is_named: whether `config.draft_id` must say where the draft is.
        export: writes the draft into a folder in a form that other engines serve; `ValueError` where it cannot be.
        unserved: why there is no such form, and what to do instead, in whole sentences. `{draft}`, `{target}` and
            `{output}` stand for what is described, its target and the folder.
    """

    own: OwnFile | None = None
    format: Format | None = None
    is_named: bool = False
    export: Callable[[SpecDecPPConfig, Parts, Destination], Exported] | None = None
    unserved: str = ""

    def own_file(self, config: SpecDecPPConfig) -> str | None:
        """The name of the draft's file in the assistant's repository, if it has one there."""
        return self.own.name if self.own is not None and config.draft_id is None else None

    def takes_copy(self, config: SpecDecPPConfig) -> bool:
        """Whether the draft is in a repository of its own, which another copy can take the place of."""
        return self.is_named or config.draft_id is not None

    def load(self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None) -> Any:
        """What was trained of the draft beside an adapter; `None` where that is nothing.

        Args:
            repository: the assistant's.
            draft: where the draft is, in the place of what the config names.

        Raises:
            ValueError: a file is damaged, or not what is described.
        """
        if self.format is not None and is_model(draft):
            return self.format.of_model(draft)
        if self.own is not None and config.draft_id is None:
            return self.own.load(config, repository.file(self.own.name))
        if self.format is None:
            return None
        if draft is None and config.draft_id is None:
            raise ValueError(
                "config.json names no repository with the draft (draft_id). Write its Hub id there, or say where it "
                "is: draft=ID_OR_FOLDER."
            )
        named, pinned = (config.draft_id, config.draft_revision) if draft is None else (draft, None)
        source = Repository(str(named), pinned, None, repository.hub_kwargs)
        return self.format.load(source, getattr(config, self.own.field) if self.own else None)

    def describe(self, config: SpecDecPPConfig, module: Any) -> None:
        """Note what was trained in the config that is stored."""
        if self.own is not None and config.draft_id is None:
            setattr(config, self.own.field, module.to_config())

    def save(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        """Write the draft's own file, if it has one: what others published stays where it is."""
        if self.own is not None and config.draft_id is None:
            save_tensors(self.own.tensors(module), folder / self.own.name)

    def check_storable(self, config: SpecDecPPConfig) -> None:
        """Raise `ValueError` if nobody could load this draft again."""
        if self.is_named and config.draft_id is None:
            raise ValueError(
                "The draft is a model in memory without a Hub id or folder, so the saved assistant could not be "
                "loaded. Save the draft, load it from there and build the assistant from that: assist(model, folder)."
            )


def raw_config(name: CausalLM | str | Path) -> dict[str, Any] | None:
    """The `config.json` of a folder or a Hub id, or of a model object; `None` if it is not there, or is none: whoever
    loads it says so."""
    if is_model(name):
        config = getattr(name, "config", None)
        return config.to_dict() if isinstance(config, PreTrainedConfig) else None
    try:
        return read_fields(Repository(str(name)).file("config.json"))
    except (OSError, ValueError):
        return None


def pinned(config: SpecDecPPConfig) -> str:
    """The repository of a draft and its commit, for messages."""
    return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"


def is_model(draft: CausalLM | str | Path | None) -> bool:
    """Whether a draft is given as an object."""
    return draft is not None and not isinstance(draft, str | Path)
