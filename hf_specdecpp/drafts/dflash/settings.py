"""What a DFlash draft is made of: `DFlashSettings`, in the words of no dialect."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import Qwen3Config

from hf_specdecpp.config.bounds import CURE, OF_TARGET, POSITIVE, TOKENS, Bounds, check_fields, check_layers

MOST_ROWS = 128  # of a block, which a pass has in every round; 16 are usual
NOT_NEGATIVE = (0.0, 2.0**31)
BOUNDS: dict[str, Bounds] = {
    "reads": [OF_TARGET],
    "block_size": range(1, MOST_ROWS + 1),
    "mask_token_id": range(TOKENS.stop),
    "embedding_scale": NOT_NEGATIVE,
    "output_multiplier": NOT_NEGATIVE,
    "logit_cap": POSITIVE,
    "num_target_layers": range(1, OF_TARGET.stop + 1),
}


@dataclass(frozen=True)
class DFlashSettings:
    """The shape of a draft, and how a block is computed.

    Example: with `block_size=8` and `reads=[1, 9, 17]` one pass over the last token and 7 mask tokens puts out the
    distributions of 7 candidates. They attend to the outputs of the target's layers 1, 9 and 17, counted from 0.

    Args:
        layer: arguments of the `Qwen3Config` of its layers.
        reads: the target's layers whose outputs are read, in the order in which they are put together.
        block_size: rows of a block: the last token of the text, then mask tokens.
        mask_token_id: of the target's tokens.
        embedding_scale: what the target's embeddings are multiplied with.
        output_multiplier: what the logits are multiplied with.
        logit_cap: then they are capped to this: cap * tanh(logits / cap).
        scales_as_target: the two are the target's own, if it has them (Muse Glimmer).
        is_causal: whether a row of a block sees no later rows; `None`: in layers with a window only.
        includes_window: whether a window reaches back as many tokens as its size, the token itself not counted.
        samples_anchor: whether the row of the last token proposes the first candidate, so that no row is unused.
        reads_normed: whether the output of the target's last layer is read after the target's final norm.
        num_target_layers: of the target that it was made for, if that is known.
        own_embeddings, own_head: whether it brings these or takes the target's.

    Raises:
        ValueError: numbers that make no sense.
    """

    layer: dict[str, Any]
    reads: list[int]
    block_size: int
    mask_token_id: int
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_cap: float | None = None
    scales_as_target: bool = False
    is_causal: bool | None = None
    includes_window: bool = False
    samples_anchor: bool = False
    reads_normed: bool = True
    num_target_layers: int | None = None
    own_embeddings: bool = False
    own_head: bool = False

    def __post_init__(self) -> None:
        check_fields({name: getattr(self, name) for name in BOUNDS}, BOUNDS)
        check_layers(self.layer)
        if not self.reads or self.places < 1:
            raise ValueError(
                f"A DFlash draft with block_size={self.block_size} that reads layers {self.reads} proposes nothing: a "
                f"block has at least 2 rows, made of outputs of the target. {CURE}"
            )

    @property
    def places(self) -> int:
        """Candidates of a block."""
        return self.block_size - (not self.samples_anchor)

    def layer_config(self) -> Qwen3Config:
        """The transformers config of its layers."""
        return Qwen3Config(**self.layer)

    def to_config(self) -> dict[str, Any]:
        """The arguments that make the same settings; JSON-able."""
        return asdict(self)
