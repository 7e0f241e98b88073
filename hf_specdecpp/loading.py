"""The draft of an assistant, loaded like its target; and whether a head fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from hf_specdecpp.acceptance import AcceptanceHead
from hf_specdecpp.configuration import SpecDecPPConfig
from hf_specdecpp.drafter import Drafter
from hf_specdecpp.patching import base_model
from hf_specdecpp.repository import CONFIG
from hf_specdecpp.typing import CausalLM


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
            f"{CONFIG} names no draft model (draft_id), so there is nothing to draft with. Write its Hub id there, or "
            "give the draft: from_pretrained(repo, draft=model_or_folder)."
        )
    if not isinstance(draft, str | Path):
        return base_model(draft).eval()  # dropout would make the drafter look wrong
    likewise = ("auto", "cpu") if target is None else (target.dtype, target.device)
    dtype, device = dtype or likewise[0], device or likewise[1]
    model: CausalLM = AutoModelForCausalLM.from_pretrained(
        str(draft), revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True, **(hub_kwargs or {})
    )
    return model.to(device).eval()


def check_head(head: AcceptanceHead, drafter: Drafter, config: SpecDecPPConfig) -> None:
    """Raise `ValueError` unless the head was trained for states and embeddings of the draft's sizes."""
    ours = {"hidden_size": head.hidden_size}
    theirs = {"hidden_size": drafter.hidden_size}
    if head.inputs == "before":
        ours["embedding_size"], theirs["embedding_size"] = head.embedding_size, drafter.embedding_size
    if ours != theirs:
        raise ValueError(
            f"The acceptance head was trained for {ours} but draft {config.draft_name} has {theirs}, so it cannot "
            "read the draft's states. Load the draft that it was trained with, or train a head for this one."
        )
