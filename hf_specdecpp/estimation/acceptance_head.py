"""The acceptance head: a small network, trained to predict whether the target accepts a candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_specdecpp.estimation import estimators
from hf_specdecpp.estimation.estimators import LAGS, MODES, DraftStep, scalar_features

# Bounds, because sizes come from the config of a downloaded repository.
MOST_BLOCKS, MOST_POSITIONS, MOST_SIZE = 64, 1024, 2**20


@dataclass
class Calibration:
    """Calibrates the log-odds of a head: (log-odds + bias) / temperature, by the candidate's position in the round.
    `ValueError` unless there are 1 to 1024 temperatures, positive and finite, and the bias is finite."""

    bias: float = 0.0
    temperatures: list[float] = field(default_factory=lambda: [1.0])  # by position; later positions use the last

    def __post_init__(self) -> None:
        if not 0 < len(self.temperatures) <= MOST_POSITIONS or not all(0 < t < math.inf for t in self.temperatures):
            raise ValueError(
                f"{len(self.temperatures)} temperatures, {self.temperatures[:9]}: they must be positive numbers, one a "
                f"position, {MOST_POSITIONS} at most."
            )
        if not math.isfinite(self.bias):
            raise ValueError(f"bias={self.bias!r} must be a finite number: it is added to the log-odds.")

    def apply(self, log_odds: Tensor, index: int | Tensor) -> Tensor:
        """Calibrated log-odds `[...]`. `index`: position in the round, from 0, of all `log_odds` `[...]` or of each."""
        if isinstance(index, int):
            return (log_odds + self.bias) / self.temperatures[min(index, len(self.temperatures) - 1)]
        temperatures = torch.tensor(self.temperatures, dtype=log_odds.dtype, device=log_odds.device)
        return (log_odds + self.bias) / temperatures[index.clamp_max(len(self.temperatures) - 1)]


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), the block of the SpecDec++ paper."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """Predicts whether the target will accept a candidate y. `ValueError` if an argument is out of range.

    `inputs="after"` is SpecDec++'s head (section 3.2): `num_blocks` residual blocks and a linear layer with two logits
    (0 reject, 1 accept) on the draft's last hidden state at the candidate.

    `inputs="before"` needs no forward pass over the candidate. Its log-odds are those of q(y), plus the output of a
    small network on six scalars (`scalar_features`), plus a correction from the candidate's embedding and the hidden
    state that produced q, through a projection to `rank` and `num_blocks` residual blocks. Both additions are
    initialised to zero, so an untrained head predicts q(y), the draft's probability of the candidate.

    `inputs="path"` predicts before the draw the share of q that the target accepts, so all tokens have one estimate: a
    linear layer on the hidden state that produced q, initialised to zero. The states of a DSpark draft include the
    Markov embedding of the previous candidate, so this is DSpark's confidence head.

    Parameters stay in float32 when the model is cast; `.to()` changes only their device.

    Args:
        hidden_size: size of the draft's hidden states.
        num_blocks: number of residual blocks, from 0 to 64; 3 in the paper, always 0 for `"path"`.
        tied: whether the blocks share one weight matrix, as in the released SpecDec++ code.
        inputs: when the head predicts: `"after"` or `"before"` the draft reads the drawn candidate, or `"path"`, before
            the draw.
        embedding_size: size of the draft's input embeddings (`"before"`), by default `hidden_size`.
        rank: width of the correction (`"before"`). Sizes and widths are from 1 to 2**20.
        siblings: number of siblings per node in the training data (`"before"`), `None` if unknown. In wider trees no
            sibling's number of earlier siblings counts as more than in training: the network does not extrapolate.
        calibration: keyword arguments of `Calibration`, for `"sampled"` and for `"greedy"` targets.

    Attributes:
        is_published: whether this is the confidence head of a published draft, which stays in the draft's repository.
    """

    most: Tensor
    is_published = False

    def __init__(
        self, hidden_size: int, num_blocks: int = 3, tied: bool = False, inputs: str = "after",
        embedding_size: int | None = None, rank: int = 64, siblings: int | None = None,
        calibration: dict[str, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if inputs not in LAGS:
            raise ValueError(f"inputs={inputs!r} must be one of {', '.join(LAGS)}: when the head sees a candidate.")
        embedding_size = hidden_size if embedding_size is None else embedding_size
        sizes = {"hidden_size": hidden_size, "embedding_size": embedding_size, "rank": rank}
        limits = {name: (value, 1, MOST_SIZE) for name, value in sizes.items()}
        limits["num_blocks"] = num_blocks, 0, MOST_BLOCKS
        limits["siblings"] = 1 if siblings is None else siblings, 1, MOST_POSITIONS
        for name, (value, least, most) in limits.items():
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}.")
        num_blocks = 0 if inputs == "path" else num_blocks
        self.hidden_size, self.num_blocks, self.tied, self.inputs = hidden_size, num_blocks, tied, inputs
        self.embedding_size, self.rank, self.siblings = embedding_size, rank, siblings
        self.calibration = {mode: Calibration(**values) for mode, values in (calibration or {}).items()}
        if unknown := sorted(set(self.calibration) - set(MODES)):
            raise ValueError(f"calibration has {unknown}; it knows {' and '.join(MODES)} targets.")

        width = rank if inputs == "before" else hidden_size
        distinct = min(num_blocks, 1) if tied else num_blocks
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(distinct))
        self.output = nn.Linear(width, 2 if inputs == "after" else 1)
        starts_at_zero = [] if inputs == "after" else [self.output]
        if inputs == "before":
            self.from_hidden = nn.Linear(hidden_size, rank)
            self.from_embedding = nn.Linear(self.embedding_size, rank, bias=False)
            from_scalars = nn.Linear(32, 1)
            self.from_scalars = nn.Sequential(nn.Linear(estimators.NUM_SCALARS, 32), nn.SiLU(), from_scalars)
            bounds = torch.full((estimators.NUM_SCALARS,), math.inf)  # upper bounds of the scalars
            if siblings is not None:
                bounds[estimators.SIBLING_MASS], bounds[estimators.NUM_SIBLINGS] = float(siblings > 1), siblings - 1
            self.register_buffer("most", bounds, persistent=False)
            starts_at_zero.append(from_scalars)
        for layer in starts_at_zero:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def to_config(self) -> dict[str, Any]:
        """The constructor's arguments, for `config.json`."""
        names = ("hidden_size", "num_blocks", "tied", "inputs", "embedding_size", "rank", "siblings")
        calibration = {mode: asdict(values) for mode, values in self.calibration.items()}
        return {**{name: getattr(self, name) for name in names}, "calibration": calibration}

    def forward(self, hidden: Tensor, embedding: Tensor | None = None, scalars: Tensor | None = None) -> Tensor:
        """Uncalibrated log-odds of acceptance; inputs may be on another device than the head.

        Args:
            hidden: `[..., hidden_size or more]`, the draft's hidden state at the candidate (`"after"`), or the one that
                q was computed from. Further numbers are cut off.
            embedding: `[..., embedding_size]` of the candidate (`"before"`).
            scalars: `[..., 6]` from `scalar_features` (`"before"`).

        Returns:
            `[...]` float32, on the head's device."""
        own = self.output.weight  # its device and float32
        hidden = hidden[..., : self.hidden_size]
        if self.inputs != "before":
            *reject, accept = self._blocks(hidden.to(own)).unbind(-1)
            return accept - reject[0] if reject else accept
        if embedding is None or scalars is None:
            raise ValueError("A head with inputs='before' needs the candidate's embedding and scalar_features too.")
        mixed, scalars = self.from_hidden(hidden.to(own)) + self.from_embedding(embedding.to(own)), scalars.to(own)
        correction = self._blocks(F.silu(mixed)).squeeze(-1)
        return _log_odds(scalars[..., 0]) + self.from_scalars(scalars.minimum(self.most)).squeeze(-1) + correction

    def _blocks(self, x: Tensor) -> Tensor:
        for i in range(self.num_blocks):
            x = self.blocks[0 if self.tied else i](x)
        return self.output(x)

    def estimate(self, step: DraftStep) -> Tensor | None:
        """Calibrated acceptance probability of the candidate of `step`, already drawn (`"before"`) or not yet drawn
        (`"path"`). With `"after"` that of the previous candidate, `None` in a round's first step."""
        position = step.index - (self.inputs == "after")
        if position < 0:
            return None  # the draft has not read a candidate yet
        drawn: list[Tensor] = []
        if self.inputs == "before":
            drawn = [step.embed(step.token), scalar_features(step.q, step.token, step.greedy)]
        return self.probability(self.forward(step.hidden, *drawn), position, step.greedy)

    def estimate_siblings(self, step: DraftStep, tokens: Tensor, left: Tensor, mass: Tensor) -> Tensor:
        """Acceptance probabilities `[..., c]` of siblings, each given that all earlier siblings are rejected. A head
        with `inputs="path"` estimates the first sibling; further siblings get their probabilities in `left`.

        Args:
            step: the draft step after the parents `[...]`.
            tokens: `[..., c]`, the siblings' token ids.
            left: `[..., c, vocab]`, the distribution that each was drawn from: q without the earlier siblings.
            mass: `[..., c]`, total q of the earlier siblings."""
        if self.inputs == "path":
            others = left.gather(-1, tokens[..., None])[..., 1:, 0]
            first = self.estimate(step)[..., None]  # type: ignore[index]
            return torch.cat((first.to(others), others), dim=-1)
        numbers = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        scalars = scalar_features(left, tokens, step.greedy, mass, numbers)
        log_odds = self.forward(step.hidden[..., None, :], step.embed(tokens), scalars)
        return self.probability(log_odds, step.index, step.greedy)

    def probability(self, log_odds: Tensor, position: int | Tensor, greedy: bool) -> Tensor:
        """Calibrated probabilities of `log_odds` `[...]` from `forward`, for sampled or `greedy` targets; `position` as
        the `index` of `Calibration`. NaN, after an overflow, becomes 0: with NaN the growth of a tree would not end."""
        calibration = self.calibration.get(MODES[greedy])
        position = position.to(log_odds.device) if isinstance(position, Tensor) else position
        calibrated = log_odds if calibration is None else calibration.apply(log_odds, position)
        return calibrated.sigmoid().nan_to_num(0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AcceptanceHead:
        # `.to(dtype)`, `.half()` and pipelines cast whole models, but in half precision the head's estimates are worse.
        device = fn(torch.empty(0, device=self.output.weight.device)).device
        return super()._apply(lambda tensor: tensor.to(device), recurse)


def _log_odds(log_probability: Tensor) -> Tensor:
    """log p - log(1 - p) of log p; finite for p = 1."""
    return log_probability - torch.log1p(-log_probability.exp().clamp_max(1 - 1e-6))
