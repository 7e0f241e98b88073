"""Everything that a chain rule could see along a text that the target wrote, recorded once.

What does speculative decoding with `verification="token"` do, given the text X that comes out? (Block verification
accepts more, but not independently of every other place.) Take a place of the text where a candidate is drawn
from q while the target's distribution is p. The verifier accepts a candidate y with probability min(1, p(y)/q(y)),
otherwise it emits a token of norm((p - q)+) instead. So, for tokens x and y:

    P(candidate x, accepted, x emitted) = min(p(x), q(x))
    P(candidate y, rejected, x emitted) = (q(y) - p(y))+ (p(x) - q(x))+ / sum (p - q)+

What is emitted is distributed as p. Hence, given that it was X's token x (Bayes):

    with probability min(1, q(x)/p(x))    the candidate was x, and was accepted;
    otherwise                             it was a token of norm((q - p)+), and was rejected,

whatever x was, and independently of every other place. After a rejected candidate the draft goes on from it, out of the
text, with plain draws from q, which the rule sees and the target never judges. Where a rule stops, the target's own
token follows, distributed as p whatever happened before.

A generation draws at most one candidate at each place while it still follows the text (the next round begins behind
the place of a rejection). So one coin and, where it says "rejected", one chain out of the text for each place decide
the whole generation under any rule: `replay` is an exact sample of what the rule does, conditional on the text, and
rules that are compared on one record share their luck. In greedy decoding p and q are point masses, the same formulas
hold, and nothing is left to chance.
"""

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from texts import Text
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.randomness import draw_rows, uniform
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import chains as branches

MAX_TOKENS = 20  # candidates a round, the paper's largest
NODES_AT_ONCE = 1024  # candidates in one target pass
# What is known of a candidate: its id, q of it, the entropy of q in nats, the chance that the target accepts it if it
# has accepted those before it, min(1, p/q), and the head's log-odds, uncalibrated (0 without one).
KNOWN = ("token", "q_of_token", "entropy", "label", "log_odds")


@dataclass
class Leaving:
    """Draws the candidates of chains, but for the first of each, which are known: tokens and scalars."""

    drawing: branches.Drawing
    first: tuple[Tensor, Tensor] | None

    def candidates(self, drafter: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        known, self.first = self.first, None
        return self.drawing.candidates(drafter, states) if known is None else known


class Record(TypedDict):
    """One text, n places for candidates from `text.first` on. Candidates are rows of numbers, as `KNOWN` lists them.

    Attributes:
        stands: `[n]`, whether the candidate drawn at a place is the text's token: the coin.
        on_text: `[n, 5]`, the text's tokens as candidates.
        off_text: `[c, k, 5]`, each candidate that does not stand, in order, and what the draft says after it.
    """

    stands: list[bool]
    on_text: list[list[float]]
    off_text: list[list[list[float]]]


@torch.no_grad()
def record(
    text: Text, assistant: SpecDecPPAssistant, target: Any, sampling: Sampling, seed: int, length: int = MAX_TOKENS
) -> Record:
    """Record a text, as the target wrote it under `sampling`, for rules with rounds of up to `length` candidates.

    Another `seed` of the coins and the draft's draws is another sample of the same distribution.
    """
    drafter, reader, head = assistant.ready_drafter(), Reader(target), assistant.head
    vocab_size = target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    before = head is not None and head.inputs == "before"

    def known(tokens: Tensor, scalars: Tensor, label: Tensor, hidden: Tensor) -> Tensor:
        """`hidden`: the states before the candidates for a head that judges "before", else those at them."""
        log_odds = torch.zeros_like(label)
        if head is not None:
            log_odds = head(hidden, drafter.embed(tokens), scalars) if before else head(hidden)
        return known_of(tokens, scalars, label, log_odds)

    places = torch.arange(text.first, len(text.ids), device=drafter.device)
    truth = torch.tensor(text.ids, device=drafter.device)[places]
    hidden = branches.BranchingText(drafter, text.ids).states
    target_hidden = branches.BranchingText(reader, text.ids[:-1]).states
    parts = []
    for rows, x in zip(places.split(branches.ROWS_AT_ONCE), truth.split(branches.ROWS_AT_ONCE), strict=True):
        q = sampling.q(drafter.logits(hidden[rows - 1], vocab_size))
        p = sampling.p(reader.logits(target_hidden[(rows - 1).to(reader.device)], vocab_size)).to(q.device)
        parts.append(_at_places(p, q, x, sampling, generator))
    stands, label, scalars, rejected, rejected_scalars = (torch.cat(part) for part in zip(*parts, strict=True))
    on_text = known(truth, scalars, label, hidden[places - int(before)])

    drawing = branches.Drawing(sampling.q, vocab_size, None if sampling.greedy else generator)
    off_text: list[list[list[float]]] = []
    leaving = places[~stands]
    groups = branches.together(leaving, drafter.model, reader.model) if len(leaving) else ()
    for group in (part for each in groups for part in each.split(max(NODES_AT_ONCE // length, 1))):
        here = torch.isin(places, group)
        own: Any = Leaving(drawing, (rejected[here], rejected_scalars[here]))
        chains = branches.draft_chains(drafter, text.ids, None, group, length, own)
        label = branches.target_probabilities(reader, text.ids, group, chains.tokens, sampling.p, vocab_size)
        label = label.to(q.device)
        if not sampling.greedy:
            label = (label / chains.scalars[..., 0].exp()).clamp_max(1.0)
        states = chains.hidden[:, :-1] if before else chains.hidden[:, 1:]
        off_text += known(chains.tokens, chains.scalars, label, states).tolist()
    return {"stands": stands.tolist(), "on_text": on_text.tolist(), "off_text": off_text}


def known_of(tokens: Tensor, scalars: Tensor, label: Tensor, log_odds: Tensor) -> Tensor:
    """`[..., 5]`, `KNOWN` of candidates `[...]` with `scalar_features` `[..., 6]`."""
    columns = (tokens, scalars[..., 0], scalars[..., 1], label, log_odds)
    known = torch.stack([column.double() for column in columns], dim=-1)
    known[..., 1].exp_()
    return known


def _at_places(p: Tensor, q: Tensor, x: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Whether the candidate at a place is the text's x, x's label and scalars; a rejected candidate and its own."""
    if sampling.greedy:  # the text is the target's choice, however a pass over all of it rounds
        p = torch.zeros_like(q).scatter_(-1, x[:, None], 1.0)
    drawn_from = sampling.drawn_from(q, q.argmax(-1))
    accept, label, rejected_p = coupling(p, drawn_from, x)
    rejected = q.argmax(-1) if sampling.greedy else draw_rows(rejected_p, generator)
    coins = uniform((len(x),), generator, q.device)
    scalars, rejected_scalars = (scalar_features(q, token, sampling.greedy) for token in (x, rejected))
    return coins < accept, label, scalars, rejected, rejected_scalars


def coupling(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the verifier's rule implies once it is known that it emitted x.

    Args:
        p, q: `[n, vocab]`, distributions of the target and of the draft.
        x: `[n]`, what was emitted.

    Returns:
        `[n]`, chance that x was the candidate; `[n]`, chance that the candidate x is accepted; `[n, vocab]`,
        distribution of the candidate if it was another (q itself where no other is possible).
    """
    p_of, q_of = (probs.gather(-1, x[:, None])[:, 0].double() for probs in (p, q))
    accept = torch.where(q_of >= p_of, 1.0, q_of / p_of)
    label = torch.where(p_of >= q_of, 1.0, p_of / q_of)
    left = (q - p).clamp_min(0.0)
    mass = left.sum(-1, keepdim=True)
    return accept, label, torch.where(mass > 0.0, left / mass, q)
