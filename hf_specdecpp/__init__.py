"""Faster `generate()` with the same output: SpecDec++ for Hugging Face transformers.

    assistant = SpecDecPPAssistant.from_pretrained("org/head", target=model)
    model.generate(**inputs, assistant_model=assistant)

Importing this package registers `model_type="specdecpp"` with the Auto classes.
"""

from hf_specdecpp.acceptance import AcceptanceHead
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.configuration import SpecDecPPConfig, SpeculationConfig
from hf_specdecpp.registration import register
from hf_specdecpp.stats import SpeculationStats
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
