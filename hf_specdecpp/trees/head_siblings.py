"""Siblings judged by an acceptance head (`HeadJudgedSiblings`), a few at once, and the head's input features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hf_specdecpp.sampling.randomness import Siblings

# Number of siblings of a node that a head judges at once: its pass costs the same for one as for a few.
AHEAD = 4


class HeadJudgedSiblings:
    """Draws the children of all nodes of a level, and judges them by an acceptance head with `inputs="before"`.

    A few siblings of every node (`ahead`) are drawn ahead, so that one pass of the head serves a level. The output
    stays exact: a sibling is seen only after the decision to take it, and siblings that are not taken are forgotten.

    Args:
        how: the `Slots` of the tree, whose estimator is the head.
        siblings: draws from q, which is then overwritten.
        q, scores: `[n, vocab]` of the level's n nodes: the draft's distributions of the next token, and their logits.
        hidden, depths: `[n, hidden_size]`, the draft's states behind these logits, and depth of each node.
    """

    def __init__(
        self, how: Any, siblings: Siblings, q: Tensor, scores: Tensor, hidden: Tensor, depths: Sequence[int]
    ) -> None:
        self.head, self.embed, self.greedy = how.estimator, how.embed, how.randomness is None
        self.siblings, self.scores, self.hidden = siblings, scores, hidden
        self.depths = torch.tensor(depths, device=q.device)
        self.entropies, self.tops = _entropies(q, scores).cpu(), _likeliest(q, how.ahead + 1)
        self.ahead = [how.ahead] * len(depths)
        self.drawn: list[list[tuple[int, float]]] = [[] for _ in depths]  # tokens, with q
        self.judged: list[list[tuple[int, float]]] = [[] for _ in depths]  # tokens, with estimates

    def of_node(self, row: int) -> Iterator[tuple[int, float]]:
        """Yield the children of the level's node in this row, in the order drawn: token and estimated acceptance."""
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
        ahead, known, span = self.ahead[rows[0]], len(self.judged[rows[0]]), slice(rows.start, rows.stop)
        tops = _likeliest(self.scores[span].softmax(dim=-1), known + ahead + 1) if known else self.tops
        for row in rows:
            draws = [self.siblings.draw_next(row) for _ in range(ahead)]
            self.drawn[row] += [each for each in draws if each is not None]
            self.ahead[row] = 2 * ahead
        of_rows = [torch.tensor(self.drawn[row], dtype=torch.float64, device="cpu").view(-1, 2) for row in rows]
        drawn = pad_sequence(of_rows, batch_first=True)
        if drawn.shape[1] == known:  # no token is left
            return
        scalars = sibling_features(drawn, tops, self.entropies[span], self.greedy)[:, known:]
        tokens, hidden = drawn[:, known:, 0].long(), self.hidden[span, None]
        log_odds = self.head(hidden, self.embed(tokens.to(hidden.device)), scalars.to(hidden.device))
        judged = self.head.probability(log_odds, self.depths[span, None], self.greedy)
        for row, estimates in zip(rows, judged.tolist(), strict=True):
            further = [token for token, _ in self.drawn[row][known:]]
            self.judged[row] += zip(further, estimates, strict=False)


def sibling_features(drawn: Tensor, tops: Tensor, entropies: Tensor, greedy: bool) -> Tensor:
    """Return the six `scalar_features`, `[n, c, 6]` float32, of c siblings below each of n nodes. Those of each sibling
    are of q without the earlier siblings, renormalised. The arguments are float64 on the host.

    Args:
        drawn: `[n, c, 2]`, the siblings in the order drawn: token and q.
        tops: `[n, c + 1, 2]` or more, the likeliest tokens after each node and their q.
        entropies: `[n]`, of q, in nats.
    """
    (tokens, q), (top_tokens, top_q) = drawn.unbind(-1), tops.unbind(-1)
    mass, part = (functional.pad(each.cumsum(-1)[:, :-1], (1, 0)) for each in (q, torch.special.entr(q)))
    rest = (1.0 - mass).clamp_min(1e-12)
    entropy = (entropies[:, None] - part) / rest + rest.log()
    are_earlier = torch.ones((q.shape[1], q.shape[1]), dtype=torch.bool, device="cpu").tril(-1)
    are_gone = ((top_tokens[:, None, :, None] == tokens[:, None, None]) & are_earlier[:, None]).any(-1)
    left = top_q[:, None].masked_fill(are_gone, 0.0).topk(2).values  # a single token left has margin q
    margin = (left[..., 0] - left[..., 1]) / rest
    log_q = (q / rest).clamp(1e-30, 1.0).log()
    numbers = torch.arange(q.shape[1], dtype=q.dtype, device="cpu").expand_as(q)
    scalars = (log_q, entropy.clamp_min(0.0), margin, mass, numbers, torch.full_like(q, float(greedy)))
    return torch.stack(scalars, dim=-1).float()


def _entropies(q: Tensor, scores: Tensor) -> Tensor:
    """Entropies `[n]` in nats of q, the softmax of `scores`: log of the normaliser minus the mean score."""
    log_normaliser = scores.amax(-1) - q.amax(-1).log()
    # Scores of -inf have q = 0 and add nothing, but 0 * -inf would be nan.
    finite = scores.clamp_min(torch.finfo(scores.dtype).min)
    return log_normaliser - torch.linalg.vecdot(q, finite)


def _likeliest(q: Tensor, num: int) -> Tensor:
    """`[n, num, 2]` float64 on the host: for each row of `q` the likeliest tokens, descending, and their q."""
    values, tokens = q.topk(min(num, q.shape[-1]))
    return torch.stack((tokens.to(values), values), dim=-1).cpu().double()  # exact for ids below 2^24
