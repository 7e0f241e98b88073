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

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.features import NUM_SCALARS, scalar_features
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import load_tensors, save_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.randomness import draw_rows
from hf_specdecpp.texts.branches import ROWS_AT_ONCE, BranchingText, draft_chains, target_probabilities, together
from hf_specdecpp.texts.sampling import Sampling

MAX_TOKENS = 20  # candidates a round, the paper's largest


@dataclass
class Text:
    """A text of the target.

    Args:
        ids: prompt and answer.
        prompt_length: tokens of the prompt.
        max_length: where generation would have ended at the latest.
        eos: ids that end a text.
    """

    ids: list[int]
    prompt_length: int
    max_length: int
    eos: frozenset[int] = frozenset()

    @property
    def first(self) -> int:
        """The first place for a candidate: the answer's first token comes from the pass over the prompt."""
        return self.prompt_length + 1


@dataclass
class Candidates:
    """Candidates `[...]` and what is known of each.

    Attributes:
        tokens: int64.
        scalars: `[..., 6]`, `scalar_features`.
        label: chance that the target accepts it if it has accepted those before it, min(1, p/q).
        log_odds: of the head, uncalibrated; zeros without one.
    """

    tokens: Tensor
    scalars: Tensor
    label: Tensor
    log_odds: Tensor


@dataclass
class Record:
    """One text, n places for candidates from `text.first` on.

    Attributes:
        text: the text.
        greedy: whether it is a greedy one.
        accept: `[n]`, chance that the candidate drawn at a place is the text's token, given the text.
        stands: bool `[n]`, whether it is: the coin.
        on_text: `[n]`, the text's tokens as candidates.
        off_text: `[c, k]`, for each place whose candidate does not stand, in order: that candidate, and what the draft
            says after it.
    """

    text: Text
    greedy: bool
    accept: Tensor
    stands: Tensor
    on_text: Candidates
    off_text: Candidates


@torch.no_grad()
def record(
    text: Text, assistant: SpecDecPPAssistant, target: CausalLM, sampling: Sampling, seed: int, length: int = MAX_TOKENS
) -> Record:
    """Record a text with a draft and its target.

    Args:
        text: as the target wrote it under `sampling`.
        seed: of the coins and the draft's draws; another one is another sample of the same distribution.
        length: most candidates in a round of any rule that will be replayed.
    """
    drafter, reader = assistant.ready_drafter(), Reader(target)
    vocab_size = target.config.get_text_config().vocab_size
    generator = torch.Generator(drafter.device).manual_seed(seed)
    places = torch.arange(text.first, len(text.ids), device=drafter.device)
    hidden = BranchingText(drafter, text.ids).states
    target_hidden = BranchingText(reader, text.ids[:-1]).states
    truth = torch.tensor(text.ids, device=drafter.device)
    parts = []
    for rows in places.split(ROWS_AT_ONCE):
        q = sampling.q(drafter.logits(hidden[rows - 1], vocab_size))
        p = sampling.p(reader.logits(target_hidden[(rows - 1).to(reader.device)], vocab_size)).to(q.device)
        parts.append(_at_places(p, q, truth[rows], sampling, generator))
    accept, coins, label, scalars, rejected, rejected_scalars = (torch.cat(part) for part in zip(*parts, strict=True))
    stands = coins < accept

    on_text = Candidates(truth[places], scalars, label, torch.zeros_like(label))
    leaving = places[~stands]
    first = rejected[~stands], rejected_scalars[~stands]
    off_text, off_hidden = _off_text(drafter, text.ids, leaving, first, sampling, length, vocab_size, generator)
    if len(leaving):
        off_text.label = _labels(reader, text.ids, leaving, off_text, sampling, vocab_size)
    if assistant.head is not None:
        before = assistant.head.inputs == "before"
        on_text.log_odds = _log_odds(assistant.head, drafter, on_text, hidden[places - 1 if before else places])
        off_text.log_odds = _log_odds(
            assistant.head, drafter, off_text, off_hidden[:, :-1] if before else off_hidden[:, 1:]
        )
    return Record(text, sampling.greedy, accept, stands, on_text, off_text)


def _at_places(p: Tensor, q: Tensor, x: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, ...]:
    """For rows of p and q `[n, vocab]` where the text says x `[n]`: the chance that the candidate is x, a coin, x's
    label and scalars; a candidate that would be rejected, and its scalars."""
    if sampling.greedy:  # the text is the target's choice, however a pass over all of it rounds
        p = torch.zeros_like(q).scatter_(-1, x[:, None], 1.0)
    drawn_from = sampling.drawn_from(q, q.argmax(-1))
    accept, label, rejected_p = coupling(p, drawn_from, x)
    rejected = q.argmax(-1) if sampling.greedy else draw_rows(rejected_p, generator)
    coins = torch.rand(len(x), generator=generator, device=q.device, dtype=torch.float64)
    greedy = sampling.greedy
    return accept, coins, label, scalar_features(q, x, greedy), rejected, scalar_features(q, rejected, greedy)


def coupling(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the verifier's rule implies once it is known that it emitted x.

    Args:
        p, q: `[n, vocab]`, distributions of the target and of the draft.
        x: `[n]`, what was emitted.

    Returns:
        `[n]`, chance that x was the candidate; `[n]`, chance that the candidate x is accepted; `[n, vocab]`,
        distribution of the candidate if it was another (q itself where no other is possible).
    """
    p_of, q_of = p.gather(-1, x[:, None])[:, 0].double(), q.gather(-1, x[:, None])[:, 0].double()
    accept = torch.where(q_of >= p_of, 1.0, q_of / p_of)
    label = torch.where(p_of >= q_of, 1.0, p_of / q_of)
    left = (q - p).clamp_min(0.0)
    mass = left.sum(-1, keepdim=True)
    return accept, label, torch.where(mass > 0.0, left / mass, q)


def _off_text(
    drafter: Drafter, ids: list[int], places: Tensor, first: tuple[Tensor, Tensor], sampling: Sampling, length: int,
    vocab_size: int, generator: torch.Generator,
) -> tuple[Candidates, Tensor]:  # fmt: skip
    """The chains that leave the text at `places` `[c]` with the candidates `first` (`draft_chains`), and the states
    `[c, length + 1, hidden]` that their candidates came from."""
    drawn_by, drafted = None if sampling.greedy else generator, []
    for group in together(places, drafter.model):
        rows = torch.isin(places, group)
        begin = first[0][rows], first[1][rows]
        drafted.append(draft_chains(drafter, ids, group, length, sampling.q, vocab_size, drawn_by, begin))
    if not drafted:
        none = first[1].new_zeros((0, length))
        empty = Candidates(none.long(), none.new_zeros((0, length, NUM_SCALARS)), none.double(), none)
        return empty, none.new_zeros((0, length + 1, drafter.hidden_size))
    tokens, scalars, states = (
        torch.cat([getattr(chains, name) for chains in drafted]) for name in ("tokens", "scalars", "hidden")
    )
    none = torch.zeros_like(scalars[..., 0])
    return Candidates(tokens, scalars, none.double(), none), states


def _labels(
    reader: Reader, ids: list[int], places: Tensor, chains: Candidates, sampling: Sampling, vocab_size: int
) -> Tensor:
    """min(1, p/q) of candidates out of the text."""
    p = [
        target_probabilities(reader, ids, group, chains.tokens[torch.isin(places, group)], sampling.p, vocab_size)
        for group in together(places, reader.model)
    ]
    q = torch.ones_like(chains.label) if sampling.greedy else chains.scalars[..., 0].double().exp()
    return (torch.cat(p).to(q.device).double() / q).clamp_max(1.0)


def _log_odds(head: AcceptanceHead, drafter: Drafter, candidates: Candidates, hidden: Tensor) -> Tensor:
    if head.inputs == "after":
        return head(hidden)
    return head(hidden, drafter.embed(candidates.tokens), candidates.scalars)


def save(recorded: Record, path: Path) -> None:
    """Write a record, whole or not at all."""
    text = recorded.text
    facts = torch.tensor([text.prompt_length, text.max_length, int(recorded.greedy)])
    tensors = {"ids": torch.tensor(text.ids), "facts": facts, "eos": torch.tensor(sorted(text.eos), dtype=torch.long)}
    tensors |= {"accept": recorded.accept, "stands": recorded.stands}
    for name, candidates in (("on", recorded.on_text), ("off", recorded.off_text)):
        tensors |= {f"{name}.{field}": value for field, value in vars(candidates).items()}
    save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, path)


def load(path: Path) -> Record:
    """Read what `save` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    tensors = load_tensors(path)
    prompt_length, max_length, greedy = tensors["facts"].tolist()
    text = Text(tensors["ids"].tolist(), prompt_length, max_length, frozenset(tensors["eos"].tolist()))
    on, off = (
        Candidates(**{field: tensors[f"{name}.{field}"] for field in ("tokens", "scalars", "label", "log_odds")})
        for name in ("on", "off")
    )
    return Record(text, bool(greedy), tensors["accept"], tensors["stands"], on, off)
