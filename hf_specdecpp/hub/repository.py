"""The files of an assistant's repository, checked and read.

safetensors only, loaded strictly; nothing here opens a pickle or runs code from a repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import check_arguments
from hf_specdecpp.draft_kinds import known
from hf_specdecpp.draft_kinds.checkpoints import as_described, read_module
from hf_specdecpp.draft_kinds.draft_kind import DraftKind, Parts
from hf_specdecpp.draft_kinds.known import draft_name, kind_of, recognise
from hf_specdecpp.drafting.draft_checks import check_draft_vocab
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead, Calibration
from hf_specdecpp.files import MOST_CONFIG_BYTES, Repository, load_strict, load_tensors, read_json
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_tokenizer

CONFIG, CARD, ADAPTER_FOLDER = "config.json", "README.md", "adapter"
HEAD, DRAFT_VOCAB = "acceptance_head.safetensors", "draft_vocab.safetensors"

HUB_KWARGS = ("token", "cache_dir", "local_files_only", "force_download")
# What Auto classes and pipelines add to a call of `from_pretrained`; none of it concerns an assistant.
AUTO_KWARGS = ("config", "trust_remote_code", "adapter_kwargs", "_from_auto", "_from_pipeline", "_commit_hash")


def load_config(repository: Repository) -> SpecDecPPConfig:
    """The config of an assistant, with where it came from; `ValueError` if it is damaged, newer, or something else."""
    path = repository.file(CONFIG)
    kind, raw = read_config(path)
    commit = repository.commit(path)
    config = known.read_config(raw, kind, repository, commit)
    config._name_or_path = repository.name
    config._commit_hash = commit
    return config


def load_parts(
    repository: Repository,
    config: SpecDecPPConfig,
    draft: CausalLM | str | Path | None = None,
    target: CausalLM | None = None,
) -> tuple[AcceptanceHead | None, Parts]:
    """Head, and what the config promises of the draft, which may be a copy elsewhere; errors as below, and `ValueError`
    before weights are read where the draft of others does not fit `target`."""
    kind = kind_of(config)
    if draft is not None and not kind.is_named and config.draft_id is None:  # no copy can take its place
        raise ValueError(f"This assistant drafts with {kind.describe(config)}, so draft= must be left out.")
    head = load_head(repository, config) if config.head is not None else None
    draft_vocab = load_draft_vocab(repository, config) if config.draft_vocab_size is not None else None
    module = kind.load(config, repository, draft, target)
    return head, Parts(find_adapter(repository) if config.adapter else None, draft_vocab, module)


def find_adapter(repository: Repository, folder: str | None = ADAPTER_FOLDER) -> Path:
    """Folder with both adapter files. peft would fall back to a pickle without the safetensors file; we do not."""
    paths = [repository.file(f"{folder}/{name}" if folder else name) for name in ADAPTER_FILES]
    load_tensors(paths[1])
    return paths[0].parent


def load_head(repository: Repository, config: SpecDecPPConfig) -> AcceptanceHead:
    """The acceptance head that `config.head` describes, without a draft; `ValueError` if none fits."""
    if config.head is None:
        raise ValueError(f"{repository.name!r} has no acceptance head, says its {CONFIG}. Load one that has.")
    hint = (
        f"It does not belong to the head that {CONFIG} describes, trained for draft {draft_name(config)}. "
        "Download or save both again."
    )
    return read_head(config.head, repository.file(HEAD), hint)


def read_head(arguments: dict[str, Any], path: Path, hint: str) -> AcceptanceHead:
    """The head with these arguments of `AcceptanceHead`, whose weights are in `path`; the rest as in `read_module`."""
    with as_described("acceptance head"):
        check_arguments(AcceptanceHead.__init__, arguments)  # first: a calibration of the wrong type has no values
        for each in (arguments.get("calibration") or {}).values():
            check_arguments(Calibration, each)
    return read_module(AcceptanceHead, "acceptance head", arguments, path, hint)


def load_draft_vocab(repository: Repository, config: SpecDecPPConfig) -> Tensor:
    """The token ids `[draft_vocab_size]` that the draft may propose; `ValueError` if the file is damaged."""
    hint = f"{CONFIG} promises {config.draft_vocab_size} token ids. Download or save both again."
    path = repository.file(DRAFT_VOCAB)
    token_ids = load_strict(path, {"token_ids": [config.draft_vocab_size or 0]}, hint)["token_ids"]
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{path} holds {str(token_ids.dtype)[6:]}; token ids are whole numbers. Make it again.")
    check_draft_vocab(token_ids, config.vocab_size or int(token_ids.max()) + 1)
    return token_ids


def read_config(path: Path) -> tuple[DraftKind, dict[str, Any]]:
    """Parse a `config.json`, and find out which kind of draft it describes; `ValueError` if there is none."""
    config = read_json(path, MOST_CONFIG_BYTES)
    if not isinstance(config, dict) or (kind := recognise(config)) is None:
        if isinstance(config, dict) and config.get("model_type") == SpecDecPPConfig.model_type:
            kind_of(SpecDecPPConfig.from_dict(config))  # says what is wrong: the format, a type, or the kind
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        hint = "To convert a released SpecDec++ head: specdecpp inspect FOLDER --convert OUT."
        if isinstance(found, str) and found in CONFIG_MAPPING_NAMES:
            hint = "It is an ordinary model, which drafts without such a repository: assist(model, draft)."
        raise ValueError(
            f"{path} has model_type {found!r} and not 'specdecpp', so it is not of an hf_specdecpp assistant. {hint}"
        )
    return kind, config


class DraftTokenizer(PreTrainedTokenizerFast):
    """`AutoTokenizer.from_pretrained(assistant)`: the tokenizer of the model that the assistant was trained for.

    An assistant's repository has none of its own, and pipelines load one.
    """

    @classmethod
    def from_pretrained(cls, name: str, *_: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        passed_on = ("cache_dir", "token", "local_files_only")
        hub_kwargs = {key: kwargs[key] for key in passed_on if kwargs.get(key) is not None}
        place = {key: kwargs[key] for key in ("revision", "subfolder") if kwargs.get(key) is not None}
        config = SpecDecPPConfig.from_pretrained(name, **place, **hub_kwargs)
        models = (config.draft_id, config.draft_revision), (config.target_id, config.target_revision)
        model, commit = models[config.draft_id is None]
        if model is None:
            raise ValueError(
                f"The config.json of {name!r} names no draft_id and no target_id, so no tokenizer is known."
            )
        return load_tokenizer(model, commit, **hub_kwargs)
