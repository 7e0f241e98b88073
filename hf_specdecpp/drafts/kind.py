"""What others ask of a kind of draft (`Kind`): how its drafts are made and stored, in which form others publish them
(`Format`), and how they are trained (`Trainable`).

A kind is a value, whose functions are in its own file or folder. It holds nothing of an assistant. Nothing but
safetensors and JSON is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_specdecpp import files
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.checks import check_numbers
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.files import Repository, Weights
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import outside
from hf_specdecpp.serving import Destination, Exported

Config: TypeAlias = Mapping[str, Any]  # what a `config.json` says
PARTS = ("transformer_layer_config", "text_config")  # of a config, which may hold the fields of the layers


@dataclass(frozen=True)
class Parts:
    """What an assistant has of a draft, beside its config.

    Attributes:
        adapter: folder of its PEFT adapter.
        draft_vocab: `[n]` token ids that it may propose; `None` for all.
        module: what else was trained of it (`Kind.load`).
        merge: merge the adapter into the weights, or into copies of them.
    """

    adapter: Path | None = None
    draft_vocab: Tensor | None = None
    module: Any = None
    merge: bool = True


@dataclass(frozen=True)
class Loading:
    """Where a draft is loaded to, and from.

    Attributes:
        draft: it, or where it is, in the place of what the config names.
        target: that it is made of, or in whose dtype and on whose device it is loaded, unless these are given.
        hub_kwargs: for downloads.
    """

    draft: CausalLM | str | Path | None = None
    target: CausalLM | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)


# Stored, here and by others. ------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Format:
    """A form in which others publish such drafts: repositories that `config.draft_id` names.

    Attributes:
        read: the draft that a config, its tensors (shared, not copied) and the name of their source make; with a fourth
            argument what is read otherwise than the config says. `ValueError` with what to do if they are of another
            draft, damaged, or do not go together.
        recognises: whether a `config.json` of others is of such a draft, or of a relative that `read` refuses.
        is_marked: whether it says so itself, so that it is of no ordinary model; by default as above.
        misfit: what about a draft does not fit a target, as a clause after the draft's name; `None` where it fits.
        belongs: in whole sentences which target such a draft is for.
        fields: what it says of an assistant: fields of `SpecDecPPConfig`; `ValueError` if damaged.
        facts: what `inspect` shows of a draft, by label.
        check_overrides: what is to be read otherwise than the config says, if that is known and makes sense; else
            `ValueError`. `None` where a checkpoint has one meaning.
        module: the class of the draft, where it is a model that a user may have as an object.
        no_model: why a model object is none, with which a message goes on; `None` where it can be one.
        served_by: which engines serve such a repository, and how; `None` where it is exported for them.
        is_whole: whether a repository holds the draft and nothing else; else tensors are read as they are asked for.
        most_config_bytes: of its `config.json`.
        cure: what to do where there are no safetensors.
    """

    read: Callable[..., Any]
    recognises: Callable[[Config], bool] = lambda _: False
    is_marked: Callable[[Config], bool] | None = None
    misfit: Callable[[Any, CausalLM], str | None] = lambda *_: None
    belongs: str = ""
    fields: Callable[[Config], dict[str, Any]] = lambda _: {}
    facts: Callable[[Any], dict[str, str]] = lambda _: {}
    check_overrides: Callable[[Any], dict[str, Any]] | None = None
    module: type | None = None
    no_model: str | None = None
    served_by: str | None = None
    is_whole: bool = True
    most_config_bytes: int = files.MOST_CONFIG_BYTES
    cure: str = (
        "Convert it once, tensors only: specdecpp inspect {name} --convert FOLDER. Then load FOLDER, or ask its author "
        "for safetensors."
    )

    def of_model(self, draft: CausalLM) -> Any:
        """The draft of a model object, which shares its tensors; `ValueError` if it is none."""
        if self.module is not None and isinstance(draft, self.module):
            return draft
        if self.no_model is not None:
            raise ValueError(f"draft={type(draft).__name__} is a model, and {self.no_model}.")
        return self.read(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)

    def load(self, source: Repository, overrides: dict[str, Any] | None, target: CausalLM | None, name: str) -> Any:
        """The draft in a repository; errors as of `read` and of a download. Of a draft, `name` in messages, for another
        `target` no weights are read, and where its config says so none are downloaded."""
        raw = files.read_fields(source.file("config.json"), self.most_config_bytes)
        if target is not None and self.is_whole:
            part = next((raw[key] for key in PARTS if isinstance(raw.get(key), dict)), raw)
            check_numbers({"vocab_size": part.get("vocab_size")})
            checkpoints.check_fit(target, name, outside(part.get("vocab_size"), target), self.belongs)
        weights = Weights.of(source)
        if not weights:
            raise ValueError(
                f"{source.full_name!r} has neither {files.CHECKPOINT} nor {files.INDEX}, and nothing but safetensors "
                f"is opened here: a pickle, such as {files.PICKLE}, could run code. "
                f"{self.cure.format(name=source.full_name)}"
            )
        otherwise = [overrides] if overrides and self.check_overrides is not None else []
        if not self.is_whole:
            return self.read(raw, weights, source.full_name, *otherwise)
        outline = self.read(raw, weights.outline(), str(weights.index), *otherwise)  # before weights are read
        if target is not None:
            checkpoints.check_fit(target, name, self.misfit(outline, target), self.belongs)
        return self.read(raw, weights.all(), str(weights.index), *otherwise)


# Kinds. ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainable:
    """What a training run asks of a kind.

    Attributes:
        first_layers: how many of the target's first layers draft unless the run says otherwise; `None` for its last
            one alone.
        own_layers: whether it drafts with layers of its own, all of which are trained, and no adapter.
        cannot: what such a run cannot do, with the reason: `"be trained"` (it stays as others trained it), `"stay
            untrained"`, `"late verdicts"` (a head that judges a candidate after the draft has read it), `"draft
            vocabulary"`.
    """

    first_layers: int | None = None
    own_layers: bool = False
    cannot: Mapping[Literal["be trained", "stay untrained", "late verdicts", "draft vocabulary"], str] = field(
        default_factory=dict
    )


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of draft.

    Attributes:
        name: `config.draft_kind`.
        rests_on: whose weights it drafts with: `"draft"`, a model of its own; `"target"`, which it meets when the
            assistant is attached; or `"nothing"`.
        draft: the draft of an assistant. One that rests on the target is made of `Loading.target`. `ValueError` if its
            parts do not go together, or do not fit the target.
        describe: the draft in a few words, for messages, cards and reports, with a name for the target.
        own: its file in an assistant's repository, where something was trained beside an adapter.
        format: in which others publish such drafts.
        is_named: whether `config.draft_id` must say where the draft is, or nobody could load it again.
        export: writes the draft into a folder in a form that other engines serve; `ValueError` where it cannot be.
        unserved: why there is no such form, and what to do instead, in whole sentences. `{draft}`, `{target}` and
            `{output}` stand for what is described, its target and the folder.
        trainable: how it is trained; `None` where it is not.
        untrainable: why it is not trained, and what to do instead; empty where it is `trainable`.
    """

    name: str
    rests_on: Literal["draft", "target", "nothing"]
    draft: Callable[[SpecDecPPConfig, Parts, Loading], Draft]
    describe: Callable[..., str]
    own: OwnFile | None = None
    format: Format | None = None
    is_named: bool = False
    export: Callable[[SpecDecPPConfig, Parts, Destination], Exported] | None = None
    unserved: str = ""
    trainable: Trainable | None = None
    untrainable: str = ""

    def own_of(self, config: SpecDecPPConfig) -> OwnFile | None:
        """The draft's file in the assistant's repository, if it has one there: what others publish stays elsewhere."""
        return self.own if config.draft_id is None else None

    def load(
        self,
        config: SpecDecPPConfig,
        repository: Repository,
        draft: CausalLM | str | Path | None = None,
        target: CausalLM | None = None,
    ) -> Any:
        """What was trained of the draft beside an adapter, in the assistant's repository, or in `draft` in the place of
        what the config names; `None` where that is nothing. `ValueError` if a file is damaged, not what is described,
        or, before weights are read, if the draft does not fit `target`."""
        if self.format is not None and is_model(draft):
            return self.format.of_model(draft)
        if (own := self.own_of(config)) is not None:
            if (arguments := getattr(config, own.field)) is None:
                raise ValueError(
                    f"config.json does not describe ({own.field}) what is in {own.name}. Save the assistant again."
                )
            return own.read(arguments, repository.file(own.name))
        if self.format is None:
            return None
        if draft is None and config.draft_id is None:
            raise ValueError(
                "config.json names no repository with the draft (draft_id). Write its Hub id there, or say where it "
                "is: draft=ID_OR_FOLDER."
            )
        named, commit = (config.draft_id, config.draft_revision) if draft is None else (draft, None)
        source = Repository(str(named), commit, None, repository.hub_kwargs)
        otherwise = getattr(config, self.own.field) if self.own else None
        return self.format.load(source, otherwise, target, self.describe(config))


def raw_config(name: CausalLM | str | Path) -> dict[str, Any] | None:
    """The `config.json` of a folder, Hub id or model object; `None` if there is none: whoever loads it says so."""
    if is_model(name):
        config = getattr(name, "config", None)
        return config.to_dict() if isinstance(config, PreTrainedConfig) else None
    try:
        return files.read_fields(Repository(str(name)).file("config.json"))
    except (OSError, ValueError):
        return None


def pinned(config: SpecDecPPConfig) -> str:
    """The repository of a draft and its commit, for messages."""
    return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"


def is_model(draft: CausalLM | str | Path | None) -> bool:
    """Whether a draft is given as an object."""
    return draft is not None and not isinstance(draft, str | Path)
