"""Load models, their configs and their tokenizers: no code of a repository runs, and weights are safetensors only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdecpp.files import Repository, found, read_json
from hf_specdecpp.models.causal_lm import CausalLM, base_model


@contextmanager
def quiet_loading() -> Iterator[None]:
    """For commands: no bars of loading, and of transformers' words only errors, among what the command itself says."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            show_bars()


def show_bars() -> None:
    """Show bars again, without a word where the user's environment forbids huggingface_hub's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        logging.enable_progress_bar()


def load_draft(
    draft: CausalLM | str | Path | None, revision: str | None, target: CausalLM | None,
    dtype: Any = None, device: Any = None, hub_kwargs: dict[str, Any] | None = None,
) -> CausalLM:  # fmt: skip
    """A model object as it is; one given by name in the dtype and on the device that are given, or the target's.

    Raises:
        ValueError: no draft is named.
        OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
    """
    if draft is None:
        raise ValueError(
            "config.json names no draft model (draft_id), so there is nothing to draft with. Write its Hub id there, "
            "or give the draft: from_pretrained(repo, draft=model_or_folder)."
        )
    if not isinstance(draft, str | Path):
        return base_model(draft).eval()  # dropout would make the drafter look wrong
    likewise = ("auto", "cpu") if target is None else (target.dtype, target.device)
    dtype, device = dtype or likewise[0], device or likewise[1]
    return load_model(draft, revision, dtype, device, **(hub_kwargs or {}))


def load_model(
    name: str | Path, revision: str | None = None, dtype: Any = "auto", device: Any = "cpu", **hub_kwargs: Any
) -> CausalLM:
    """A causal LM from the Hub or a folder, ready to read: no dropout. `org/repo/folder` is a folder of a repository.

    Raises:
        FileNotFoundError: there is no such folder, and no such Hub id can be.
        OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
    """
    source = Repository(str(name), revision, None, hub_kwargs)
    if not source.is_local:
        with found(source.full_name):
            validate_repo_id(source.name)
    _refuse_kernels(source)
    model: CausalLM = AutoModelForCausalLM.from_pretrained(
        source.name, revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        subfolder=source.subfolder or "", **hub_kwargs,
    )  # fmt: skip
    model.config.name_or_path = source.full_name
    return model.to(device).eval()


def _refuse_kernels(source: Repository) -> None:
    """Raise `ValueError` where a config names code on the Hub that computes attention or experts: it would be run."""
    try:
        parts: list[Any] = [read_json(source.file("config.json"))]
    except (OSError, ValueError):  # transformers says what is wrong
        return
    for part in parts:  # it grows
        parts += [inner for inner in (part.values() if isinstance(part, dict) else ()) if isinstance(inner, dict)]
        for field, value in part.items() if isinstance(part, dict) else ():
            if "_implementation" in field and "/" in str(value):
                raise ValueError(
                    f"The config.json of {source.name!r} has {field}={value!r}, code that transformers would fetch and "
                    "run. If you trust it, load the model yourself, and give the object in the place of its name."
                )


def load_tokenizer(name: str, revision: str | None = None, **hub_kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model."""
    source = Repository(name)
    place = {"subfolder": source.subfolder} if source.subfolder else {}
    return AutoTokenizer.from_pretrained(source.name, revision=revision, trust_remote_code=False, **place, **hub_kwargs)


def load_model_config(name: str) -> Any:
    """The config of a model, without its weights."""
    source = Repository(name)
    return AutoConfig.from_pretrained(source.name, trust_remote_code=False, subfolder=source.subfolder or "")
