"""Small random DFlash checkpoints in three dialects, and transformers' own draft class with the same weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.draft_kinds.draft_kind import Parts
from hf_specdecpp.draft_kinds.known import DFLASH, read_config
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM
from support.files.checkpoints import HIDDEN, Numbers, layer_config, written
from support.targets.models import configured, tiny

VOCAB, DEPTH = 12, 4
MASK = 11
DIALECTS = ["original", "transformers", "speculators"]
WINDOWED, FULL = "sliding_attention", "full_attention"


@dataclass
class Checkpoint:
    """What is written to a folder.

    `reads`: layers of the target whose outputs are read. `is_causal`: of the original dialect's config; `None` leaves
    it out. `scale`, `multiplier`, `cap`: of embeddings and logits."""

    layer_types: tuple[str, ...] = (FULL, FULL)
    window: int = 6
    reads: tuple[int, ...] = (1, 0, 2)  # not in order: it is kept
    block_size: int = 5
    is_causal: bool | None = None
    scale: float = 1.0
    multiplier: float = 1.0
    cap: float | None = None
    samples_anchor: bool = False
    theta: float = 10000.0
    seed: int = 0

    def tensors(self, dialect: str = "original") -> dict[str, Tensor]:
        """By the names of the dialect, float64."""
        numbers = Numbers(self.seed)
        fc, context_norm = "fc.weight", "hidden_norm.weight"
        if dialect == "transformers":
            fc, context_norm = "encoder.fc.weight", "encoder.output_norm_enc.weight"
        found = {fc: numbers.random(HIDDEN, len(self.reads) * HIDDEN), context_norm: numbers.norm(HIDDEN)}
        found["norm.weight"] = numbers.norm(HIDDEN)
        for layer in range(len(self.layer_types)):
            found |= numbers.layer(f"layers.{layer}")
        return found

    def config(self, dialect: str = "original") -> dict[str, Any]:
        """Its `config.json`. The ids count what comes out of layers; those of speculators what goes into them."""
        layer = {
            **layer_config(len(self.layer_types)), "layer_types": list(self.layer_types), "sliding_window": self.window,
        }  # fmt: skip
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": self.theta}}
        block = {"block_size": self.block_size, "mask_token_id": MASK}
        reads = {"target_layer_ids": list(self.reads)}
        if dialect == "transformers":
            names = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
            return {**names, **layer, **rope, **block, **reads}
        qwen3 = {
            "model_type": "qwen3", "vocab_size": VOCAB, "use_sliding_window": WINDOWED in self.layer_types, **layer,
        }  # fmt: skip
        if dialect == "speculators":
            return {
                "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "draft_vocab_size": VOCAB,
                "aux_hidden_state_layer_ids": [read + 1 for read in self.reads], **block,
                "transformer_layer_config": {**qwen3, **rope}, "sliding_window_non_causal": self.is_causal is False,
                "sample_from_anchor": self.samples_anchor,
            }  # fmt: skip
        of_logits: dict[str, Any] = {"input_embedding_scale": self.scale, "output_multiplier": self.multiplier}
        if self.cap is not None:
            of_logits["final_logit_softcapping"] = self.cap
        return {
            "architectures": ["DFlashDraftModel"], **qwen3, "rope_theta": self.theta, "num_target_layers": DEPTH,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": MASK, **reads, **of_logits, "sample_from_anchor": self.samples_anchor},
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
        }  # fmt: skip

    def save(self, folder: Path, dialect: str = "original", **changes: Any) -> Path:
        """Write both files, the config with these changes (`...` takes a value out)."""
        return written(folder, self.tensors(dialect), {**self.config(dialect), **changes})

    def reach(self, dialect: str) -> int:
        """How far back a row of a layer with a window sees."""
        return self.window if dialect == "transformers" else self.window - 1

    def sees_later_rows(self, layer_type: str, dialect: str) -> bool:
        if dialect == "transformers":
            return True
        return layer_type == FULL if self.is_causal is None else not self.is_causal

    def theirs(self) -> Any:
        """transformers' own model with these weights; the test is skipped where there is no such class."""
        transformers = pytest.importorskip("transformers.models.muse_glimmer_assistant")
        config = transformers.MuseGlimmerAssistantConfig(**self.config("transformers"))
        model = transformers.MuseGlimmerAssistantModel(config).double().eval()
        model.load_state_dict(self.tensors("transformers"))
        return model


VARIANTS: dict[str, Checkpoint] = {
    "plain": Checkpoint(),
    "windows": Checkpoint((WINDOWED, FULL)),
    "windows alone": Checkpoint((WINDOWED,) * 3, window=4),
    "windows, not causal": Checkpoint((WINDOWED, FULL), is_causal=False),
    "causal": Checkpoint((WINDOWED, FULL), is_causal=True),
    "one layer read": Checkpoint(reads=(2,)),
    "the last layer read": Checkpoint(reads=(1, 3, 0)),
    "scaled": Checkpoint(scale=1.7, multiplier=0.6, cap=3.0),
    "samples the anchor": Checkpoint(samples_anchor=True),
    "theta": Checkpoint(theta=500.0),
}


def target_for(family: str = "llama", **overrides: Any) -> CausalLM:
    """A target of few tokens, so that a random draft guesses some of them."""
    return tiny(family, vocab_size=VOCAB, num_hidden_layers=DEPTH, **{"head_dim": 8, **overrides})


def assisted(target: CausalLM, checkpoint: Checkpoint, **settings: Any) -> SpecDecPPAssistant:
    """An assistant with a checkpoint in memory, as `from_draft` makes it of transformers' class."""
    module = DFLASH.read(checkpoint.config(), checkpoint.tensors(), "The draft")
    config = read_config(checkpoint.config(), DFLASH, Repository("org/draft"), None)
    assistant: SpecDecPPAssistant = configured(SpecDecPPAssistant(config, None, None, Parts(module=module)), **settings)
    assistant.attach(target)
    return assistant
