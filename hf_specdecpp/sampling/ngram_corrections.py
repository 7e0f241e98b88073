"""Mixes the draft's logits with the target's latest distributions after the same tokens (`NgramCorrections`).

Each target pass gives the target's distribution after all of its tokens at no cost. Its likeliest successors are stored
by the last token (Token Recycling, arXiv 2408.08696), by the last two, and by the last three. When such a context comes
again, q is mixed with the stored probabilities, r."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

import torch
from torch import Tensor
from transformers import LogitsProcessor

DECAY = 0.5  # weight of the stored probabilities of a context; new ones have the rest
MOST_LIKELY = 8  # stored successors of a context
ORDERS = 3  # tokens in the longest context
MOST_CONTEXTS = 65_536  # stored contexts; of more, the least recently seen are dropped

BUCKETS = 8  # intervals of the largest probability of r, for each of which r's accuracy is measured
PRIOR = 8.0  # initial trials per bucket, in which r was as accurate as its probabilities
TRIAL_DECAY = 0.995  # weight of a bucket's earlier trials, per trial
MAX_CHANCE = 0.98  # largest accuracy, so that q always keeps some weight
SHARPNESS = 2.0  # exponent of the odds of r in greedy generation
CAUTION = 0.5  # factor of the odds of r in sampled generation

Successors = dict[int, float]  # tokens and their probabilities


class NgramCorrections:
    """The target's latest distributions after one, two and three tokens, for a target with logits for `num_ids` ids.

    For each length of context and each interval of the largest stored probability, the accuracy is measured: the
    target's mean probability for the likeliest stored token when the context came again.

    Example: with a decay of 0.5 the target's distribution after the tokens 5 7 is first 0.8 for 3 and 0.2 for 4, then
    1.0 for 4. Stored after 7 and after 5 7 are 0.8 and 0.2, then 0.4 for 3 and 0.6 for 4. After 6 7 the probabilities
    after 7 are used.

    Attributes:
        successors: by context, its likeliest successors; the context seen last is the last.
        correct, trials: of r's likeliest token, by number of tokens in the context and interval of its probability.
    """

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.successors: OrderedDict[tuple[int, ...], Successors] = OrderedDict()
        buckets = [(order, place) for order in range(1, ORDERS + 1) for place in range(BUCKETS)]
        self.correct = {bucket: PRIOR * (bucket[1] + 0.5) / BUCKETS for bucket in buckets}
        self.trials = dict.fromkeys(buckets, PRIOR)

    def record(self, contexts: Sequence[tuple[int, ...]], logits: Tensor) -> None:
        """Record the target's `logits` `[n, num_ids]`, before processors, after each of n contexts (`contexts_of`);
        later ones are newer. NaN counts as probability 0."""
        p, ids = logits.float().softmax(-1).topk(min(MOST_LIKELY, logits.shape[-1]))
        rows = zip(ids.tolist(), p.nan_to_num(0.0).tolist(), strict=True)
        for context, (tokens, probs) in zip(contexts, rows, strict=True):
            self._learn(context, dict(zip(tokens, probs, strict=True)))

    def _learn(self, context: tuple[int, ...], new: Successors) -> None:
        """Measure the accuracy of r, then mix `new` into the successors of all parts of the context."""
        order, r = self._known(context)
        if r:
            bucket, likeliest = _bucket(order, r), max(r, key=r.__getitem__)
            self.trials[bucket] = TRIAL_DECAY * self.trials[bucket] + 1.0
            self.correct[bucket] = TRIAL_DECAY * self.correct[bucket] + new.get(likeliest, 0.0)
        for length in range(1, len(context) + 1):
            part = context[-length:]
            known = self.successors.pop(part, None)
            self.successors[part] = new if known is None else _mixture(known, new)
        while len(self.successors) > MOST_CONTEXTS:
            self.successors.popitem(last=False)

    def _known(self, context: tuple[int, ...]) -> tuple[int, Successors]:
        """The length of a context's longest known part, and r after it; 0 and no successors if no part is known."""
        for order in range(len(context), 0, -1):
            if (found := self.successors.get(context[-order:])) is not None:
                return order, found
        return 0, {}

    def mixed(self, context: tuple[int, ...], scores: Tensor, greedy: bool) -> Tensor:
        """Return logits `[1, vocab]` after a context, with softmax proportional to `(1 - w) * q + w * r`.

        q is the softmax of `scores` `[1, vocab]`, and r the stored probabilities of the longest known part of the
        context; without one, q is unchanged. Let t be the largest probability of q, and m the measured accuracy of r's
        likeliest token. With the ratio m / (1 - m) over t / (1 - t), the odds w / (1 - w) are its square in greedy
        generation, where only the likeliest token counts, and half of it in sampled generation. Tokens outside the
        draft's vocabulary may get probability from r.

        Example: q is [0.6, 0.4, 0], r is [0, 0.5, 0.2], and m is 0.5, so the ratio is 1 / 1.5. In greedy generation the
        odds are 0.444, so w is 0.308, and q becomes [0.415, 0.431, 0.062] / 0.908. In sampled generation the odds are
        0.333, so w is 0.25, and q becomes [0.45, 0.425, 0.05] / 0.925."""
        order, found = self._known(context)
        if not found:
            return scores
        m = min(self.correct[bucket := _bucket(order, found)] / self.trials[bucket], MAX_CHANCE)
        ids, r = torch.tensor([list(found)], device=scores.device), scores.new_tensor([list(found.values())])
        known = scores.gather(1, ids)
        t = scores.softmax(-1).amax(-1, keepdim=True)
        total = scores.amax(-1, keepdim=True) - t.log()  # logsumexp, in a third of the time
        odds = m / (1.0 - m) * (1.0 - t) / t
        odds = odds**SHARPNESS if greedy else CAUTION * odds
        added = torch.logaddexp(known, total + (r * odds).log())
        return scores.scatter(1, ids, added.where(total.isfinite(), known))


class Mixing(LogitsProcessor):
    """Mixes a draft's logits for one position with the target's latest distributions after the tokens before it."""

    reads_prefix_only = True

    def __init__(self, corrections: NgramCorrections, greedy: bool) -> None:
        self.corrections, self.greedy = corrections, greedy

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.corrections.mixed(tuple(input_ids[0, -ORDERS:].tolist()), scores, self.greedy)


def contexts_of(input_ids: Tensor, paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The last `ORDERS` tokens of the sequence `[1, length]` followed by each of the paths; fewer if it is shorter.

    Example: the sequence 4 5 and the paths [], [6] and [6, 7, 8] give (4, 5), (4, 5, 6) and (6, 7, 8)."""
    text = input_ids[0, -ORDERS:].tolist()
    return [(*text, *path)[-ORDERS:] for path in paths]


def _mixture(known: Successors, new: Successors) -> Successors:
    """The likeliest of the stored and of the `new` successors of a context; of equal ones the new."""
    both = {token: (1.0 - DECAY) * p for token, p in new.items()}
    for token, p in known.items():
        both[token] = both.get(token, 0.0) + DECAY * p
    return dict(nlargest(MOST_LIKELY, both.items(), key=itemgetter(1)))


def _bucket(order: int, r: Successors) -> tuple[int, int]:
    """Key of r's accuracy, by length of the known context (`order`) and largest probability of r."""
    return order, min(int(max(r.values()) * BUCKETS), BUCKETS - 1)
