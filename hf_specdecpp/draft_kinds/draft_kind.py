"""Base classes for the kinds of draft: `DraftKind`, `PublishedKind` for kinds whose drafts others publish, too, and
`StoredKind` for published kinds whose module is defined in this package. `Parts` and `Loading` are arguments of
`DraftKind.make`. Only safetensors and JSON files are opened."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_specdecpp import files
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import check_numbers, check_values, hints_of
from hf_specdecpp.draft_kinds import acceptance, checkpoints
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import Repository, Weights
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move
from hf_specdecpp.models.loading import outside, tokenizer_of
from hf_specdecpp.serving import Destination, Exported

logger = logging.get_logger("hf_specdecpp")

Config: TypeAlias = Mapping[str, Any]  # the fields of a `config.json`
Tensors: TypeAlias = dict[str, Tensor]
NESTED = ("transformer_layer_config", "text_config")  # parts of a config that may contain the layers' fields


@dataclass(frozen=True)
class Parts:
    """The parts of an assistant's draft that are not in its `SpecDecPPConfig`."""

    adapter: Path | None = None  # folder of the draft's PEFT adapter
    draft_vocab: Tensor | None = None  # `[n]` token ids that the draft may propose; `None` for all
    module: Any = None  # the trained module or the published draft, as `DraftKind.load` returns it
    merge: bool = True  # merge the adapter of an early exit into copies of the target's weights


@dataclass(frozen=True)
class Loading:
    """The models that `DraftKind.make` uses, and the dtype and device to load a draft with."""

    draft: CausalLM | str | Path | None = None  # a model, folder or Hub id that replaces the draft named in the config
    target: CausalLM | None = None  # whose layers the draft uses, or whose dtype and device are the defaults
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments for downloads


class DraftKind(ABC):
    """A kind of draft: makes, loads, describes and exports drafts. `known.KINDS` has one stateless instance of each."""

    name: ClassVar[str]  # value of `config.draft_kind`
    # The model that `make` needs: a separate "draft", or the "target" (then it is made when the assistant is attached).
    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "target"
    is_named: ClassVar[bool] = False  # whether saving needs a `config.draft_id`, from which to load the draft again
    own_file: ClassVar[str] = ""  # file in an assistant's repository: weights of the trained module, if any
    own_field: ClassVar[str] = ""  # field of `SpecDecPPConfig`: that module's arguments (its `to_config`)
    # Full sentences: why the draft cannot be exported to other engines, and an alternative; empty if it can be.
    # `{draft}`, `{target}` and `{output}` are filled with its description, target and folder.
    unserved: ClassVar[str] = ""
    untrainable: ClassVar[str] = ""  # why the kind cannot be trained, and an alternative; empty if it can be
    # Default for training: the number of the target's first layers that draft; `None` for its last layer.
    first_layers: ClassVar[int | None] = None
    own_layers: ClassVar[bool] = False  # whether the draft is made of new layers that are all trained, no adapter
    serves_heads: ClassVar[bool] = False  # whether `export` writes a published draft with a head of `inputs="path"`
    # Options that a training run does not support, with reasons: "be trained" (published weights stay as they are),
    # "stay untrained", "late verdicts" (a head judges a candidate after the draft has read it), "draft vocabulary".
    cannot: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        """Make the draft of an assistant with this config. `ValueError` if the parts do not fit one another or the
        target (`Loading.target`, required if `rests_on` is `"target"`)."""

    @abstractmethod
    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """Describe the draft in a few words, such as "layers 0, 1 of the target". `target`: words for the target."""

    def load(self, config: SpecDecPPConfig, repository: Repository, draft: Any = None, target: Any = None) -> Any:
        """Load `Parts.module`: the trained module from the assistant's `repository`, or `None` if the kind has none.
        Published drafts are loaded from `config.draft_id`, or from `draft` (a folder, Hub id or model). `ValueError` if
        a file is damaged or does not match its config. If the published repository contains only the draft
        (`is_whole`), also `ValueError` for a draft that does not fit `target`, before weights are read."""
        if not self.has_own_file(config):
            return None
        if (arguments := getattr(config, self.own_field)) is None:
            raise ValueError(
                f"config.json does not describe ({self.own_field}) what is in {self.own_file}. Save the assistant "
                "again."
            )
        return self.read_own(arguments, repository.file(self.own_file))

    def has_own_file(self, config: SpecDecPPConfig) -> bool:
        """Whether the assistant's repository contains `own_file`. Published drafts stay in their own repositories."""
        return bool(self.own_file) and config.draft_id is None

    def read_own(self, arguments: dict[str, Any], path: Path) -> Any:
        """Make the trained module from its arguments (`own_field`) and the weights in `path` (`own_file`). `ValueError`
        if the arguments are invalid, or the file is damaged or does not fit them."""
        raise NotImplementedError

    def own_tensors(self, module: Any, state: Tensors | None = None, dtype: torch.dtype | None = None) -> Tensors:
        """Return the tensors of the trained `module` to save in `own_file`. `state`: its state dict, if gathered from
        several processes. `dtype`: converts the tensors of a `StoredKind`; not used by others."""
        return dict(state or module.state_dict())

    def head_of(self, module: Any) -> AcceptanceHead | None:
        """Return the confidence head that a loaded draft (`Parts.module`) was published with; `None` if it has none."""
        return None

    def override(self, config: SpecDecPPConfig, values: Any) -> None:
        """Store `values` of `from_pretrained(eagle3=...)`, which override settings of a published EAGLE-3 draft, in
        `config`. `ValueError` for all other drafts."""
        raise ValueError(
            f"eagle3={values} says how an EAGLE-3 draft that others trained is to be read, and this assistant drafts "
            f"with {self.describe(config)}. Leave it out."
        )

    def refuse_published(self, draft: CausalLM) -> None:  # noqa: B027 - a kind may have such models
        """Raise `ValueError` for a PARD model: nothing is trained for it, and it is not exported."""

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """Write the draft to the folder in `to`, in a format that other engines serve; `ValueError` if impossible."""
        raise NotImplementedError


class PublishedKind(DraftKind):
    """A kind whose drafts others publish, too: `config.draft_id` is the Hub id or folder of a published draft."""

    belongs: ClassVar[str] = ""  # full sentences for errors: the target that such a draft needs
    drafter: ClassVar[type[Any]]  # class of the `Draft`, called with the loaded draft and its target
    model_class: ClassVar[type | None] = None  # of the loaded draft, if users may pass such a model object
    no_model: ClassVar[str] = ""  # end of an error: why other model objects cannot be such drafts; empty if they can
    served_by: ClassVar[str] = ""  # engines that serve a published repository, and how; empty if it has to be exported
    is_whole: ClassVar[bool] = True  # whether the repository has only the draft; else only the draft's tensors are read
    most_config_bytes: ClassVar[int] = files.MOST_CONFIG_BYTES  # largest accepted size of its `config.json`
    cure: ClassVar[str] = (  # end of the error for repositories without safetensors
        "Convert it once, tensors only: specdecpp inspect {name} --convert FOLDER. Then load FOLDER, or ask its author "
        "for safetensors."
    )

    @abstractmethod
    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> Any:
        """Make `Parts.module` from a published config (`raw`) and its tensors (shared, not copied). `ValueError`, with
        a remedy, if they are damaged, do not match, or belong to another kind of draft; `source` names the files."""

    def overridden(self, raw: Config, config: SpecDecPPConfig) -> Config:
        """Return a published config (`raw`) with the overrides in an assistant's config (see `override`)."""
        return raw

    def recognises(self, raw: Config) -> bool:
        """Whether a published `config.json` describes such a draft, or a related one that `read` rejects."""
        return False

    def is_marked(self, raw: Config) -> bool:
        """Whether a published config describes such a draft for certain, and cannot describe an ordinary model."""
        return self.recognises(raw)

    def fields(self, raw: Config) -> dict[str, Any]:
        """Return the fields of `SpecDecPPConfig` that a published config determines; `ValueError` if damaged."""
        return {}

    def settings(self, module: Any) -> dict[str, Any]:
        """Return the settings of a loaded draft that `specdecpp inspect` prints, by name."""
        return module.to_config()

    def misfit(self, module: Any, target: CausalLM) -> str | None:
        """Return why a loaded draft does not fit a target ("reads states of 64 numbers, ..."); `None` if it fits."""
        return None

    def load(self, config: SpecDecPPConfig, repository: Repository, draft: Any = None, target: Any = None) -> Any:
        if draft is not None and not isinstance(draft, str | Path):
            return self._of_model(draft)
        if self.has_own_file(config):
            return super().load(config, repository)
        named, commit = draft_of(config, draft)
        source, name = Repository(str(named), commit, None, repository.hub_kwargs), self.describe(config)
        raw = self.overridden(files.read_fields(source.file("config.json"), self.most_config_bytes), config)
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
        if not self.is_whole:
            return self.read(raw, weights, source.full_name)
        outline = self.read(raw, weights.outline(), str(weights.index))  # before weights are read
        if target is not None:
            self._refuse(target, name, self.misfit(outline, target))
        return self.read(raw, weights.all(), str(weights.index))

    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        target: Any = how.target
        agreement = self.bind(parts.module, target, self.describe(config))
        draft: Draft = self.drafter(parts.module, target)
        draft.agreement = agreement
        return draft

    def bind(self, module: Any, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> list[float]:
        """Move a loaded draft to the target's input device and dtype (or `dtype`), and return its `agreement` with the
        target, `[]` if not measured. `ValueError`, with the draft's description `name`, if it does not fit."""
        self._refuse(target, name, self.misfit(module, target))
        move(module, input_device(target), dtype or target.dtype)
        return []

    def _refuse(self, target: CausalLM, name: str, wrong: str | None) -> None:
        if wrong is not None:
            raise ValueError(f"{name} {wrong} in {type(target).__name__}. {self.belongs}")

    def _of_model(self, draft: CausalLM) -> Any:
        """`Parts.module` that shares the tensors of a user's model object; `ValueError` if that is not such a draft."""
        if self.model_class is not None and isinstance(draft, self.model_class):
            return draft
        if self.no_model:
            raise ValueError(f"draft={type(draft).__name__} is a model, and {self.no_model}.")
        return self.read(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)


class StoredKind(PublishedKind):
    """A published kind with a module of this package that is made from settings. In files tensors have other names."""

    title: ClassVar[str]  # for messages
    renamed: ClassVar[Sequence[tuple[str, str]]]  # (regular expression, replacement): names in a file to names here
    ignored: ClassVar[str]  # regular expression for names of tensors in a file to skip, such as rotary frequencies
    settings_class: ClassVar[type[Any]]  # a dataclass, the argument of `model_class`
    model_class: ClassVar[type[Any]]
    unsaid: ClassVar[str] = ""  # what configs may leave open, so that there are several `readings`

    @abstractmethod
    def settings_of(self, raw: Config, named: Mapping[str, Tensor], source: str) -> Any:
        """Return the `settings_class` that a published config (`raw`) and its tensors (by name in the module) describe;
        `source` and `ValueError` as in `read`."""

    @abstractmethod
    def original(self, name: str) -> str:
        """Return the name that a tensor of the module has in files of the original format."""

    def here(self, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """Return a file's tensors, without `ignored` ones, by name in the module; `ValueError` if two get one name."""
        named: dict[str, Tensor] = {}
        for there, tensor in tensors.items():
            if re.search(self.ignored, there):
                continue
            if (name := checkpoints.renamed(there, self.renamed)) in named:
                raise ValueError(
                    f"{source} has {self.original(name)} twice, once as {there}, so it is not known which of them is "
                    "meant. The file is damaged (download it again) or of a variant that hf_specdecpp does not know."
                )
            named[name] = tensor
        return named

    def readings(self, module: Any, target: CausalLM) -> dict[str, Any]:
        """Return the settings that a draft's files may mean, the likeliest first; keys describe them in logs."""
        return {"": module.settings}

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> Any:
        named = self.here(tensors, source)
        return self.build(self.settings_of(raw, named, source), named, source)

    def build(self, settings: Any, named: dict[str, Tensor], source: str) -> Any:
        """Make the module with these settings from tensors by name in the module; errors as in `checkpoints.build`."""
        layer = settings.layer
        ids = checkpoints.token_ids(named, settings.draft_vocab_size, layer.get("vocab_size") or 0, source)
        model: Any = checkpoints.build(
            lambda: self.model_class(settings), named, layer["num_hidden_layers"], source, self.title, self.original
        )
        model.token_ids = ids
        return model

    def read_own(self, arguments: dict[str, Any], path: Path) -> Any:
        """As in `DraftKind`. Only the header of the file is read before names and shapes are checked."""
        with checkpoints.as_described(self.title):
            check_values(arguments, hints_of(self.settings_class))
            settings = self.settings_class(**arguments)
        weights, source = Weights.at(path), str(path)
        self.build(settings, self.here(weights.outline(), source), source)
        return self.build(settings, self.here(weights.all(), source), source)

    def own_tensors(self, module: Any, state: Tensors | None = None, dtype: torch.dtype | None = None) -> Tensors:
        """As in `DraftKind`: names as in the original format, also `d2t` and `t2d` if the draft has fewer tokens."""
        named = state or module.state_dict()
        tensors = {self.original(name): tensor.to(dtype or tensor.dtype) for name, tensor in named.items()}
        return tensors | checkpoints.offsets_of(module.token_ids, module.settings.layer.get("vocab_size") or 0)

    def bind(self, module: Any, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> list[float]:
        """As in `PublishedKind`. Of several `readings` keeps the reading with the highest `agreement`, or the likeliest
        reading if the target has no tokenizer that fits. Logs the choice: as a warning unless the likeliest reading was
        measured to be the best."""
        super().bind(module, target, name, dtype)
        self.adapt(module, target)
        readings = self.readings(module, target)
        texts = acceptance.texts_for(target, tokenizer_of(target)) if len(readings) > 1 else []
        rates: dict[str, list[float]] = {}
        for reading in readings if texts else ():
            module.settings = readings[reading]
            rates[reading] = acceptance.agreement(self.drafter(module, target), target, texts)
        usual = next(iter(readings))
        chosen = max(rates, key=rates.__getitem__, default=usual)
        module.settings = readings[chosen]
        if len(readings) > 1:
            found = [f"{each} ({rates[each][0]:.0%} of its first candidates agree)" for each in rates] or readings
            log = logger.info if rates and chosen == usual else logger.warning
            log(f"{name} does not say {self.unsaid}. It may be {', or '.join(found)}. Taken is {chosen}.")
        return rates.get(chosen, [])

    def adapt(self, module: Any, target: CausalLM) -> None:
        """Called by `bind`: change a loaded draft's settings and modules as its target requires."""


def draft_of(config: SpecDecPPConfig, given: CausalLM | str | Path | None) -> tuple[Any, str | None]:
    """Return the Hub id, folder or model of a draft, and its commit: `given` and `None`; without `given` the id and the
    commit in the config. `ValueError` if the config has no id."""
    if given is None and config.draft_id is None:
        raise ValueError(
            "config.json names no draft (draft_id), so there is nothing to draft with. Write its Hub id there, or give "
            "the draft: from_pretrained(repo, draft=MODEL_OR_FOLDER)."
        )
    return (config.draft_id, config.draft_revision) if given is None else (given, None)


def target_for(to: Destination) -> str:
    """Return the Hub id or folder of the target that a draft is exported for; `ValueError` if it is not known."""
    if to.target is None:
        raise ValueError(
            "config.json names no target (target_id), and what is exported depends on it. Name it: --target "
            "ID_OR_FOLDER."
        )
    return to.target


def raw_config(draft: Any) -> Config | None:
    """Return the fields of the config of a `Repository` or of a model object; `None` if there is none or it cannot be
    read: the code that loads the model raises the error."""
    if not isinstance(draft, Repository):
        config = getattr(draft, "config", None)
        return config.to_dict() if isinstance(config, PreTrainedConfig) else None
    try:
        return files.read_fields(draft.file("config.json"))
    except (OSError, ValueError):
        return None


def pinned(config: SpecDecPPConfig) -> str:
    """Describe where a draft is, for messages: Hub id or folder, and the commit if known ("owner/draft at 1a2b")."""
    return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"
