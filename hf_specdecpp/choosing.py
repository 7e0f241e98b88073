"""`assist`: the one line that makes `model.generate()` faster, with whatever drafts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, overload

from torch import nn
from transformers.utils import logging

from hf_specdecpp.assistant import LoadingOptions, Options, SpecDecPPAssistant
from hf_specdecpp.cli_options import DraftChoice
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.value_checks import check_values, did_you_mean, hints_of
from hf_specdecpp.draft_kinds.draft_kind import Loading, Parts, raw_config
from hf_specdecpp.draft_kinds.known import BY_NAME, LOOKUP, MTP, multi_token_layers, recognise
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.hub.published import advice
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target

logger = logging.get_logger("hf_specdecpp")

AUTO = "auto"
SETTINGS = {each.name for each in fields(SpeculationConfig)}
MAKING = {"source": str | Path | None, **hints_of(Options), **hints_of(LoadingOptions)}
OF_MODELS = {"adapter", "draft_vocab", "merge"}
KNOWN = SETTINGS | MAKING.keys()


@overload
def assist(
    model: CausalLM, draft: str | Path | nn.Module = AUTO, /, default: bool = True, **options: Any
) -> SpecDecPPAssistant: ...


@overload
def assist(model: CausalLM, draft: None, /) -> None: ...


def assist(model: CausalLM, draft: Any = AUTO, /, default: bool = True, **options: Any) -> SpecDecPPAssistant | None:
    """Make `model.generate()` faster from now on, with the same output.

        assist(model)                                                    # with what is there, nothing is downloaded
        assist(model, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", tree="dyspec")
        assist(model, None)                                              # as if nothing had been

    Args:
        model: the model to speed up, on the device where it will be used.
        draft: what guesses tokens ahead:
            `"auto"`: the multi-token layers that the model's own checkpoint has, or where it has none lookups;
            `"mtp"`: these layers; `"lookup"`: what followed the same tokens earlier in the text;
            a Hub id (`org/repo`, or `org/repo/folder`), a folder or a model object: an assistant of this package, an
            EAGLE-3 or DFlash draft that others trained, a Gemma 4 assistant, or a smaller model with the same
            tokenizer;
            a `SpecDecPPAssistant`, which is attached;
            `None`: nothing. Every assistant of the model is detached.
        default: whether calls use it that do not name an assistant (`assistant_model=`).
        options: fields of `SpeculationConfig`, such as `rule`, `tree` or `lookup`, in the place of what a repository
            says; and for a draft given by name, those of `SpecDecPPAssistant.from_pretrained`, such as `revision`, or
            `draft`, a copy of the model that the repository names.

    Returns:
        The assistant, whose `stats` say after each `generate()` whether it paid.

    Raises:
        ValueError: the model cannot be assisted, or the draft does not fit it.
        TypeError: an option is not known.
        OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
    """
    model = causal_lm.base_model(model)
    if draft == AUTO:
        draft = options.pop("draft", AUTO)
    if draft is None:
        for each in attached.assistants_of(model):
            each.detach(model)
        return None
    for unknown in options.keys() - KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise TypeError(f"There is no option {unknown}.{did_you_mean(unknown, KNOWN)} There are {known}.")
    settings = {name: options.pop(name) for name in SETTINGS & options.keys()}
    check_values({"default": default, **options}, MAKING, error=TypeError)
    assistant = _made(model, draft, options)
    if settings:
        assistant.speculation = replace(assistant.speculation, **settings)
    if not attached.is_attached(assistant, model):
        assistant.attach(model)
    attached.set_default(assistant, model, default)
    return assistant


def as_told(model: CausalLM, choice: DraftChoice, default: bool = False, tree: bool = False) -> SpecDecPPAssistant:
    """The assistant that a command was told to use, attached, with `tree` to draft trees; errors as of `assist`."""
    named: Any = choice.assistant or (MTP.name if choice.mtp else LOOKUP.name if choice.lookup else AUTO)
    if named == AUTO and choice.layers is not None:
        named = SpecDecPPAssistant.from_early_exit(model, choice.layers)
    assistant = assist(model, named, default)
    assistant.speculation.lookup = choice.lookup or assistant.speculation.lookup
    if tree and not assistant.speculation.draws_trees:
        assistant.speculation.tree = "dyspec"
        if choice.layers is not None:  # no tree of an untrained draft would be worth its price
            assistant.speculation.rule = "threshold"
    return assistant


def _made(model: CausalLM, draft: Any, options: dict[str, Any]) -> SpecDecPPAssistant:
    """The assistant that drafts with what was named."""
    if isinstance(draft, SpecDecPPAssistant):
        if options:
            raise TypeError(f"{', '.join(options)}: this assistant was made already, only its settings can be changed.")
        return draft
    if isinstance(draft, str) and draft in (AUTO, MTP.name, LOOKUP.name) and (of_models := OF_MODELS & options.keys()):
        raise TypeError(
            f"{', '.join(sorted(of_models))}: only for a draft that is a model or some of the target's layers, and "
            f"draft={draft!r} is neither. Leave it out."
        )
    if draft == AUTO:
        return _by_itself(model, options)
    if draft == MTP.name:
        return _own_layers(model, **options)
    if draft == LOOKUP.name:
        return _lookups(model, **options)
    if isinstance(draft, str):
        _check_name(draft)
    if isinstance(draft, str | Path) and not _is_plain_model(draft):
        return SpecDecPPAssistant.from_pretrained(draft, model, **options)
    return SpecDecPPAssistant.from_draft(draft, model, **options)


def _check_name(draft: str) -> None:
    """Raise `ValueError` for a text that is no folder and no Hub id but was meant as a word that `assist` knows."""
    if draft and (Path(draft).exists() or "/" in draft):
        return
    near = did_you_mean(draft, (AUTO, MTP.name, LOOKUP.name))
    if draft.lower() == "none":
        near = " Pass None, without quotes, to detach the assistants of the model."
    elif draft in BY_NAME:
        near = " This is a kind of draft. Name the draft itself, or make it: SpecDecPPAssistant.from_early_exit(...)."
    if near or not draft:
        raise ValueError(
            f"draft={draft!r} is not a folder, and not a draft that assist() knows by name.{near} It takes "
            f"{AUTO!r}, {MTP.name!r}, {LOOKUP.name!r}, a Hub id such as 'org/repo', a folder or a model object."
        )


def _by_itself(model: CausalLM, options: dict[str, Any]) -> SpecDecPPAssistant:
    """With the model's own multi-token layers, or where none can be read with lookups; nothing is downloaded."""
    try:
        return _own_layers(model, local_files_only=True, **options)
    except (ValueError, OSError):
        assistant = _lookups(model, **options)
    if (better := advice(model.config.name_or_path)) is not None:
        logger.warning_once(better)
    return assistant


def _own_layers(
    model: CausalLM, source: str | Path | None = None, local_files_only: bool = False, **options: Any
) -> SpecDecPPAssistant:
    """With the multi-token layers of the model's own checkpoint, or of `source` where the model's files lack them."""
    check_target(model, recurrent=True)
    config, layers = multi_token_layers(model, source, {"local_files_only": True} if local_files_only else None)
    return SpecDecPPAssistant.of_parts(config, None, Parts(module=layers), model, cast(Options, options))


def _lookups(model: CausalLM, speculation: SpeculationConfig | None = None, **options: Any) -> SpecDecPPAssistant:
    """With what followed in the text before, after the same tokens (`docs/lookup.md`)."""
    config, settings = SpecDecPPConfig(draft_kind=LOOKUP.name), speculation or SpeculationConfig()
    options["speculation"] = replace(settings, lookup=settings.lookup or True)
    drafter = LOOKUP.make(config, Parts(), Loading())
    return SpecDecPPAssistant.of_parts(config, drafter, Parts(), model, cast(Options, options))


def _is_plain_model(name: str | Path) -> bool:
    """Whether a repository holds an ordinary causal LM, by its `config.json`."""
    raw = raw_config(name)
    if raw is None or recognise(raw) is not None:
        return False
    return raw.get("model_type") not in (None, SpecDecPPConfig.model_type)
