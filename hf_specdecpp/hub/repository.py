"""Reads and checks the files of an assistant's repository.

Weights are safetensors files with exactly the expected tensors. Pickles are not opened, and no code is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import check_values, hints_of
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

# Arguments that Auto classes and pipelines add to calls of `from_pretrained`; assistants ignore them.
AUTO_KWARGS = ("config", "trust_remote_code", "adapter_kwargs", "_from_auto", "_from_pipeline", "_commit_hash")


def load_config(repository: Repository) -> SpecDecPPConfig:
    """Return the config of an assistant or of a published draft, with its repository and commit. `ValueError` if
    `config.json` is damaged, of a newer format, or describes neither."""
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
    """Return the head (or `None`), and the parts of the draft that the config names. `draft`: a copy of the model that
    the config names. Errors as in the functions below; a published draft that does not fit `target` raises `ValueError`
    before its weights are read."""
    kind = kind_of(config)
    if draft is not None and not kind.is_named and config.draft_id is None:  # the config names no model
        raise ValueError(f"This assistant drafts with {kind.describe(config)}, so draft= must be left out.")
    head = load_head(repository, config) if config.head is not None else None
    draft_vocab = load_draft_vocab(repository, config) if config.draft_vocab_size is not None else None
    module = kind.load(config, repository, draft, target)
    return head, Parts(find_adapter(repository) if config.adapter else None, draft_vocab, module)


def find_adapter(repository: Repository, folder: str | None = ADAPTER_FOLDER) -> Path:
    """Return an adapter's `folder` (`None`: the top). `OSError` if a file is missing, `ValueError` if damaged."""
    paths = [repository.file(f"{folder}/{name}" if folder else name) for name in ADAPTER_FILES]
    load_tensors(paths[1])
    return paths[0].parent


def load_head(repository: Repository, config: SpecDecPPConfig) -> AcceptanceHead:
    """Load the acceptance head that `config.head` describes. `ValueError` if there is none, or weights do not fit."""
    if config.head is None:
        raise ValueError(f"{repository.name!r} has no acceptance head, says its {CONFIG}. Name a repository with one.")
    hint = (
        f"It does not belong to the head that {CONFIG} describes, trained for draft {draft_name(config)}. "
        "Download or save both again."
    )
    return read_head(config.head, repository.file(HEAD), hint)


def read_head(arguments: dict[str, Any], path: Path, hint: str) -> AcceptanceHead:
    """Load a head, given the `arguments` of `AcceptanceHead` and the file of its weights; see `read_module`."""
    with as_described("acceptance head"):
        check_values(arguments, hints_of(AcceptanceHead.__init__))
        for each in (arguments.get("calibration") or {}).values():
            check_values(each, hints_of(Calibration))
    return read_module(AcceptanceHead, "acceptance head", arguments, path, hint)


def load_draft_vocab(repository: Repository, config: SpecDecPPConfig) -> Tensor:
    """Load the token ids `[draft_vocab_size]` that the draft may propose. `ValueError` if the file is damaged."""
    hint = f"{CONFIG} has draft_vocab_size={config.draft_vocab_size}. Download or save both files again."
    path = repository.file(DRAFT_VOCAB)
    token_ids = load_strict(path, {"token_ids": [config.draft_vocab_size or 0]}, hint)["token_ids"]
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{path} holds {str(token_ids.dtype)[6:]}, but token ids are integers. Write the file again.")
    check_draft_vocab(token_ids, config.vocab_size or int(token_ids.max()) + 1)
    return token_ids


def read_config(path: Path) -> tuple[DraftKind, dict[str, Any]]:
    """Return the kind of draft that a `config.json` describes, and the parsed file. `ValueError` if there is none."""
    config = read_json(path, MOST_CONFIG_BYTES)
    if not isinstance(config, dict) or (kind := recognise(config)) is None:
        if isinstance(config, dict) and config.get("model_type") == SpecDecPPConfig.model_type:
            kind_of(SpecDecPPConfig.from_dict(config))  # raises an error about the format, a type, or the kind
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        hint = "To convert a released SpecDec++ head: specdecpp inspect FOLDER --convert OUT."
        if isinstance(found, str) and found in CONFIG_MAPPING_NAMES:
            hint = "It is an ordinary model, which needs no such repository to draft: assist(model, draft)."
        raise ValueError(f"{path} has model_type {found!r}, not 'specdecpp': not an hf_specdecpp assistant. {hint}")
    return kind, config


class DraftTokenizer(PreTrainedTokenizerFast):
    """Loads the draft's (or target's) tokenizer for pipelines, which look for one in the assistant's repository."""

    @classmethod
    def from_pretrained(cls, name: str, *_: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        repository = Repository.of(name, kwargs)
        config = load_config(repository)
        models = (config.draft_id, config.draft_revision), (config.target_id, config.target_revision)
        model, commit = models[config.draft_id is None]
        if model is None:
            raise ValueError(f"The config.json of {name!r} has no draft_id and no target_id: no tokenizer is known.")
        try:
            return load_tokenizer(Repository(model, commit, None, repository.hub_kwargs))
        except OSError as error:
            cure = f"pass assistant_model=SpecDecPPAssistant.from_pretrained({name!r}, model), which needs no tokenizer"
            raise OSError(f"The tokenizer of {model!r} cannot be loaded. Download it, or {cure}. {error}") from error
