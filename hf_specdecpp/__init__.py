"""Faster `generate()` with the same output: SpecDec++ for Hugging Face transformers.

    assistant = SpecDecPPAssistant.from_pretrained("org/head", target=model)
    model.generate(**inputs, assistant_model=assistant)

Importing this package registers `model_type="specdecpp"` with the Auto classes.
"""

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.registration import register
from hf_specdecpp.version import __version__

register()

__all__ = [
    "AcceptanceHead",
    "SpecDecPPAssistant",
    "SpecDecPPCandidateGenerator",
    "SpecDecPPConfig",
    "SpeculationConfig",
    "SpeculationStats",
    "__version__",
]
