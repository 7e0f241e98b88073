"""Mixes the draft's logits with the target's latest distributions after the same tokens (`NgramCorrections`).

Each target pass gives the target's distribution after all of its tokens at no cost. Its likeliest successors are stored
by the last token (Token Recycling, arXiv 2408.08696), by the last two, and by the last three. When such a context comes
again, q is mixed with the stored probabilities, r."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.sampling.processors import Processing, Tokens, extend

DECAY = 0.5  # weight of the stored probabilities of a context; new ones have the rest
MOST_LIKELY = 8  # stored successors of a context
ORDERS = 3  # tokens in the longest context
PLACES = 65_536  # table entries for contexts of two tokens, and as many for three; a power of two
NO_TOKEN = 2**31  # id of places before the first token
SPREAD = -7_046_029_254_386_353_131  # hash multiplier: 2**64 divided by the golden ratio, as a signed integer

BUCKETS = 8  # intervals of the largest probability of r, for each of which r's accuracy is measured
PRIOR = 8.0  # initial trials per bucket, in which r was as accurate as its probabilities
TRIAL_DECAY = 0.995  # weight of a bucket's earlier trials, per trial
MAX_CHANCE = 0.98  # largest accuracy, so that q always keeps some weight
SHARPNESS = 2.0  # exponent of the odds of r in greedy generation
CAUTION = 0.5  # factor of the odds of r in sampled generation


class NgramCorrections:
    """A table of the target's latest distributions after one, two and three tokens.

    Each token has an entry. Contexts of two tokens are hashed to `PLACES` entries, and so are those of three; a new
    context replaces an older one. An entry takes 72 bytes: 13 MB for a vocabulary of 49,152. All ids that the target
    has no logits for count as one token, as do places before the start of a sequence.

    For each length of context and each interval of the largest stored probability, the accuracy is measured: the
    target's mean probability for the likeliest stored token when the context came again.

    Example: with a decay of 0.5 the target's distribution after the tokens 5 7 is first 0.8 for 3 and 0.2 for 4, then
    1.0 for 4. The entries of 7 and of 5 7 are 0.8 and 0.2, then 0.4 for 3 and 0.6 for 4. After 6 7 the entry of 7 is
    used.

    Args:
        num_ids: width of the target's logits.
        device: the draft's device.
    """

    @torch.inference_mode(False)  # other generations update the tensors
    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.made_for, self.num_ids = (num_ids, device), num_ids
        places, count = num_ids + 1 + (ORDERS - 1) * PLACES, min(MOST_LIKELY, num_ids)
        self.keys = torch.full((places,), -1, device=device)
        # The ids of an entry always differ, because `mixed` writes a logit for each.
        self.ids = torch.arange(count, dtype=torch.int32, device=device).repeat(places, 1)
        self.probs = torch.zeros(places, count, dtype=torch.float32, device=device)
        self._lengths = torch.arange(1, ORDERS + 1, device=device)
        self._powers = (num_ids + 1) ** torch.arange(ORDERS, device=device)
        self._begins = num_ids + 1 + PLACES * torch.arange(ORDERS - 1, device=device)  # of longer contexts' entries
        expected = ((torch.arange(BUCKETS, dtype=torch.float32, device=device) + 0.5) / BUCKETS).repeat(ORDERS + 1)
        self.correct, self.trials = PRIOR * expected, torch.full_like(expected, PRIOR)
        self.odds = _odds(expected)
        self._buckets = torch.arange(len(expected), device=device)

    @torch.no_grad()
    def record(self, contexts: Tensor, logits: Tensor) -> None:
        """Record the target's `logits` `[n, num_ids]`, before processors. Row i follows the tokens in row i of
        `contexts` `[n, ORDERS]` (`contexts_of`); later rows are newer. NaN counts as probability 0."""
        p, ids = logits.float().softmax(-1).topk(self.ids.shape[1])
        p, ids = p.to(self.probs).nan_to_num(0.0), ids.to(self.ids)
        places, keys = self._places(contexts)
        for rows in _disjoint_groups(places.tolist()):
            self._learn(places[rows], keys[rows], ids[rows], p[rows])

    def _learn(self, places: Tensor, keys: Tensor, ids: Tensor, p: Tensor) -> None:
        """Measure the accuracy of r, then update the entries at `places` `[n, ORDERS]`, which must differ. `keys`: `[n,
        ORDERS]`, of the contexts; `ids`, `p`: `[n, k]`, the likeliest successors and their probabilities."""
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
        """Mix successors `ids` and probabilities `p` `[m, k]` into the entries at different `places` `[m]`, or replace
        the entry if its context is another (`is_known` `[m, 1]`)."""
        old_ids, old = self.ids[places], DECAY * self.probs[places] * is_known
        is_same = old_ids[:, None] == ids[:, :, None]
        p = p * (1.0 - DECAY * is_known) + (old[:, None] * is_same).sum(-1)
        old = old.masked_fill(is_same.any(1), -1.0)  # already counted in p; k others remain
        self.probs[places], kept = torch.cat((p, old), dim=1).topk(ids.shape[1])
        self.ids[places] = torch.cat((ids, old_ids), dim=1).gather(1, kept)

    def _places(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Indices `[n, ORDERS]` of the entries for the last one, two and three tokens of contexts `[n, ORDERS]`, and
        the keys `[n, ORDERS]` that identify these tokens. A single token is its own key and index."""
        latest_first = contexts.to(self.ids.device).clamp_max(self.num_ids).flip(-1)
        keys = (latest_first * self._powers).cumsum(-1)
        hashed = (keys[:, 1:] * SPREAD >> 32 & PLACES - 1) + self._begins
        return torch.cat((keys[:, :1], hashed), dim=-1), keys

    def _known(self, places: Tensor, is_known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the length `[n]` of contexts' longest known parts (0: none), and r after these: ids and probabilities
        `[n, k]`. Given `_places` of the contexts, and whether these entries are theirs, `[n, ORDERS]`."""
        order = (is_known * self._lengths).amax(-1)
        # A context without a known part uses the entry of its last token, whose probabilities are all 0.
        at = places.gather(1, (order - 1).clamp_min(0)[:, None])[:, 0]
        return order, self.ids[at].long(), self.probs[at]

    def mixed(self, contexts: Tensor, scores: Tensor, greedy: bool) -> Tensor:
        """Return logits `[n, vocab]` after contexts `[n, ORDERS]`, with softmax proportional to `(1 - w) * q + w * r`.

        q is the softmax of `scores` `[n, vocab]`, and r the stored probabilities of the longest known part of the
        context; without one, q is unchanged. Let t be the largest probability of q, and m the measured accuracy of r's
        likeliest token. With the ratio m / (1 - m) over t / (1 - t), the odds w / (1 - w) are its square in greedy
        generation, where only the likeliest token counts, and half of it in sampled generation. Tokens outside the
        draft's vocabulary may get probability from r.

        Example: q is [0.6, 0.4, 0], r is [0, 0.5, 0.2], and m is 0.5, so the ratio is 1 / 1.5. In greedy generation the
        odds are 0.444, so w is 0.308, and q becomes [0.415, 0.431, 0.062] / 0.908. In sampled generation the odds are
        0.333, so w is 0.25, and q becomes [0.45, 0.425, 0.05] / 0.925."""
        places, keys = self._places(contexts)
        order, ids, r = self._known(places, self.keys[places] == keys)
        odds = self.odds[_bucket(order, r.amax(-1))][:, None]
        # If a draft is spread over devices, its LM head may be on another device than its first layer.
        ids, r, odds = (each.to(scores.device) for each in (ids, r, odds))
        known = scores.gather(1, ids)
        t = scores.softmax(-1).amax(-1, keepdim=True)
        total = scores.amax(-1, keepdim=True) - t.log()  # logsumexp, in a third of the time
        odds = odds * (1.0 - t) / t
        odds = odds**SHARPNESS if greedy else CAUTION * odds
        added = torch.logaddexp(known, total + (r * odds).log())
        return scores.scatter(1, ids, added.where(total.isfinite(), known))


class MixedProcessing(Processing):
    """A draft's logits processors, called after the logits were divided by a temperature and mixed with the target's
    latest distributions. Tokens that processors exclude stay excluded."""

    def __init__(
        self, processing: Processing, corrections: NgramCorrections, greedy: bool, temperature: float = 1.0
    ) -> None:
        super().__init__(processing.processors)
        self.does_nothing = False
        self.corrections, self.greedy, self.temperature = corrections, greedy, temperature

    def one(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        context = input_ids[:, -ORDERS:]  # not `contexts_of`, which would read candidates from the device
        if len(candidates):
            context = extend(context, candidates[-ORDERS:])[:, -ORDERS:]
        context = F.pad(context, (ORDERS - context.shape[1], 0), value=NO_TOKEN)
        return super().one(input_ids, candidates, self._mixed(context, scores[None])[0])

    def after_each(self, input_ids: Tensor, paths: Sequence[list[int]], scores: Tensor) -> Tensor:
        return super().after_each(input_ids, paths, self._mixed(contexts_of(input_ids, paths), scores))

    def _mixed(self, contexts: Tensor, scores: Tensor) -> Tensor:
        return self.corrections.mixed(contexts, scores / self.temperature, self.greedy)


def contexts_of(input_ids: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Last `ORDERS` tokens of the sequence `[1, length]` followed by each of n paths: `[n, ORDERS]` on the host.

    Example: the sequence 4 5 and the paths [], [6] and [6, 7, 8] give [`NO_TOKEN`, 4, 5], [4, 5, 6] and [6, 7, 8]."""
    text = [NO_TOKEN] * ORDERS + input_ids[0, -ORDERS:].tolist()
    return torch.tensor([[*text, *path][-ORDERS:] for path in paths], device="cpu")


def _odds(chance: Tensor) -> Tensor:
    chance = chance.clamp(0.0, MAX_CHANCE)
    return chance / (1.0 - chance)


def _bucket(order: Tensor, largest: Tensor) -> Tensor:
    """Index of r's accuracy, by length of the known context (`order`) and largest probability of r."""
    return order * BUCKETS + (largest * BUCKETS).long().clamp_max(BUCKETS - 1)


def _disjoint_groups(places: Sequence[Sequence[int]]) -> list[list[int]]:
    """Split rows of places into groups in which no place occurs twice. Rows with a common place keep their order.

    Example: the rows [5, 8], [6, 9], [5, 9] and [7, 8] are split into the groups [0, 1] and [2, 3]."""
    groups: list[list[int]] = []
    seen: dict[int, int] = {}
    for row, own in enumerate(places):
        group = 1 + max(seen.get(place, -1) for place in own)
        seen.update(dict.fromkeys(own, group))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
    return groups
