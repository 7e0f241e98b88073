"""Small random EAGLE-3 checkpoints, in both dialects and all variants."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.files.checkpoints import HEAD_DIM, HIDDEN, Numbers, layer_config, written

VOCAB, DRAFT_VOCAB = 48, 20
READS = [1, 0, 2]  # not in order: it is kept


@dataclass
class Checkpoint:
    """What is written to a folder: a variant by its flags, then the two files.

    `flags`: `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`. `target_size`: of the target's states.
    `num_reads`: states that it reads; 0 for the final one. `vocab`: tokens that it may propose."""

    flags: dict[str, bool] = field(default_factory=dict)
    layers: int = 1
    head_dim: int = HEAD_DIM
    target_size: int = HIDDEN
    num_reads: int = 3
    vocab: int = DRAFT_VOCAB
    own_embeddings: bool = False
    qwen3: bool = False
    theta: float = 10000.0
    seed: int = 0

    @property
    def ids(self) -> list[int]:
        """Of the target's tokens, ascending."""
        generator = torch.Generator().manual_seed(self.seed)
        return sorted(torch.randperm(VOCAB, generator=generator)[: self.vocab].tolist())

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the original dialect, float64."""
        numbers = Numbers(self.seed)
        found = {"norm.weight": numbers.norm(HIDDEN), "lm_head.weight": numbers.random(self.vocab, HIDDEN)}
        mixed = self.num_reads * self.target_size
        if mixed:
            found["fc.weight"] = numbers.random(HIDDEN, mixed)
        if self.flags.get("norm_before_fc"):
            found["input_norm.weight"] = numbers.norm(mixed)
        if self.flags.get("fc_norm"):
            found |= {f"fc_norm.{i}.weight": numbers.norm(self.target_size) for i in range(self.num_reads)}
        if self.own_embeddings:
            found["embed_tokens.weight"] = numbers.random(VOCAB, HIDDEN)
        for layer in range(self.layers):
            name, inputs = (f"layers.{layer}", HIDDEN) if layer else ("midlayer", 2 * HIDDEN)
            found |= numbers.layer(name, inputs, self.head_dim, norms=self.qwen3)
            if not layer:
                found[f"{name}.hidden_norm.weight"] = numbers.norm(HIDDEN)
        if self.vocab < VOCAB:
            ids = torch.tensor(self.ids)
            found["d2t"] = ids - torch.arange(self.vocab)
            found["t2d"] = torch.isin(torch.arange(VOCAB), ids)
        return found

    def config(self, dialect: str) -> dict[str, Any]:
        """Its `config.json`. The ids count what goes into layers (speculators), or what comes out of them."""
        model_type = "qwen3" if self.qwen3 else "llama"
        layer = {"model_type": model_type, "vocab_size": VOCAB, **layer_config(self.layers, self.head_dim)}
        size = {"target_hidden_size": self.target_size} if self.target_size != HIDDEN else {}
        if dialect == "speculators":
            ids = {"eagle_aux_hidden_state_layer_ids": [read + 1 for read in READS]} if self.num_reads else {}
            rope = {"rope_parameters": {"rope_type": "default", "rope_theta": self.theta}}
            return {
                "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
                "draft_vocab_size": self.vocab, "transformer_layer_config": {**layer, **rope},
                "use_aux_hidden_state": self.num_reads > 0, **self.flags, **ids, **size,
            }  # fmt: skip
        eagle: dict[str, Any] = {"use_aux_hidden_state": self.num_reads > 0}
        if self.num_reads:
            eagle["eagle_aux_hidden_state_layer_ids"] = READS
        theta = {} if self.theta == 10000.0 else {"rope_theta": self.theta}
        vocab = {"draft_vocab_size": self.vocab} if self.vocab < VOCAB else {"draft_vocab_size": None}
        return {
            **layer, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle,
            **self.flags, **theta, **vocab, **size,
        }  # fmt: skip

    def save(self, folder: Path, dialect: str = "original", **changes: Any) -> Path:
        """Write both files, the config with these changes."""
        tensors = self.tensors()
        if dialect == "speculators":
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        return written(folder, tensors, {**self.config(dialect), **changes})


VARIANTS: dict[str, Checkpoint] = {
    "plain": Checkpoint(),
    "norm_before_residual": Checkpoint({"norm_before_residual": True}),
    "norm_before_fc": Checkpoint({"norm_before_fc": True}),
    "fc_norm": Checkpoint({"fc_norm": True}),
    "norm_output": Checkpoint({"norm_output": True}),
    "eagle-3.1": Checkpoint({"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "two layers": Checkpoint(layers=2),
    "head_dim": Checkpoint(head_dim=16),
    "own embeddings": Checkpoint(own_embeddings=True),
    "another width": Checkpoint(own_embeddings=True, target_size=24),
    "qwen3": Checkpoint(qwen3=True),
    "all tokens": Checkpoint(vocab=VOCAB),
    "theta": Checkpoint(theta=500.0),
    "final state": Checkpoint(num_reads=0),
}
