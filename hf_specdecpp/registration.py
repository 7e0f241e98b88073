"""Registers `model_type="specdecpp"` with transformers' Auto classes, also for `pipeline(assistant_model="org/repo")`.

Importing this package registers the type with `AutoConfig` only, at once or when transformers' module is imported. The
other Auto classes, which import torch and the models, follow when `AutoConfig` first reads an assistant's config."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

MODEL_TYPE = "specdecpp"  # of `SpecDecPPConfig`, which is not imported for it
AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class ConfigOnDemand:
    """Registered with `AutoConfig` instead of `SpecDecPPConfig`, which is imported when this class is first used."""

    model_type = MODEL_TYPE

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return register()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return register().from_dict(config_dict, **kwargs)


class _Watch(MetaPathFinder):
    """An import hook: registers `ConfigOnDemand` once the module with `AutoConfig` has been imported."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_announce(module: Any) -> None:
            execute(module)
            _announce(module)

        spec.loader.exec_module = execute_and_announce
        return spec


def _announce(module: Any) -> None:
    module.AutoConfig.register(MODEL_TYPE, ConfigOnDemand, exist_ok=True)


def register_later() -> None:
    """Called when this package is imported: registers with `AutoConfig`, without importing transformers."""
    if AUTO_CONFIG in sys.modules:
        _announce(sys.modules[AUTO_CONFIG])
    else:
        sys.meta_path.insert(0, _Watch())


def register() -> Any:
    """Register with `AutoConfig`, `AutoModelForCausalLM` and `AutoTokenizer`, and return `SpecDecPPConfig`. Further
    calls have no effect."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hf_specdecpp.assistant import SpecDecPPAssistant
    from hf_specdecpp.config.assistant_config import SpecDecPPConfig
    from hf_specdecpp.hub.repository import DraftTokenizer

    AutoConfig.register(MODEL_TYPE, SpecDecPPConfig, exist_ok=True)
    AutoModelForCausalLM.register(SpecDecPPConfig, SpecDecPPAssistant, exist_ok=True)
    AutoTokenizer.register(SpecDecPPConfig, fast_tokenizer_class=DraftTokenizer, exist_ok=True)
    # Pipelines look up the class of an assistant by name in the module `transformers` only.
    transformers.SpecDecPPAssistant = SpecDecPPAssistant  # type: ignore[attr-defined]
    return SpecDecPPConfig
