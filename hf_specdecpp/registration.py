"""Make transformers know `model_type="specdecpp"`: Auto classes, and `pipeline(assistant_model="org/repo")`.

Every way to an assistant by its name begins with `AutoConfig`. So that alone is told of us as the package is imported,
or as soon as transformers' module with it is; the rest, which imports torch and the models, follows when the config of
an assistant is met.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

MODEL_TYPE = "specdecpp"  # of `SpecDecPPConfig`, which is not imported for it
AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class ConfigOnDemand:
    """What `AutoConfig` takes for the class of our config, which answers in its place as soon as it is asked."""

    model_type = MODEL_TYPE

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return register()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return register().from_dict(config_dict, **kwargs)


class _Watch(MetaPathFinder):
    """Calls `_announce` once the module with `AutoConfig` has been imported."""

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
    """Called on import of the package: `AutoConfig` learns of us without anything being imported for it."""
    if AUTO_CONFIG in sys.modules:
        _announce(sys.modules[AUTO_CONFIG])
    else:
        sys.meta_path.insert(0, _Watch())


def register() -> Any:
    """Tell all Auto classes, and return the class of our config. Calling it again changes nothing."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hf_specdecpp.assistant import SpecDecPPAssistant
    from hf_specdecpp.config.assistant_config import SpecDecPPConfig
    from hf_specdecpp.hub.repository import DraftTokenizer

    AutoConfig.register(MODEL_TYPE, SpecDecPPConfig, exist_ok=True)
    AutoModelForCausalLM.register(SpecDecPPConfig, SpecDecPPAssistant, exist_ok=True)
    AutoTokenizer.register(SpecDecPPConfig, fast_tokenizer_class=DraftTokenizer, exist_ok=True)
    # Pipelines look the class of an assistant up by name in the transformers module, and nowhere else.
    transformers.SpecDecPPAssistant = SpecDecPPAssistant  # type: ignore[attr-defined]
    return SpecDecPPConfig
