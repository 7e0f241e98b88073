"""Siblings judged by an acceptance head (`HeadJudgedSiblings`), a few at once, and the head's input features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import NUM_SCALARS
from hf_specdecpp.sampling.randomness import Siblings, likeliest

# Number of siblings of a node that a head judges at once: its pass costs the same for one as for a few.
AHEAD = 4


@dataclass
class Level:
    """The draft's output after n nodes of a tree: `scores` `[n, vocab]` float32 after all processors, whose softmax is
    q; for a head the `hidden` states `[n, hidden_size]` they were computed from, and `embed`, which maps token ids to
    input embeddings; and the number of draft `passes`, 0 if an earlier pass gave this output."""

    scores: Tensor
    hidden: Tensor
    embed: Callable[[Tensor], Tensor]
    passes: int = 1


class HeadJudgedSiblings:
    """As `growth.judged_siblings`, for a level, with estimates of a head with `inputs="before"`.

    A few siblings of every node (`ahead`) are drawn ahead, so that one pass of the head serves a level. The output
    stays exact: a sibling is seen only after the decision to take it, and siblings that are not taken are forgotten.
    """

    def __init__(
        self, q: Tensor, draw: Callable[[Tensor], Siblings], head: AcceptanceHead, level: Level, depths: Sequence[int],
        ahead: int,
    ) -> None:  # fmt: skip
        greedy = draw is likeliest
        self.head, self.level, self.greedy = head, level, greedy
        self.depths = torch.tensor(depths, device=q.device)
        self.left = [SiblingDistribution(entropy, greedy) for entropy in _entropies(q, level.scores).tolist()]
        self.tops = _likeliest(q, ahead + 1)
        self.siblings = draw(q)  # from here on q may be overwritten
        self.ahead = [ahead] * len(depths)
        self.judged: list[list[tuple[int, float]]] = [[] for _ in depths]

    def of_node(self, row: int) -> Iterator[tuple[int, float]]:
        """The siblings below the level's node in this row, with estimates, in the order drawn."""
        judged = self.judged[row]
        for place in count():
            if place == len(judged):
                self._judge(range(row, row + 1) if place else range(len(self.judged)))
            if place == len(judged):
                return
            yield judged[place]

    @torch.inference_mode()
    def _judge(self, rows: range) -> None:
        """Draw and judge further siblings in each of `rows`, which all have the same number of judged siblings."""
        ahead, span = self.ahead[rows[0]], slice(rows.start, rows.stop)
        tops = self.tops
        if (num_judged := len(self.judged[rows[0]])) > 0:
            tops = _likeliest(self.level.scores[span].softmax(dim=-1), num_judged + ahead + 1)
        scalars = torch.zeros((len(rows), ahead, NUM_SCALARS), dtype=torch.float32, device="cpu")
        tokens = torch.zeros((len(rows), ahead), dtype=torch.long, device="cpu")
        drawn: list[list[int]] = []
        for place, row in enumerate(rows):
            found = [each for each in (self.siblings.draw_next(row) for _ in range(ahead)) if each is not None]
            drawn.append([token for token, _ in found])
            if found:
                tokens[place, : len(found)] = torch.tensor(drawn[-1], device="cpu")
                scalars[place, : len(found)] = torch.tensor(self.left[row].scalars_of(found, tops[place]))
            self.ahead[row] = 2 * ahead
        hidden = self.level.hidden[span, None]
        log_odds = self.head(hidden, self.level.embed(tokens.to(hidden.device)), scalars.to(hidden.device))
        judged = self.head.probability(log_odds, self.depths[span, None], self.greedy)
        for row, row_tokens, estimates in zip(rows, drawn, judged.tolist(), strict=True):
            self.judged[row] += zip(row_tokens, estimates, strict=False)


class SiblingDistribution:
    """A head's features of q without the siblings drawn so far; `entropy`: that of q, in nats."""

    def __init__(self, entropy: float, greedy: bool) -> None:
        self.entropy, self.greedy = entropy, float(greedy)
        self.gone: set[int] = set()
        self.mass, self.part = 0.0, 0.0  # of the drawn siblings: the sums of q and of -q log q

    def scalars_of(
        self, drawn: list[tuple[int, float]], likeliest: Sequence[tuple[float, float]]
    ) -> list[tuple[float, ...]]:
        """`scalar_features` of the siblings `drawn` next, in order, each for q without earlier siblings. `likeliest`:
        the tokens of highest q, descending, two more than are drawn before the last of `drawn`. Both: (token, q)."""
        rows: list[tuple[float, ...]] = []
        place = 0
        for token, q in drawn:
            while place < len(likeliest) and likeliest[place][0] in self.gone:
                place += 1
            left = list(islice((q_of for other, q_of in islice(likeliest, place, None) if other not in self.gone), 2))
            margin = sum(left[:1]) - sum(left[1:])  # a single token left has margin q
            rest = max(1.0 - self.mass, 1e-12)
            entropy = max((self.entropy - self.part) / rest + math.log(rest), 0.0)
            log_q = math.log(min(max(q / rest, 1e-30), 1.0))
            rows.append((log_q, entropy, margin / rest, self.mass, float(len(self.gone)), self.greedy))
            self.gone.add(token)
            self.mass += q
            self.part -= q * math.log(q)
        return rows


def _entropies(q: Tensor, scores: Tensor) -> Tensor:
    """`[n]`, entropies in nats of q, the softmax of `scores`: log of the normaliser minus the mean score."""
    log_normaliser = scores.amax(-1) - q.amax(-1).log()
    # Scores of -inf have q = 0 and add nothing, but 0 * -inf would be nan.
    finite = scores.clamp_min(torch.finfo(scores.dtype).min)
    return log_normaliser - torch.linalg.vecdot(q, finite)


def _likeliest(q: Tensor, num: int) -> list[list[tuple[int, float]]]:
    """For each row of `q` the `num` likeliest tokens with their q, descending."""
    ranked = likeliest(q.clone())
    rows = [[ranked.draw_next(row) for _ in range(num)] for row in range(q.shape[0])]
    return [[each for each in row if each is not None] for row in rows]
