"""What the target said lately after each token (Token Recycling, arXiv 2408.08696), and a draft's logits mixed with it.

Each verification says for nothing what the target's distribution is after every token that it read. Of each token the
likeliest successors are kept, and the draft's next q after that token has some of their probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdecpp.sampling.processors import Processing, Tokens

DECAY = 0.5  # of what was known of a token with each time that the target says what follows it
MOST_LIKELY = 8  # successors that are kept of a token


class Successors:
    """The target's latest successors of each token.

    Of every token `MOST_LIKELY` ids and probabilities take 64 bytes together: 3.1 MB for a vocabulary of 49,152. What
    was never said has probability 0, and what was said once `1 - DECAY` of what was said, so that the correction grows
    with what it rests on. Tokens that no logits belong to, as a prompt may end with, share the last row.

    Example: with a decay of 0.5 the target says after the token 7 first 0.8 for 3 and 0.2 for 4, then 1.0 for 4. Kept
    are 0.4 and 0.1, then 0.2 for 3 and 0.55 for 4.

    Args:
        num_ids: width of the target's logits.
        device: the draft's.
    """

    @torch.inference_mode(False)  # other generations add to it
    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.made_for, count = (num_ids, device), min(MOST_LIKELY, num_ids)
        # Always different ones in a row, so that no two of them are written to the same place.
        self.ids = torch.arange(count, dtype=torch.int32, device=device).repeat(num_ids + 1, 1)
        self.probs = torch.zeros(num_ids + 1, count, device=device)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.probs.nbytes

    @torch.no_grad()
    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Take note of the target's `logits` `[n, num_ids]`, before processors, after these n tokens, the oldest first.

        What is no number counts for nothing.
        """
        likely, ids = logits.float().softmax(-1).topk(self.ids.shape[1])
        likely, ids = likely.to(self.probs).nan_to_num(0.0), ids.to(self.ids)
        for places in _each_once(tokens):
            after, rows = torch.tensor([[tokens[place] for place in places], places]).to(self.ids.device)
            self._add(self._rows_of(after), ids[rows], (1.0 - DECAY) * likely[rows])

    def _add(self, of: Tensor, ids: Tensor, probs: Tensor) -> None:
        """To different rows `[n]` successors and their probabilities `[n, k]`."""
        old_ids, old_probs = self.ids[of], DECAY * self.probs[of]
        is_same = old_ids[:, None] == ids[:, :, None]
        probs = probs + (old_probs[:, None] * is_same).sum(-1)
        old_probs = old_probs.masked_fill(is_same.any(1), -1.0)  # it is among the others, of which there are enough
        self.probs[of], kept = torch.cat((probs, old_probs), dim=1).topk(ids.shape[1])
        self.ids[of] = torch.cat((ids, old_ids), dim=1).gather(1, kept)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        return tokens.clamp_max(len(self.ids) - 1)

    def mixed(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Logits `[n, vocab]` after these tokens `[n]` whose softmax is q with a share of what the target said.

        That of `(1 - w) * q + w * r`, where r has the kept probabilities, which sum to less than 1, and w is
        `(1 - max q) * max r`: the draft gives way as far as it is unsure and the target was sure. Tokens that the draft
        cannot say (-inf) it still does not say.

        Example: q is [0.6, 0.4, 0], r is [0, 0.5, 0.2]. w is 0.4 * 0.5 = 0.2, so q becomes [0.48, 0.42, 0] / 0.9.
        """
        of = self._rows_of(tokens.to(self.ids.device))
        ids, r = self.ids[of].long(), self.probs[of]
        known = scores.gather(1, ids)
        top = scores.softmax(-1).amax(-1, keepdim=True)
        total = scores.amax(-1, keepdim=True) - top.log()  # logsumexp, in a third of the time
        w = (1.0 - top) * r.amax(-1, keepdim=True)
        added = torch.logaddexp(known, total + (r * (w / (1.0 - w))).log())
        return scores.scatter(1, ids, added.where(known > float("-inf"), known))


class MixedProcessing(Processing):
    """The processors of a draft whose logits are mixed with the target's successors before them.

    So what processors forbid stays forbidden, and what is kept does not depend on how texts are sampled.
    """

    def __init__(self, processing: Processing, successors: Successors) -> None:
        super().__init__(processing.processors)
        self.successors = successors

    def one(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        last = torch.as_tensor(candidates[-1]) if len(candidates) else input_ids[0, -1]
        return super().one(input_ids, candidates, self.successors.mixed(last.view(1), scores[None])[0])

    def after_each(self, input_ids: Tensor, paths: Sequence[list[int]], scores: Tensor) -> Tensor:
        root = int(input_ids[0, -1])
        last = torch.tensor([path[-1] if path else root for path in paths])
        return super().after_each(input_ids, paths, self.successors.mixed(last, scores))


def _each_once(tokens: Sequence[int]) -> list[list[int]]:
    """Places of tokens in groups, in none of which a token stands twice, and each before its next.

    Example: of the tokens 5 6 5 5 the places [0, 1], [2], [3].
    """
    groups: list[list[int]] = []
    seen: dict[int, int] = {}
    for place, token in enumerate(tokens):
        group = seen[token] = seen.get(token, -1) + 1
        if group == len(groups):
            groups.append([])
        groups[group].append(place)
    return groups
