"""Faster `generate()` with the same output: SpecDec++ for Hugging Face transformers.

    assist(model)
    model.generate(**inputs)

Importing this package makes `model_type="specdecpp"` known to the Auto classes. It loads neither torch nor transformers
before a name of it is used (PEP 562)."""

import sys
from typing import TYPE_CHECKING, Any

from hf_specdecpp.registration import register, register_later
from hf_specdecpp.version import __version__

if TYPE_CHECKING:
    from hf_specdecpp.assistant import SpecDecPPAssistant
    from hf_specdecpp.choosing import assist
    from hf_specdecpp.config.assistant_config import SpecDecPPConfig
    from hf_specdecpp.config.speculation import SpeculationConfig
    from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
    from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
    from hf_specdecpp.generation.stats import SpeculationStats

__all__ = [
    "AcceptanceHead",
    "SpecDecPPAssistant",
    "SpecDecPPCandidateGenerator",
    "SpecDecPPConfig",
    "SpeculationConfig",
    "SpeculationStats",
    "__version__",
    "assist",
]

_MODULES = {
    "AcceptanceHead": "estimation.acceptance_head",
    "SpecDecPPAssistant": "assistant",
    "SpecDecPPCandidateGenerator": "generation.candidate_generator",
    "SpecDecPPConfig": "config.assistant_config",
    "SpeculationConfig": "config.speculation",
    "SpeculationStats": "generation.stats",
    "assist": "choosing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    from hf_specdecpp import choosing  # noqa: F401 - imports all modules that have a public name

    value = getattr(sys.modules[f"{__name__}.{_MODULES[name]}"], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))


register_later()
