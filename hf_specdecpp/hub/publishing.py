"""Write an assistant's repository to a folder and to the Hub."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from huggingface_hub import CommitInfo, HfApi

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafts.known import kind_of
from hf_specdecpp.drafts.stored import Parts
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import read_json, save_tensors, save_text
from hf_specdecpp.hub.card import THIS_REPO, make_card
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.provenance import public_name
from hf_specdecpp.version import __version__


@dataclass(frozen=True)
class Contents:
    """What an assistant's repository is made of; `SpecDecPPAssistant.contents()` gives it.

    Attributes:
        config: where draft and target come from. It is copied, never changed.
        speculation: the defaults to store.
        head: the acceptance head, or `None`.
        parts: of the draft.
        calibration: takes the place of the config's, or `None`.
    """

    config: SpecDecPPConfig
    speculation: SpeculationConfig
    head: AcceptanceHead | None = None
    parts: Parts = field(default_factory=Parts)
    calibration: dict[str, list[float]] | None = None

    def described(self) -> SpecDecPPConfig:
        """The `config.json` of the repository."""
        config = copy.deepcopy(self.config)
        config.head = self.head.to_config() if self.head is not None else None
        parts = self.parts
        if parts.module is not None:
            kind_of(config).stored.describe(config, parts.module)
        config.adapter = parts.adapter is not None
        config.draft_vocab_size = len(parts.draft_vocab) if parts.draft_vocab is not None else None
        config.calibration = config.calibration if self.calibration is None else self.calibration
        config.speculation = self.speculation.to_dict()
        config.specdecpp_version, config.transformers_version = __version__, transformers.__version__
        config.architectures = ["SpecDecPPAssistant"]
        return config


def save(contents: Contents, folder: Path) -> None:
    """Write all files of a repository. A `README.md` that is there already is kept.

    Raises:
        ValueError: nobody could load the draft again as it is.
    """
    config = contents.described()
    stored = kind_of(config).stored
    stored.check_storable(config)
    folder.mkdir(parents=True, exist_ok=True)
    if contents.head is not None:
        save_tensors(contents.head.state_dict(), folder / HEAD)
    parts = contents.parts
    if parts.module is not None:
        stored.save(config, parts.module, folder)
    if parts.draft_vocab is not None:
        save_tensors({"token_ids": parts.draft_vocab}, folder / DRAFT_VOCAB)
    if parts.adapter is not None:
        _copy_adapter(parts.adapter, folder / ADAPTER_FOLDER)
    # Last: a folder with a config is a complete one.
    save_text(config.to_json_string(), folder / CONFIG)
    if not (folder / CARD).exists():
        save_text(str(make_card(config, contents.head)), folder / CARD)


def _copy_adapter(source: Path, place: Path) -> None:
    """Copy an adapter's files. PEFT notes where the model was read from; a folder of this machine stays unnamed."""
    place.mkdir(exist_ok=True)
    config_name, weights_name = ADAPTER_FILES
    config = read_json(source / config_name)
    base = config.get("base_model_name_or_path")
    config["base_model_name_or_path"] = public_name(base) if isinstance(base, str) else None
    if source.resolve() != place.resolve():
        shutil.copyfile(source / weights_name, place / weights_name)
    save_text(json.dumps(config, indent=2) + "\n", place / config_name)


def push(
    contents: Contents,
    repo_id: str,
    *,
    commit_message: str = "Upload SpecDec++ assistant",
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    card: str | None = None,
) -> CommitInfo:
    """Upload the assistant's repository to the Hub. A card that is there already is kept, unless `card` is given.

    A target that was read from a folder is named without the folders above it.

    Args:
        repo_id: `"user/name"`; created if it does not exist.
        commit_message, private, token, revision, create_pr: as in `huggingface_hub`.
        card: text of the `README.md`; by default rendered from the assistant's config.

    Raises:
        ValueError: the draft is a local folder, which nobody else has.
        huggingface_hub errors: as they are.
    """
    config = contents.config
    if config.draft_id is not None and Path(config.draft_id).exists():
        raise ValueError(
            f"The draft {config.draft_id!r} is a local folder, so nobody else could load this assistant. Push the "
            "draft first and build the assistant from its Hub id, or set assistant.config.draft_id to it."
        )
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # Somebody may have written more into the card than we would.
    kept = [CARD] if card is None and api.file_exists(repo, CARD, revision=revision) else None
    with tempfile.TemporaryDirectory() as folder:
        if card is not None:
            save_text(card, Path(folder, CARD))
        save(contents, Path(folder))
        text = Path(folder, CARD).read_text(encoding="utf-8")
        save_text(text.replace(THIS_REPO, repo), Path(folder, CARD))
        if config.target_id is not None:
            stored = {**read_json(Path(folder, CONFIG)), "target_id": public_name(config.target_id)}
            save_text(json.dumps(stored, indent=2) + "\n", Path(folder, CONFIG))
        return api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=kept,
        )
