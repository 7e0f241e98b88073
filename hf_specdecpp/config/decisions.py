"""What the package decides about a run, beside its settings: `Decisions`."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdecpp.config.speculation import MOST_CANDIDATES, SpeculationConfig
from hf_specdecpp.config.types import check_types
from hf_specdecpp.sampling.verification import Verification


@dataclass(frozen=True)
class Decisions:
    """What the package decides where nobody experiments: `assistant.decisions`, for experiments and tests.

    `SpeculationStats.decided` says what a generation made of it. `None` is decided for each target and draft.

    Args:
        min_tokens (candidates): the fewest that a round of `rule="threshold"` drafts (SpecDec++: 2).
        adapt: calibrate the estimates of `"threshold"` and of dynamic trees by what verification said of earlier ones
            (`docs/specdecpp.md`). `"throughput"` always does.
        tree_depth (candidates): the longest path of a dynamic tree, which is also the most draft passes of `"dyspec"`.
        tree_threshold (probability): a dynamic tree never draws where the chance of getting there is estimated to be
            lower (DySpec: 1 / budget and less). 0 always uses the whole budget.
        lookup_tokens (candidates): the most that a chain looks up; in a tree there are `tree_budget` nodes at most.
        draft_temperature: divides the draft's logits once more where the target samples, before temperature, top-k and
            the like and before the target's successors are mixed in.
        draft_successors: mix the draft's distribution with what an attached target said lately after the same one to
            three tokens. `None`: in greedy texts, with drafts that read the target's states, where it was measured to
            gain (`docs/drafts.md`), unless whole rounds are captured.
        verification: of candidates that were drawn, on an attached target (`docs/verification.md`). `"block"` accepts a
            chain as a block and a tree from its leaves; `"token"` one candidate after the other, as in the papers.
        pack_weights: let oneDNN compute with packed copies of the weights. `None`: where memory allows.
        int8_draft: let the draft read a few tokens with int8 copies of its weights. `None`: drafts that are models of
            their own.

    Raises:
        ValueError: a value is of the wrong type or outside its range.
    """

    min_tokens: int = 1
    adapt: bool = True
    tree_depth: int = 12
    tree_threshold: float = 0.0
    lookup_tokens: int = 40
    draft_temperature: float = 1.0
    draft_successors: bool | None = None
    verification: Verification = "block"
    pack_weights: bool | None = None
    int8_draft: bool | None = None

    def __post_init__(self) -> None:
        check_types(self)
        bounds = dict.fromkeys(("min_tokens", "tree_depth", "lookup_tokens"), (1, MOST_CANDIDATES))
        for name, (least, most) in (bounds | {"draft_temperature": (0.1, 10.0)}).items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)!r} must be from {least} to {most}.")
        if not 0.0 <= self.tree_threshold < 1.0:
            raise ValueError(
                f"tree_threshold={self.tree_threshold!r} must be at least 0 and below 1: the first slot of a tree has "
                "value 1, so nothing could be drawn."
            )

    def mixes(self, greedy: bool, reads_states: bool) -> bool:
        """Whether a draft is mixed with the target's successors in such texts."""
        return greedy and reads_states if self.draft_successors is None else self.draft_successors

    def most_tokens(self, config: SpeculationConfig) -> int:
        """The largest number of candidates that a round can have."""
        drafted = config.most_drafted
        looked_up = self.lookup_tokens if config.tree is None else config.tree_budget
        return max(drafted, looked_up) if config.lookup else drafted
