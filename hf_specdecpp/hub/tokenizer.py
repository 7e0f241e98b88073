"""The tokenizer of an assistant: its repository has none of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.models.loading import load_tokenizer


class DraftTokenizer(PreTrainedTokenizerFast):
    """`AutoTokenizer.from_pretrained(assistant)`: the tokenizer of the model that the assistant was trained for.

    Pipelines load a tokenizer for every assistant.
    """

    @classmethod
    def from_pretrained(cls, name: str, *_: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        passed_on = ("cache_dir", "token", "local_files_only")
        hub_kwargs = {key: kwargs[key] for key in passed_on if kwargs.get(key) is not None}
        place = {key: kwargs[key] for key in ("revision", "subfolder") if kwargs.get(key) is not None}
        config = SpecDecPPConfig.from_pretrained(name, **place, **hub_kwargs)
        model, commit = config.draft_id, config.draft_revision
        if model is None:
            model, commit = config.target_id, config.target_revision
        if model is None:
            raise ValueError(
                f"The config.json of {name!r} names no draft_id and no target_id, so no tokenizer is known."
            )
        return load_tokenizer(model, commit, **hub_kwargs)
