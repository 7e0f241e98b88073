"""Write an assistant's repository to a folder and to the Hub."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from huggingface_hub import CommitInfo, HfApi

from hf_specdecpp.files import save_tensors, save_text
from hf_specdecpp.hub.card import THIS_REPO, make_card
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.version import __version__

if TYPE_CHECKING:
    from hf_specdecpp.assistant import SpecDecPPAssistant


def save(assistant: SpecDecPPAssistant, folder: Path) -> None:
    """Write all files of the assistant's repository. A `README.md` that is there already is kept.

    Raises:
        ValueError: nobody could load the draft again as it is.
    """
    config = assistant.config
    if config.draft_kind == "independent" and config.draft_id is None:
        raise ValueError(
            "The draft is a model in memory without a Hub id or folder, so the saved assistant could not be loaded. "
            "Save the draft, load it from there and build the assistant from that: from_draft(folder)."
        )
    if config.draft_kind == "independent" and assistant.adapter_folder is None:
        _refuse_adapter_in_memory(assistant)
    folder.mkdir(parents=True, exist_ok=True)
    config.head = assistant.head.to_config() if assistant.head is not None else None
    config.adapter = assistant.adapter_folder is not None
    config.draft_vocab_size = len(assistant.draft_vocab) if assistant.draft_vocab is not None else None
    config.speculation = assistant.speculation.to_dict()
    config.specdecpp_version, config.transformers_version = __version__, transformers.__version__
    config.architectures = [type(assistant).__name__]
    if assistant.head is not None:
        save_tensors(assistant.head.state_dict(), folder / HEAD)
    if assistant.draft_vocab is not None:
        save_tensors({"token_ids": assistant.draft_vocab}, folder / DRAFT_VOCAB)
    if assistant.adapter_folder is not None:
        (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
        for name in ADAPTER_FILES:
            source, copy = assistant.adapter_folder / name, folder / ADAPTER_FOLDER / name
            if source.resolve() != copy.resolve():
                shutil.copyfile(source, copy)
    # Last: a folder with a config is a complete one.
    save_text(config.to_json_string(), folder / CONFIG)
    if not (folder / CARD).exists():
        save_text(str(make_card(assistant)), folder / CARD)


def push(
    assistant: SpecDecPPAssistant,
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

    Args:
        repo_id: `"user/name"`; created if it does not exist.
        commit_message, private, token, revision, create_pr: as in `huggingface_hub`.
        card: text of the `README.md`; by default rendered from the assistant's config.

    Raises:
        ValueError: the draft is a local folder, which nobody else has.
        huggingface_hub errors: as they are.
    """
    config = assistant.config
    if config.draft_kind == "independent" and config.draft_id is not None and Path(config.draft_id).exists():
        raise ValueError(
            f"The draft {config.draft_id!r} is a local folder, so nobody else could load this assistant. Push the "
            "draft model first and build the assistant from its Hub id, or set assistant.config.draft_id to it."
        )
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # Somebody may have written more into the card than we would.
    kept = [CARD] if card is None and api.file_exists(repo, CARD, revision=revision) else None
    with tempfile.TemporaryDirectory() as folder:
        if card is not None:
            save_text(card, Path(folder, CARD))
        save(assistant, Path(folder))
        text = Path(folder, CARD).read_text(encoding="utf-8")
        save_text(text.replace(THIS_REPO, repo), Path(folder, CARD))
        return api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=kept,
        )


def _refuse_adapter_in_memory(assistant: SpecDecPPAssistant) -> None:
    if assistant.drafter is not None and hasattr(assistant.drafter.model, "peft_config"):
        raise ValueError(
            f"The draft {assistant.config.draft_id!r} carries a PEFT adapter in memory, which the saved assistant "
            "would lack. Save the adapter and name its folder: from_draft(draft, adapter=folder)."
        )
