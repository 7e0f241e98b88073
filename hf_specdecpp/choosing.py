"""`assist(model, draft)`: makes an assistant for any kind of draft, and attaches it to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import nn
from transformers.utils import logging

from hf_specdecpp.assistant import DraftOptions, LoadingOptions, SpecDecPPAssistant
from hf_specdecpp.cli_options import DraftChoice
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.value_checks import check_options, check_values, did_you_mean, hints_of
from hf_specdecpp.draft_kinds.draft_kind import Loading, Parts
from hf_specdecpp.draft_kinds.known import BY_NAME, LOOKUP, MTP, multi_token_layers, recognise
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import DownloadOptions, Repository, read_fields
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.hub.published import advice
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target

logger = logging.get_logger("hf_specdecpp")

AUTO = "auto"
SETTINGS = [each.name for each in fields(SpeculationConfig)]


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
    if "layers" in options:
        early = f"SpecDecPPAssistant.from_early_exit(model, layers={options['layers']!r})"
        raise TypeError(f"There is no option layers. For an early exit: {early}.")
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    check_values({"default": default}, {"default": bool}, error=TypeError)
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
    make: Callable[..., SpecDecPPAssistant]
    hints: dict[str, Any]
    if isinstance(draft, SpecDecPPAssistant):
        make, hints = lambda *_: draft, {}
    elif isinstance(draft, str) and draft in WORDS:
        make, hints = WORDS[draft]
    elif _is_stored(draft, options):
        make = partial(SpecDecPPAssistant.from_pretrained, draft)
        hints = {"speculation": SpeculationConfig | None, **hints_of(LoadingOptions)}
    else:
        make, hints = partial(SpecDecPPAssistant.from_draft, draft), hints_of(DraftOptions)
    named = repr(str(draft)) if isinstance(draft, str | Path) else type(draft).__name__
    check_options(options, hints, SETTINGS, f" for draft={named}")
    return make(model, **options)


def _check_name(draft: str) -> None:
    """Raise `ValueError` for an empty string, or one that is no path or Hub id but resembles a word like "lookup"."""
    if draft and (Path(draft).exists() or "/" in draft):
        return
    near = did_you_mean(draft, WORDS)
    if draft.lower() == "none":
        near = " Pass None, without quotes, to detach the assistants of the model."
    elif draft in BY_NAME:
        near = " This is a kind of draft. Name the draft itself, or make it: SpecDecPPAssistant.from_early_exit(...)."
    if near or not draft:
        raise ValueError(
            f"draft={draft!r} is not a folder, and not a draft that assist() knows by name.{near} It takes "
            f"{AUTO!r}, {MTP.name!r}, {LOOKUP.name!r}, a Hub id such as 'org/repo', a folder or a model object."
        )


def _by_itself(model: CausalLM, **options: Any) -> SpecDecPPAssistant:
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
    config, layers = multi_token_layers(model, source, options)
    return SpecDecPPAssistant.of_parts(config, None, Parts(module=layers), model, options)


def _lookups(model: CausalLM, speculation: SpeculationConfig | None = None, **options: Any) -> SpecDecPPAssistant:
    """The assistant for `"lookup"`, whose candidates are found in earlier text (`docs/lookup.md`)."""
    config, settings = SpecDecPPConfig(draft_kind=LOOKUP.name), speculation or SpeculationConfig()
    options["speculation"] = replace(settings, lookup=settings.lookup or True)
    drafter = LOOKUP.make(config, Parts(), Loading())
    return SpecDecPPAssistant.of_parts(config, drafter, Parts(), model, options)


def _is_stored(draft: Any, options: dict[str, Any]) -> bool:
    """Whether `draft` names an assistant or a published draft, by its `config.json`; `False` for ordinary causal LMs
    and for objects. Errors as in `from_pretrained`."""
    if isinstance(draft, str):
        _check_name(draft)
    if not isinstance(draft, str | Path):
        return False
    raw = read_fields(Repository.of(draft, options).file("config.json"))
    return recognise(raw) is not None or raw.get("model_type") in (None, SpecDecPPConfig.model_type)


# The words that `assist` takes as `draft`: what makes the assistant, and the types of its options.
OF_ALL: dict[str, Any] = {"head": AcceptanceHead | None, "speculation": SpeculationConfig | None}
OF_LAYERS = {**OF_ALL, "source": str | Path | None}
WORDS: dict[str, tuple[Callable[..., SpecDecPPAssistant], dict[str, Any]]] = {
    AUTO: (_by_itself, OF_LAYERS),
    MTP.name: (_own_layers, {**OF_LAYERS, **hints_of(DownloadOptions)}),
    LOOKUP.name: (_lookups, OF_ALL),
}
