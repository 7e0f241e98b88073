"""What an EAGLE-3 draft is made of: `Eagle3Settings`, in the words of neither dialect."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_specdecpp.config.bounds import DEPTH, OF_TARGET, SIZE, TOKENS, Bounds, check_fields, check_layers

LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_USUAL = 3  # outputs of layers are read where a checkpoint names none
BOUNDS: dict[str, Bounds] = {
    "state_size": SIZE,
    "reads": [OF_TARGET],
    "layer_ids": [range(OF_TARGET.stop + 1)],
    "num_reads": range(DEPTH.stop),
    "draft_vocab_size": TOKENS,
}


@dataclass(frozen=True)
class Eagle3Settings:
    """The shape of a draft, and how its step is computed.

    Example: of a target of 32 layers `reads=[1, 15, 28]` reads the outputs of its layers 1, 15 and 28, counted from 0.
    These are the ids 2, 16 and 29 of checkpoints that count what goes into a layer.

    Args:
        layer: of the draft's layers: `model_type` ("llama" or "qwen3") and arguments of its transformers config.
        state_size: of the target's hidden states.
        reads: the target's layers whose outputs are read, in the order in which they are put together; `None` where
            that depends on the target. Without any, its final state is read, after its final norm.
        layer_ids: what a checkpoint calls them (`eagle3.layer_ids`); `None` for the usual ones.
        num_reads: how many these are.
        draft_vocab_size: how many tokens it may propose; `None` for all.
        norm_before_residual: the residual begins with the normed state instead of the state itself.
        norm_before_fc: one norm over all states together before they are mixed (gpt-oss).
        fc_norm: a norm for each of them (EAGLE-3.1).
        norm_output: the state that a step goes on from is the normed one (EAGLE-3.1).
        fc_bias: whether what mixes the states has a bias.
        own_embeddings, own_head: whether it brings these or takes the target's.

    Raises:
        ValueError: settings that exclude one another, or a layer of another type.
    """

    layer: dict[str, Any]
    state_size: int
    reads: list[int] | None = None
    layer_ids: list[int] | None = None
    num_reads: int = 3
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embeddings: bool = False
    own_head: bool = True

    def __post_init__(self) -> None:
        check_fields({name: getattr(self, name) for name in BOUNDS}, BOUNDS)
        check_layers(self._arguments())
        if self.layer.get("vocab_size") is None:
            raise ValueError("layer.vocab_size is missing, so it is not known how many tokens the draft was made for.")
        if (found := self.layer.get("model_type")) not in tuple(LAYER_CONFIGS):
            raise ValueError(f"A draft with layers of type {found!r} is not known; there are 'llama' and 'qwen3'.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both set and exclude one another: the states are normed once. Unset "
                "the wrong one, for example eagle3={'norm_before_fc': False}."
            )
        if self.num_reads * self.state_size == self.layer["hidden_size"]:
            raise ValueError(
                f"What the draft reads of the target ({self.num_reads} x {self.state_size}) is as wide as its own "
                f"state ({self.layer['hidden_size']}), so they cannot be told apart. Read another number of layers."
            )
        named = self.reads or self.layer_ids or [0] * (NUM_USUAL if self.num_reads else 0)
        if len(named) != self.num_reads:
            name = "reads" if self.reads else "eagle_aux_hidden_state_layer_ids"
            raise ValueError(
                f"{name}={self.reads or self.layer_ids} must name {self.num_reads} layers of the target, since the "
                "outputs of so many are mixed. Say which, counted from 0: eagle3={'reads': [...]}."
            )
        if self.state_size != self.layer["hidden_size"] and not (self.own_embeddings and self.own_head):
            raise ValueError(
                f"The draft is {self.layer['hidden_size']} wide and its target {self.state_size}, so it cannot take "
                "the target's embeddings and LM head, and it lacks one of them (embed_tokens.weight, lm_head.weight). "
                "The checkpoint is incomplete: download it again."
            )

    def layer_config(self) -> Any:
        """The transformers config of the draft's layers."""
        return LAYER_CONFIGS[self.layer["model_type"]](**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.layer.items() if name != "model_type"}

    def to_config(self) -> dict[str, Any]:
        """The arguments that make the same settings; JSON-able."""
        return asdict(self)
