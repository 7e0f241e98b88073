"""Load models, configs and tokenizers, without running code of a repository and from safetensors only.

Tokenizers are compared by their token-to-id maps, because `vocab_size` may include padding."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdecpp.files import Repository, Weights, found, read_json
from hf_specdecpp.models.causal_lm import CausalLM


@contextmanager
def quiet_loading() -> Iterator[None]:
    """A context for the command line, in which loading shows no progress bars and transformers logs errors only."""
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
    """Enable transformers' progress bars, without a warning if the environment disables those of huggingface_hub."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        logging.enable_progress_bar()


def load_model(
    name: str | Path | Repository, revision: str | None = None, dtype: Any = "auto", device: Any = "cpu"
) -> CausalLM:
    """Load a causal LM in eval mode from the Hub or a local folder, and record its commit in the config. The `name`
    "org/repo/folder" means a folder of a repository; a `Repository` contains its revision.

    Raises:
        ValueError: the files are damaged or inconsistent, or name code that would be run.
        FileNotFoundError: `name` is neither an existing folder nor a valid Hub id.
        OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
        ImportError: a package that the model needs is missing.
    """
    source = name if isinstance(name, Repository) else Repository(str(name), revision)
    if not source.is_local:
        with found(source.full_name):
            validate_repo_id(source.name)
    commit = _check_config(source)
    source = replace(source, revision=commit or source.revision)
    try:
        model: CausalLM = AutoModelForCausalLM.from_pretrained(
            source.name, revision=source.revision, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            subfolder=source.subfolder or "", **source.hub_kwargs,
        )  # fmt: skip
    except (OSError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers and torch raise any exception for invalid fields
        raise ValueError(
            f"{source.full_name!r} cannot be loaded as a model: {type(error).__name__}: {str(error)[:600]} Its files "
            "are damaged or do not go together, or a newer transformers reads them. Download it again, or upgrade."
        ) from error
    model.config.name_or_path, model.config._commit_hash = source.full_name, commit
    model.__dict__[SOURCE] = replace(source, hub_kwargs={"cache_dir": source.hub_kwargs.get("cache_dir")})
    return model.to(device).eval()


def _check_config(source: Repository) -> str | None:
    """Check the `config.json` of a model before loading, and return its commit, if known. `ValueError` if it names code
    on the Hub, or has more layers than the files have tensors."""
    try:
        path = source.file("config.json")
    except LocalEntryNotFoundError:  # transformers' error would advise to check the connection
        raise
    except OSError:  # transformers raises a better error
        return None
    commit = source.commit(path)
    try:
        parts: list[Any] = [read_json(path)]
        most = len(Weights.of(source))
    except (OSError, ValueError):
        return commit
    for part in parts:  # the list grows
        parts += [inner for inner in (part.values() if isinstance(part, dict) else ()) if isinstance(inner, dict)]
        for field, value in part.items() if isinstance(part, dict) else ():
            if field == "num_hidden_layers" and most and type(value) is int and value > most:
                raise ValueError(
                    f"The config.json of {source.name!r} has num_hidden_layers={str(value)[:40]}, and its files "
                    f"have {most} tensors. They do not belong together: download the repository again."
                )
            if "_implementation" in field and "/" in str(value):
                raise ValueError(
                    f"The config.json of {source.name!r} has {field}={value!r}, code that transformers would fetch and "
                    "run. If you trust it, load the model yourself, and give the object in the place of its name."
                )
    return commit


def load_tokenizer(name: str | Repository, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer from the Hub or a local folder; `name` and `revision` as in `load_model`."""
    source = name if isinstance(name, Repository) else Repository(name, revision)
    return AutoTokenizer.from_pretrained(
        source.name, revision=source.revision, trust_remote_code=False, subfolder=source.subfolder or "",
        **source.hub_kwargs,
    )  # fmt: skip


def load_model_config(name: str) -> Any:
    """The config of a model, by its name on the Hub or its folder, without its weights."""
    source = Repository(name)
    if not source.is_local:
        source.file("config.json")  # raises a clear error if missing
    return AutoConfig.from_pretrained(source.name, trust_remote_code=False, subfolder=source.subfolder or "")


PADDING = 1024  # maximum number of unused rows of a token table
SOURCE = "_specdecpp_source"  # attribute of models loaded here: their `Repository`, without a token


def hash_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hexadecimal digits, of the tokenizer's token-to-id map without added tokens."""
    return hashlib.sha256(json.dumps(sorted(_regular(tokenizer).items())).encode()).hexdigest()


def special_ids(*configs: Any) -> frozenset[int]:
    """All special token ids in model or generation configs: ends of sequences, padding, placeholders of images."""
    ids: set[int] = set()
    for config in configs:
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_ids", "token_index")):
                ids.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return frozenset(ids)


def tokenizer_of(model: CausalLM | Repository) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, from its folder or the Hub's local cache, without downloads; `None` if not found."""
    source = source_of(model)
    if not source.name:
        return None
    try:
        return _load_tokenizer(source.full_name, source.revision, source.hub_kwargs.get("cache_dir"))
    except Exception:  # noqa: BLE001 - without a tokenizer, for whatever reason, nothing is compared
        return None


def source_of(model: CausalLM | Repository) -> Repository:
    """The repository from which `load_model` loaded a model; for other models, the one that `config.name_or_path`
    names. A `Repository` is returned unchanged."""
    if isinstance(model, Repository):
        return model
    return vars(model).get(SOURCE) or Repository(model.config.name_or_path)


@lru_cache(maxsize=16)
def _load_tokenizer(name: str, revision: str | None, cache_dir: str | Path | None) -> PreTrainedTokenizerBase:
    # A separate function, so that failures are not cached: the tokenizer may be downloaded at any time.
    return load_tokenizer(Repository(name, revision, None, {"cache_dir": cache_dir, "local_files_only": True}))


def check_named_draft(source: Repository, raw: Mapping[str, Any], target: CausalLM, ids_are_listed: bool) -> None:
    """Call `check_same_tokenizer` for the draft in the repository `source`, with the fields `raw` of its `config.json`,
    before its weights are downloaded or read. May download the draft's tokenizer; without one, sizes are compared."""
    inner = raw.get("text_config")
    size = raw.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if tokenizer_of(source) is None:  # so download it into the local cache
        with suppress(Exception):  # loading the model raises the error
            load_tokenizer(source)
    check_same_tokenizer(target, source, size if type(size) is int else None, ids_are_listed)


def check_same_tokenizer(
    target: CausalLM, draft: CausalLM | Repository, size: int | None, ids_are_listed: bool = False
) -> None:
    """Raise `ValueError` if draft and target use some ids for different tokens, or if the draft has less than half as
    many ids as the target.

    With such a draft the output would be exact, but slow. If a tokenizer is not found (a model built in memory), only
    the numbers of ids are compared; different ones cause a warning once the draft is loaded.

    Args:
        draft, size: the draft or its repository, and its number of token ids, `None` if unknown.
        ids_are_listed: whether the user's `draft_vocab` lists the ids that the draft proposes, so that few are enough.
    """
    target_name, name = target.config.name_or_path, source_of(draft).full_name
    most = target.config.get_text_config().vocab_size
    if target_name and target_name == name:
        return
    if size is not None and 2 * size < most and not ids_are_listed:
        raise ValueError(
            f"The draft {name or 'in memory'!r} has {size} token ids, and the target {target_name or 'in memory'!r} "
            f"{most}: a draft with less than half of the target's tokens hardly uses the same tokenizer, and could not "
            "propose most of them. Use a draft of the target's own family. If the ids do mean the same to both models, "
            f"list them: assist(model, draft, draft_vocab=range({size}))."
        )
    ours, theirs = tokenizer_of(target), tokenizer_of(draft)
    by_id = {index: token for token, index in _regular(ours).items()}
    pairs = [(index, by_id.get(index, token), token) for token, index in _regular(theirs).items()]
    if size not in (None, most) and None in (ours, theirs) and not isinstance(draft, Repository):
        warnings.warn(
            f"The target has {most} token ids and the draft {size}. Whether they use the same tokenizer could not be "
            f"checked because no tokenizer files were found beside the models; padding explains up to {PADDING} ids. "
            "If almost nothing is accepted, the tokenizers differ.",
            stacklevel=2,
        )
    if different := [each for each in pairs if each[1] != each[2]]:
        index, token, other = min(different)
        raise ValueError(
            f"The target {target_name!r} and the draft {name!r} have different tokenizers: {len(different)} ids "
            f"stand for different tokens, the first being {index} ({token!r} against {other!r}). A draft proposes "
            "token ids, so they must mean the same to both. Use a draft of the target's own family, or an early exit "
            "of the target: SpecDecPPAssistant.from_early_exit(target, layers=4)."
        )


def outside(size: int | None, target: CausalLM) -> str | None:
    """Why a draft with `size` token ids does not fit a target; `None` if it does, or if `size` is `None`.

    Up to 1024 ids (`PADDING`) more than the target has may be padding. More mean another tokenizer, and an untrusted
    config could demand logits of any width."""
    known = target.config.get_text_config(decoder=True).vocab_size
    is_likely = size is None or size <= known + PADDING
    return None if is_likely else f"was made for {size} token ids, and there are {known}"


def check_hash(target: CausalLM, expected: str | None, trained_for: str | None) -> None:
    """Raise `ValueError` if `hash_of` the target's tokenizer is not `expected`, the hash in the config of an assistant
    that was trained for the target named `trained_for`. No error if either hash is unknown."""
    tokenizer = tokenizer_of(target)
    if expected is None or tokenizer is None or hash_of(tokenizer) == expected:
        return
    raise ValueError(
        f"This assistant was trained for {trained_for!r}, whose tokenizer differs from that of "
        f"{target.config.name_or_path!r} (hash {expected[:12]} against {hash_of(tokenizer)[:12]}), so its token ids "
        "mean something else. Load the assistant that belongs to your target."
    )


def _regular(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    if tokenizer is None:
        return {}
    # Without added tokens (chat markers, reserved slots), whose names differ between base and instruct models.
    added = tokenizer.get_added_vocab()
    return {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
