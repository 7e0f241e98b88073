"""What the target said lately after the same tokens, and a draft's logits mixed with it (`NgramCorrections`).

Each verification says for nothing what the target's distribution is after every token that it read. The likeliest
successors of each token (Token Recycling, arXiv 2408.08696), and of the last two and three tokens, are kept, and the
draft's next q after these has some of their probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.sampling.processors import Processing, Tokens, extend

DECAY = 0.5  # of what was known of a context with each time that the target says what follows it
MOST_LIKELY = 8  # successors that are kept of a context
ORDERS = 3  # tokens of the longest context
PLACES = 65_536  # for contexts of two tokens, and as many for those of three
NO_TOKEN = 2**31  # stands for what is before the first token: no logits belong to it
SPREAD = -7_046_029_254_386_353_131  # the golden ratio of 64 bits, by which keys are spread over places

BUCKETS = 8  # of the largest probability, in each of which is learned how often it comes true
PRIOR = 8.0  # trials, at first, in which r was as good as it said
TRIAL_DECAY = 0.995  # of what is known of a bucket with each trial
MAX_CHANCE = 0.98  # so that something of q always stays
SHARPNESS = 2.0  # of the choice between q and r where only the likeliest token counts
CAUTION = 0.5  # of the choice where all of q counts, of which r has a part


class NgramCorrections:
    """The target's latest successors of each token, of two tokens in a row, and of three.

    A token has a place of its own; contexts of two and of three tokens share `PLACES` each, where the latest stays. A
    place takes 72 bytes: 13 MB together for a vocabulary of 49,152. Tokens that no logits belong to, as a prompt may
    end with, count as one, and so does what is before the first token of a text.

    How far these probabilities are to be trusted is learned, too: for each length of context and each size of the
    largest of them, how likely the target took that token.

    Example: with a decay of 0.5 the target says after the tokens 5 7 first 0.8 for 3 and 0.2 for 4, then 1.0 for 4.
    Kept of 7 and of 5 7 are 0.8 and 0.2, then 0.4 for 3 and 0.6 for 4. After 6 7 the draft is told what is kept of 7.

    Args:
        num_ids: width of the target's logits.
        device: the draft's.
    """

    @torch.inference_mode(False)  # other generations add to it
    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.made_for, self.num_ids = (num_ids, device), num_ids
        places, count = num_ids + 1 + (ORDERS - 1) * PLACES, min(MOST_LIKELY, num_ids)
        self.keys = torch.full((places,), -1, device=device)
        # Always different ones in a row, so that no two of them are written to the same place.
        self.ids = torch.arange(count, dtype=torch.int32, device=device).repeat(places, 1)
        self.probs = torch.zeros(places, count, device=device)
        self._lengths = torch.arange(1, ORDERS + 1, device=device)
        self._layouts = {at: _layout(num_ids, at) for at in (torch.device("cpu"), self.ids.device)}
        expected = ((torch.arange(BUCKETS, device=device) + 0.5) / BUCKETS).repeat(ORDERS + 1)
        self.correct, self.trials = PRIOR * expected, torch.full_like(expected, PRIOR)
        self.odds = _odds(expected)
        self._buckets = torch.arange(len(expected), device=device)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.probs.nbytes + self.keys.nbytes

    @torch.no_grad()
    def record(self, contexts: Tensor, logits: Tensor) -> None:
        """Take note of the target's `logits` `[n, num_ids]`, before processors, after contexts `[n, ORDERS]` on the
        host (`contexts_of`), the oldest first.

        What is no number counts for nothing.
        """
        p, ids = logits.float().softmax(-1).topk(self.ids.shape[1])
        p, ids = p.to(self.probs).nan_to_num(0.0), ids.to(self.ids)
        places, keys = self._places(contexts)
        groups = _disjoint_groups(places.tolist())
        places, keys = places.to(self.ids.device), keys.to(self.ids.device)
        for rows in groups:
            at = slice(None) if len(groups) == 1 else rows
            self._learn(places[at], keys[at], ids[at], p[at])

    def _learn(self, places: Tensor, keys: Tensor, ids: Tensor, p: Tensor) -> None:
        """Add to different places `[n, ORDERS]` what was said there, `[n, k]`, and note before how good r was."""
        is_known = self.keys[places] == keys
        order, r_ids, r = self._known(places, is_known)
        largest, first = r.max(-1)
        chance = (p * (ids == r_ids.gather(1, first[:, None]))).sum(-1)
        met = (_bucket(order, largest)[:, None] == self._buckets).to(p)
        count = met.sum(0)
        decay = TRIAL_DECAY**count
        self.trials.mul_(decay).add_(count)
        self.correct.mul_(decay).add_(chance @ met)
        self.odds.copy_(_odds(self.correct / self.trials))
        ids, p = ids.repeat_interleave(ORDERS, 0), p.repeat_interleave(ORDERS, 0)
        self.keys[places] = keys
        self._add(places.flatten(), is_known.flatten()[:, None], ids, p)

    def _add(self, places: Tensor, is_known: Tensor, ids: Tensor, p: Tensor) -> None:
        """To different places `[m]` successors and their probabilities `[m, k]`, and to what `is_known` `[m, 1]`."""
        old_ids, old = self.ids[places], DECAY * self.probs[places] * is_known
        is_same = old_ids[:, None] == ids[:, :, None]
        p = p * (1.0 - DECAY * is_known) + (old[:, None] * is_same).sum(-1)
        old = old.masked_fill(is_same.any(1), -1.0)  # it is among the others, of which there are enough
        self.probs[places], kept = torch.cat((p, old), dim=1).topk(ids.shape[1])
        self.ids[places] = torch.cat((ids, old_ids), dim=1).gather(1, kept)

    def _places(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Where the last one, two and three tokens of contexts `[n, ORDERS]` are kept, and their keys; as wide both."""
        digits, spread, mask, begin = self._layouts[contexts.device]
        keys = (contexts.clamp_max(self.num_ids)[:, None] * digits).sum(-1)
        return (keys * spread >> 32 & mask) + begin, keys

    def _known(self, places: Tensor, is_known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How long a part of each context is known, `[n]` (0: none), and r after it: ids, probabilities `[n, k]`."""
        order = (is_known * self._lengths).amax(-1)
        # What nothing is known of has the place of its last token, where nothing has a probability yet.
        at = places.gather(1, (order - 1).clamp_min(0)[:, None])[:, 0]
        return order, self.ids[at].long(), self.probs[at]

    def mixed(self, contexts: Tensor, scores: Tensor, greedy: bool) -> Tensor:
        """Logits `[n, vocab]` after contexts `[n, ORDERS]` whose softmax is q with a share of what the target said.

        That of `(1 - w) * q + w * r`, where r are the probabilities that are kept of the longest known part of the
        context. With t the largest of q and m how often the likeliest token of r was right, where r was as sure, the
        odds w / (1 - w) of greedy texts are the square of m / (1 - m) over t / (1 - t): the draft gives way where what
        the target said is the better guess. Those of sampled texts are half of that ratio: there q may be right with
        any of its tokens. Tokens outside the vocabulary of the draft have a share, too, since any may be verified.

        Example: q is [0.6, 0.4, 0], r is [0, 0.5, 0.2], and m is 0.5, so that the ratio is 1 / 1.5. The odds of greedy
        texts are 0.444, so w is 0.308, and q becomes [0.415, 0.431, 0.062] / 0.908. Those of sampled texts are 0.333, w
        is 0.25, and q becomes [0.45, 0.425, 0.05] / 0.925.
        """
        places, keys = self._places(contexts.to(self.ids.device))
        order, ids, r = self._known(places, self.keys[places] == keys)
        odds = self.odds[_bucket(order, r.amax(-1))][:, None]
        # The LM head of a draft that is spread over devices may be on another one than its first layer.
        ids, r, odds = (each.to(scores.device) for each in (ids, r, odds))
        known = scores.gather(1, ids)
        t = scores.softmax(-1).amax(-1, keepdim=True)
        total = scores.amax(-1, keepdim=True) - t.log()  # logsumexp, in a third of the time
        odds = odds * (1.0 - t) / t
        odds = odds**SHARPNESS if greedy else CAUTION * odds
        added = torch.logaddexp(known, total + (r * odds).log())
        return scores.scatter(1, ids, added.where(total.isfinite(), known))


class MixedProcessing(Processing):
    """The processors of a draft whose logits, divided by a temperature, are mixed with the target's successors before
    them: what processors forbid stays forbidden, and what is kept does not depend on how texts are sampled."""

    def __init__(
        self, processing: Processing, corrections: NgramCorrections, greedy: bool, temperature: float = 1.0
    ) -> None:
        super().__init__(processing.processors)
        self.does_nothing = False
        self.corrections, self.greedy, self.temperature = corrections, greedy, temperature

    def one(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        context = input_ids[:, -ORDERS:]  # not `contexts_of`: candidates may lie on a device, which nothing reads here
        if len(candidates):
            context = extend(context, candidates[-ORDERS:])[:, -ORDERS:]
        context = F.pad(context, (ORDERS - context.shape[1], 0), value=NO_TOKEN)
        return super().one(input_ids, candidates, self._mixed(context, scores[None])[0])

    def after_each(self, input_ids: Tensor, paths: Sequence[list[int]], scores: Tensor) -> Tensor:
        return super().after_each(input_ids, paths, self._mixed(contexts_of(input_ids, paths), scores))

    def _mixed(self, contexts: Tensor, scores: Tensor) -> Tensor:
        return self.corrections.mixed(contexts, scores / self.temperature, self.greedy)


def contexts_of(input_ids: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """The last `ORDERS` tokens of a text `[1, length]` with each of n paths after it, `[n, ORDERS]` on the host.

    Example: the text 4 5 and the paths [], [6] and [6, 7, 8] give [`NO_TOKEN`, 4, 5], [4, 5, 6] and [6, 7, 8].
    """
    text = [NO_TOKEN] * ORDERS + input_ids[0, -ORDERS:].tolist()
    return torch.tensor([[*text, *path][-ORDERS:] for path in paths])


def _odds(chance: Tensor) -> Tensor:
    chance = chance.clamp(0.0, MAX_CHANCE)
    return chance / (1.0 - chance)


def _layout(num_ids: int, device: torch.device) -> list[Tensor]:
    """Of contexts of one, two and three tokens: what each token counts in their key `[ORDERS, ORDERS]`; and `[ORDERS]`
    by what keys are spread, bits of which there are places, and the first place.

    A token alone is its own key and place: it is shifted to the left as far as to the right.
    """
    count, longer = num_ids + 1, range(1, ORDERS)
    digits = [[count**back if back <= order else 0 for back in reversed(range(ORDERS))] for order in range(ORDERS)]
    spread = [1 << 32, *(SPREAD for _ in longer)]
    mask = [-1, *(PLACES - 1 for _ in longer)]
    begin = [0, *(count + PLACES * (order - 1) for order in longer)]
    return [torch.tensor(values, device=device) for values in (digits, spread, mask, begin)]


def _bucket(order: Tensor, largest: Tensor) -> Tensor:
    """Where it is learned how far r is to be trusted: by length of the context and largest probability."""
    return order * BUCKETS + (largest * BUCKETS).long().clamp_max(BUCKETS - 1)


def _disjoint_groups(places: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of places in groups, in none of which a place stands twice, and each before its next.

    Example: of the rows [5, 8], [6, 9], [5, 9] and [7, 8] the groups [0, 1] and [2, 3].
    """
    groups: list[list[int]] = []
    seen: dict[int, int] = {}
    for row, own in enumerate(places):
        group = 1 + max(seen.get(place, -1) for place in own)
        seen.update(dict.fromkeys(own, group))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
    return groups
