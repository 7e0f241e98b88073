"""What a kind of draft is (`DraftKind`), one of which others publish drafts, too (`PublishedKind`), and what a draft is
made of (`Parts`, `Loading`). Nothing but safetensors and JSON is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_specdecpp import files
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import check_numbers
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.files import Repository, Weights
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move
from hf_specdecpp.models.loading import outside
from hf_specdecpp.serving import Destination, Exported

Config: TypeAlias = Mapping[str, Any]  # what a `config.json` says
Tensors: TypeAlias = dict[str, Tensor]
NESTED = ("transformer_layer_config", "text_config")  # parts of a config that may hold the fields of the layers


@dataclass(frozen=True)
class Parts:
    """The parts of a draft that an assistant has, beside its config.

    Attributes:
        adapter: folder of the draft's PEFT adapter.
        draft_vocab: `[n]` token ids that the draft may propose; `None` for all.
        module: the module that was trained beside the adapter, or the published draft (`DraftKind.load`).
        merge: merge the adapter into the weights, or into copies of them.
    """

    adapter: Path | None = None
    draft_vocab: Tensor | None = None
    module: Any = None
    merge: bool = True


@dataclass(frozen=True)
class Loading:
    """Where a draft is loaded from, and to.

    Attributes:
        draft: the draft, its folder or its Hub id, instead of the one that the config names.
        target: the draft is made of its layers, or loaded in its dtype and on its device unless these are given.
        hub_kwargs: for downloads.
    """

    draft: CausalLM | str | Path | None = None
    target: CausalLM | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)


class DraftKind(ABC):
    """A kind of draft. `known.KINDS` has an instance of each, which holds nothing of an assistant.

    Attributes:
        name: `config.draft_kind`.
        rests_on: whose weights it drafts with: `"draft"`, a model of its own; `"target"`, to which it is bound when the
            assistant is attached; or `"nothing"`.
        is_named: whether `config.draft_id` must say where the draft is, or nobody could load it again.
        own_file: the file of an assistant's repository with the module that was trained beside an adapter; empty where
            no module is trained.
        own_field: the field of `SpecDecPPConfig` with the arguments of that module, which its `to_config` returns.
        unserved: why other engines serve no such draft, and what to do instead, in whole sentences; empty where the
            draft is exported. `{draft}`, `{target}` and `{output}` stand for its description, target and folder.
        untrainable: why it is not trained, and what to do instead; empty where it is.
        first_layers: how many of the target's first layers draft unless a training run says otherwise; `None` for its
            last one alone.
        own_layers: whether it drafts with layers of its own, all of which are trained, and no adapter.
        cannot: what a training run cannot do, with the reason: `"be trained"` (it stays as others trained it), `"stay
            untrained"`, `"late verdicts"` (a head that judges a candidate after the draft has read it), `"draft
            vocabulary"`.
    """

    name: ClassVar[str]
    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "target"
    is_named: ClassVar[bool] = False
    own_file: ClassVar[str] = ""
    own_field: ClassVar[str] = ""
    unserved: ClassVar[str] = ""
    untrainable: ClassVar[str] = ""
    first_layers: ClassVar[int | None] = None
    own_layers: ClassVar[bool] = False
    cannot: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        """The draft of an assistant, made of a target where it rests on that. `ValueError` if its parts do not go
        together, or do not fit the target."""

    @abstractmethod
    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """The draft in a few words, for messages, cards and reports, with a name for the target."""

    def load(self, config: SpecDecPPConfig, repository: Repository, draft: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """The module that was trained beside an adapter, from the assistant's repository; `None` if there is none.
        A published draft is read from its own repository, or from `draft` (a folder, Hub id or model) instead.
        `ValueError` if a file is damaged or not as described, or, before weights are read, if the draft does not fit
        `target`."""
        if not self.has_own_file(config):
            return None
        if (arguments := getattr(config, self.own_field)) is None:
            raise ValueError(
                f"config.json does not describe ({self.own_field}) what is in {self.own_file}. Save the assistant "
                "again."
            )
        return self.read_own(arguments, repository.file(self.own_file))

    def has_own_file(self, config: SpecDecPPConfig) -> bool:
        """Whether the assistant's repository has `own_file`: what others publish stays elsewhere."""
        return bool(self.own_file) and config.draft_id is None

    def read_own(self, arguments: dict[str, Any], path: Path) -> Any:
        """The module with these arguments, whose tensors are in `own_file`, which is at `path`; `ValueError` if the
        arguments make no sense, or the file is damaged or does not fit them."""
        raise NotImplementedError

    def own_tensors(self, module: Any, state: Tensors | None = None, dtype: torch.dtype | None = None) -> Tensors:  # noqa: ARG002
        """The tensors of `own_file`: those of a module, or of its `state` where other processes have parts of it, in
        `dtype` if that is given."""
        return dict(state or module.state_dict())

    def override(self, config: SpecDecPPConfig, values: Any) -> None:
        """Read a draft of others otherwise than its config says; `ValueError` where there is nothing to override."""
        raise ValueError(
            f"eagle3={values} says how an EAGLE-3 draft that others trained is to be read, and this assistant drafts "
            f"with {self.describe(config)}. Leave it out."
        )

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """Write the draft into a folder in a form that other engines serve; `ValueError` where it cannot be written."""
        raise NotImplementedError


class PublishedKind(DraftKind):
    """A kind whose drafts others publish, too: `config.draft_id` names their repository.

    Attributes:
        belongs: which target such a draft is for, in whole sentences.
        drafter: the class of the `Draft`, which is made of what was read and the target that it was bound to.
        model_class: the class of what is read, where it is a model that a user may have as an object.
        no_model: the end of a message: why a model object is no such draft; empty where it can be one.
        served_by: which engines serve such a repository, and how; empty where it is exported for them.
        is_whole: whether a repository holds the draft and nothing else; else tensors are read as they are asked for.
        most_config_bytes: of its `config.json`.
        cure: what to do where there are no safetensors.
    """

    belongs: ClassVar[str] = ""
    drafter: ClassVar[type[Any]]
    model_class: ClassVar[type | None] = None
    no_model: ClassVar[str] = ""
    served_by: ClassVar[str] = ""
    is_whole: ClassVar[bool] = True
    most_config_bytes: ClassVar[int] = files.MOST_CONFIG_BYTES
    cure: ClassVar[str] = (
        "Convert it once, tensors only: specdecpp inspect {name} --convert FOLDER. Then load FOLDER, or ask its author "
        "for safetensors."
    )

    @abstractmethod
    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> Any:
        """The draft that a config and its tensors (shared, not copied) make; `source` is their name in messages.
        `ValueError` with what to do if they are of another draft, damaged, or do not go together."""

    def reader(self, config: SpecDecPPConfig) -> Callable[[Config, Mapping[str, Tensor], str], Any]:  # noqa: ARG002
        """`read`, with what the config of an assistant says otherwise than the draft's own."""
        return self.read

    def recognises(self, raw: Config) -> bool:  # noqa: ARG002
        """Whether a `config.json` of others is of such a draft, or of a relative that `read` refuses."""
        return False

    def is_marked(self, raw: Config) -> bool:
        """Whether the config names such drafts, so that it is of no ordinary model."""
        return self.recognises(raw)

    def fields(self, raw: Config) -> dict[str, Any]:  # noqa: ARG002
        """What a config of others says of an assistant: fields of `SpecDecPPConfig`; `ValueError` if damaged."""
        return {}

    def settings(self, module: Any) -> dict[str, Any]:
        """The settings of a draft that `inspect` shows, by name."""
        settings: dict[str, Any] = module.to_config()
        return settings

    def misfit(self, module: Any, target: CausalLM) -> str | None:  # noqa: ARG002
        """What about a draft does not fit a target, as a clause after the draft's name; `None` where it fits."""
        return None

    def load(self, config: SpecDecPPConfig, repository: Repository, draft: Any = None, target: Any = None) -> Any:
        if draft is not None and not isinstance(draft, str | Path):
            return self._of_model(draft)
        if self.has_own_file(config):
            return super().load(config, repository)
        if draft is None and config.draft_id is None:
            raise ValueError(
                "config.json names no repository with the draft (draft_id). Write its Hub id there, or say where it "
                "is: draft=ID_OR_FOLDER."
            )
        named, commit = (config.draft_id, config.draft_revision) if draft is None else (draft, None)
        source, name = Repository(str(named), commit, None, repository.hub_kwargs), self.describe(config)
        raw = files.read_fields(source.file("config.json"), self.most_config_bytes)
        if target is not None and self.is_whole:
            part = next((raw[key] for key in NESTED if isinstance(raw.get(key), dict)), raw)
            check_numbers({"vocab_size": part.get("vocab_size")})
            self._refuse(target, name, outside(part.get("vocab_size"), target))
        weights = Weights.of(source)
        if not weights:
            raise ValueError(
                f"{source.full_name!r} has neither {files.CHECKPOINT} nor {files.INDEX}, and nothing but safetensors "
                f"is opened here: a pickle, such as {files.PICKLE}, could run code. "
                f"{self.cure.format(name=source.full_name)}"
            )
        read = self.reader(config)
        if not self.is_whole:
            return read(raw, weights, source.full_name)
        outline = read(raw, weights.outline(), str(weights.index))  # before weights are read
        if target is not None:
            self._refuse(target, name, self.misfit(outline, target))
        return read(raw, weights.all(), str(weights.index))

    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        target: Any = how.target
        self.bind(parts.module, target, self.describe(config))
        draft: Draft = self.drafter(parts.module, target)
        return draft

    def bind(self, module: Any, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
        """Move a draft, `name` in messages, to its target, in the target's dtype or another one; `ValueError` if it was
        made for another target."""
        self._refuse(target, name, self.misfit(module, target))
        move(module, input_device(target), dtype or target.dtype)

    def _refuse(self, target: CausalLM, name: str, wrong: str | None) -> None:
        """Raise `ValueError` if something about a draft is `wrong` for its target."""
        if wrong is not None:
            raise ValueError(f"{name} {wrong} in {type(target).__name__}. {self.belongs}")

    def _of_model(self, draft: CausalLM) -> Any:
        """The draft of a model object, which shares its tensors; `ValueError` if it is none."""
        if self.model_class is not None and isinstance(draft, self.model_class):
            return draft
        if self.no_model:
            raise ValueError(f"draft={type(draft).__name__} is a model, and {self.no_model}.")
        return self.read(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)


def raw_config(name: CausalLM | str | Path) -> dict[str, Any] | None:
    """The `config.json` of a folder, Hub id or model object; `None` if there is none: whoever loads it says so."""
    if not isinstance(name, str | Path):
        config = getattr(name, "config", None)
        return config.to_dict() if isinstance(config, PreTrainedConfig) else None
    try:
        return files.read_fields(Repository(str(name)).file("config.json"))
    except (OSError, ValueError):
        return None


def pinned(config: SpecDecPPConfig) -> str:
    """The repository of a draft and its commit, for messages."""
    return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"
