"""`assist(model, draft)`: makes an assistant for any kind of draft, and attaches it to the model."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, overload

from torch import nn
from transformers.utils import logging

from hf_specdecpp.assistant import DraftOptions, LoadingOptions, Options, SpecDecPPAssistant
from hf_specdecpp.cli_options import DraftChoice
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.value_checks import check_values, did_you_mean, hints_of
from hf_specdecpp.draft_kinds.draft_kind import Loading, Parts
from hf_specdecpp.draft_kinds.known import BY_NAME, LOOKUP, MTP, multi_token_layers, recognise
from hf_specdecpp.files import DownloadOptions, Repository, read_fields
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.hub.published import advice
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target

logger = logging.get_logger("hf_specdecpp")

AUTO = "auto"
SETTINGS = {each.name for each in fields(SpeculationConfig)}
MAKING = {"source": str | Path | None, **hints_of(Options), **hints_of(LoadingOptions)}
OF_ALL, OF_DOWNLOADS = {"head", "speculation"}, set(hints_of(DownloadOptions))
WORDS = {AUTO: OF_ALL | {"source"}, MTP.name: OF_ALL | {"source"} | OF_DOWNLOADS, LOOKUP.name: OF_ALL}  # and options
KNOWN = SETTINGS | MAKING.keys()


@overload
def assist(
    model: CausalLM, draft: str | Path | nn.Module = AUTO, /, default: bool = True, **options: Any
) -> SpecDecPPAssistant: ...


@overload
def assist(model: CausalLM, draft: None, /) -> None: ...


def assist(model: CausalLM, draft: Any = AUTO, /, default: bool = True, **options: Any) -> SpecDecPPAssistant | None:
    """Make `model.generate()` faster from now on, with the same output.

        assist(model)                                                    # own layers or lookups, without a download
        assist(model, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", tree="dyspec")
        assist(model, None)                                              # detach all assistants

    Args:
        model: the model to speed up, on the device where it will be used.
        draft: the source of candidates:
            `"auto"`: the multi-token layers in the model's checkpoint if they are on this machine, else lookups;
            `"mtp"`: these layers; `"lookup"`: tokens that followed the same tokens earlier in the text;
            a Hub id (`org/repo`, or `org/repo/folder`), a folder or a model object: an assistant of this package, a
            published EAGLE-3, DFlash or DSpark draft, a Gemma 4 assistant, or a smaller model with the same tokenizer;
            a `SpecDecPPAssistant`, which is attached;
            `None`: all assistants of the model are detached.
        default: whether calls without `assistant_model=` use the assistant.
        options: fields of `SpeculationConfig`, such as `rule`, `tree` or `lookup`, which override those of a
            repository. `lookup=True` is the default under `rule="throughput"`, unless every round drafts a tree. For a
            draft given by name, and for the repository `source` of `"mtp"`, `DownloadOptions`, such as `revision`; for
            a model, also by name, `Options`, such as `adapter`; for other repositories and folders `LoadingOptions`,
            such as `draft`, a copy of the model that the repository names.

    Returns:
        The assistant, whose `stats` describe the latest `generate()`; `None` for `draft=None`.

    Raises:
        ValueError: the model is not supported, or the draft does not fit the model.
        TypeError: an option is unknown.
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
        early = f" For an early exit: SpecDecPPAssistant.from_early_exit(model, layers={options[unknown]!r})."
        near = early if unknown == "layers" else did_you_mean(unknown, KNOWN)
        raise TypeError(f"There is no option {unknown}.{near} The options are {', '.join(sorted(KNOWN))}.")
    settings = {name: options.pop(name) for name in SETTINGS & options.keys()}
    check_values({"default": default, **options}, MAKING, error=TypeError)
    assistant = _made(model, draft, options)
    speculation = replace(assistant.speculation, **settings)
    chooses = speculation.rule == "throughput" and not speculation.draws_trees and "speculation" not in options
    if chooses and draft is not assistant:
        speculation = replace(speculation, **{"lookup": speculation.lookup or True} | settings)
    assistant.speculation = speculation
    if not attached.is_attached(assistant, model):
        assistant.attach(model)
    attached.set_default(assistant, model, default)
    return assistant


def for_command(model: CausalLM, choice: DraftChoice, default: bool = False, tree: bool = False) -> SpecDecPPAssistant:
    """Make and attach the assistant that a command's options choose. `tree`: draft trees. Errors as in `assist`."""
    named: Any = choice.assistant or (MTP.name if choice.mtp else LOOKUP.name if choice.lookup else AUTO)
    if named == AUTO and choice.layers is not None:
        named = SpecDecPPAssistant.from_early_exit(model, choice.layers)
    assistant = assist(model, named, default)
    assistant.speculation.lookup = choice.lookup or assistant.speculation.lookup
    if tree and not assistant.speculation.draws_trees:
        assistant.speculation.tree = "dyspec"
        if choice.layers is not None:  # "throughput" hardly ever drafts trees with an untrained draft
            assistant.speculation.rule = "threshold"
    return assistant


def _made(model: CausalLM, draft: Any, options: dict[str, Any]) -> SpecDecPPAssistant:
    """The assistant for the argument `draft` of `assist`; `TypeError` for options that such a draft does not have."""
    if isinstance(draft, SpecDecPPAssistant):
        if options:
            raise TypeError(f"{', '.join(options)}: this assistant exists already, only its settings can be changed.")
        return draft
    word = isinstance(draft, str) and draft in WORDS
    if isinstance(draft, str) and not word:
        _check_name(draft)
    is_stored = isinstance(draft, str | Path) and not word and not _is_plain_model(Repository.of(draft, options))
    what = f"draft={draft!r}" if word else "a draft from its repository" if is_stored else "a draft that is a model"
    hints = hints_of(LoadingOptions if is_stored else DraftOptions)
    known = WORDS[draft] if word else {*hints, "speculation"} - {"default"}
    if others := ", ".join(sorted(options.keys() - known)):
        raise TypeError(f"{others}: not for {what}. Its options are {', '.join(sorted(known))}, and the settings.")
    if draft == AUTO:
        return _by_itself(model, options)
    if draft == MTP.name:
        return _own_layers(model, **options)
    if draft == LOOKUP.name:
        return _lookups(model, **options)
    if is_stored:
        return SpecDecPPAssistant.from_pretrained(draft, model, **options)
    return SpecDecPPAssistant.from_draft(draft, model, **options)


def _check_name(draft: str) -> None:
    """Raise `ValueError` for an empty string, or one that is no path or Hub id but resembles a word like "lookup"."""
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
    """The assistant for `"auto"`: `_own_layers` if they are on this machine, else `_lookups`, perhaps with advice."""
    try:
        return _own_layers(model, local_files_only=True, **options)
    except (ValueError, OSError):
        assistant = _lookups(model, **options)
    if (better := advice(model.config.name_or_path)) is not None:
        logger.warning_once(better)
    return assistant


def _own_layers(model: CausalLM, source: str | Path | None = None, **options: Any) -> SpecDecPPAssistant:
    """The assistant for `"mtp"`: with multi-token layers from the repository `source`, by default the model's own."""
    check_target(model, recurrent=True)
    downloads = {name: options.pop(name) for name in OF_DOWNLOADS & options.keys()}
    config, layers = multi_token_layers(model, source, downloads)
    return SpecDecPPAssistant.of_parts(config, None, Parts(module=layers), model, cast(Options, options))


def _lookups(model: CausalLM, speculation: SpeculationConfig | None = None, **options: Any) -> SpecDecPPAssistant:
    """The assistant for `"lookup"`, whose candidates are found in earlier text (`docs/lookup.md`)."""
    config, settings = SpecDecPPConfig(draft_kind=LOOKUP.name), speculation or SpeculationConfig()
    options["speculation"] = replace(settings, lookup=settings.lookup or True)
    drafter = LOOKUP.make(config, Parts(), Loading())
    return SpecDecPPAssistant.of_parts(config, drafter, Parts(), model, cast(Options, options))


def _is_plain_model(source: Repository) -> bool:
    """Whether a repository is that of an ordinary causal LM, by its `config.json`. Errors as in `from_pretrained`."""
    raw = read_fields(source.file("config.json"))
    return recognise(raw) is None and raw.get("model_type") not in (None, SpecDecPPConfig.model_type)
