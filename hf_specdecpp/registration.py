"""Make transformers know `model_type="specdecpp"`: Auto classes, and `pipeline(assistant_model="org/repo")`."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.models.loading import load_tokenizer


class DraftTokenizer(PreTrainedTokenizerFast):
    """`AutoTokenizer.from_pretrained(assistant)`: the tokenizer of the model that the assistant was trained for.

    Pipelines load a tokenizer for every assistant. An assistant's repository has none of its own.
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


def register() -> None:
    """Called on import of the package; calling it again changes nothing."""
    AutoConfig.register(SpecDecPPConfig.model_type, SpecDecPPConfig, exist_ok=True)
    AutoModelForCausalLM.register(SpecDecPPConfig, SpecDecPPAssistant, exist_ok=True)
    AutoTokenizer.register(SpecDecPPConfig, fast_tokenizer_class=DraftTokenizer, exist_ok=True)
    # Pipelines look the class of an assistant up by name in the transformers module, and nowhere else.
    transformers.SpecDecPPAssistant = SpecDecPPAssistant  # type: ignore[attr-defined]
