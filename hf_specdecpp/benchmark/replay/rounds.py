"""Tokens per target pass of trees and chains, along texts that the target wrote, with less luck than in generations.

Every round drafts what a generation would draft after the same text. A greedy target's choice is the text, so no
target pass is needed, and the rounds are those of the live generation. For a sampled target each draft is read by the
target, and the coins of the verification are integrated out: a round counts the accepted candidates that are expected
given what was drawn, by both ways to verify. One outcome is drawn, too; it says how much of the text the round takes.
What stands there is the text's, whatever was accepted, so all contestants meet the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import Contestant
from hf_specdecpp.benchmark.replay.record import Text
from hf_specdecpp.benchmark.run_log import RunLog
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.chain import draft_chain, stepper
from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.drafting.stopping import StoppingRule, Threshold
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.generation.tree_drafting import TreeDrafting
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.at_once import block_tests, carried, leftovers
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TorchRandomness, seed_of
from hf_specdecpp.sampling.verification import Verification, chain_ratios
from hf_specdecpp.texts.branches import BranchingText, target_states
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.trees.at_once import ending_chances
from hf_specdecpp.trees.tree import DraftTree, Lineage
from hf_specdecpp.trees.tree_pass import TreePass


@dataclass
class ReplayedRound:
    """What a round drafted, and what is expected to become of it.

    Attributes:
        tree: of candidates; a chain is one of a single branch.
        accepted, by_token: expected number of accepted candidates, by the contestant's verification and token by token.
        judged: of a chain whose rule estimates: the estimate and the chance of acceptance of each candidate that
            verification got to.
    """

    tree: DraftTree
    accepted: float
    by_token: float
    judged: list[tuple[float, float]] = field(default_factory=list)


class Drafting(Protocol):
    """`TreeDrafting` or `ChainDrafting`."""

    def draft(self, input_ids: Tensor, room: int, /) -> DraftTree: ...

    def learn(self, tree: DraftTree, path: list[int]) -> None: ...


class ChainDrafting:
    """Draws the chains of one text.

    Args:
        rule: stops them.
        session: the draft's side.
        processing: the target's logits processors.
        sampled: whether candidates are drawn.
        eos: ids that end a chain.
    """

    def __init__(
        self, rule: StoppingRule, session: Reading, processing: Processing, sampled: bool, eos: frozenset[int]
    ) -> None:
        self.rule, self.session, self.processing, self.eos = rule, session, processing, eos
        self.randomness = TorchRandomness() if sampled else None

    def draft(self, input_ids: Tensor, room: int, /) -> DraftTree:
        step = stepper(self.session, self.processing, input_ids, greedy=self.randomness is None)
        chain = draft_chain(step, self.rule, self.randomness, room, self.eos, self.session.unread)
        chain.tokens[0], chain.passes = int(input_ids[0, -1]), self.session.passes
        return chain

    def learn(self, tree: DraftTree, path: list[int]) -> None:
        self.rule.saw(tree, path)

    @property
    def estimates(self) -> list[float]:
        """Of the last chain's candidates, as the rule took them."""
        if not isinstance(self.rule, Threshold):
            return []
        rates = self.rule.rates
        return [each if rates is None else rates.calibrated(each) for each in self.rule.estimates]


class RoundReplay:
    """Rounds along one text.

    Args:
        text: as the target wrote it under `sampling`.
        seed: of all draws.

    Raises:
        ValueError: target or draft cannot read a tree.
    """

    def __init__(
        self, text: Text, assistant: SpecDecPPAssistant, target: CausalLM, sampling: Sampling, seed: int
    ) -> None:
        self.text, self.assistant, self.sampling, self.seed = text, assistant, sampling, seed
        self.vocab_size = target.config.get_text_config().vocab_size
        self.reader = Reader(target)
        self.branching = None if sampling.greedy else BranchingText(self.reader, text.ids[:-1])
        self.states = target_states(target, assistant.ready_drafter(), text.ids)

    @torch.no_grad()
    def rounds(
        self, speculation: SpeculationConfig, with_head: bool, rates: AcceptanceRates | None = None
    ) -> Iterator[ReplayedRound]:
        """What each round drafts and is expected to be worth; `rates`: what calibrates estimates, and learns."""
        torch.manual_seed(self.seed)
        ids, position, seen = torch.tensor([self.text.ids]), self.text.first, 0
        session = self.assistant.ready_drafter().tree_session(self.vocab_size)
        drafting = self._drafting(speculation, with_head, session, rates)
        while position < len(self.text.ids):
            states = None if self.states is None else self.states[:, max(seen - 1, 0) : position - 1]
            session.begin_round(ids[:, seen:position], 0, states)
            tree = drafting.draft(ids[:, :position], max(self.text.max_length - position - 1, 0))
            session.keep([])
            seen = position
            p = None if self.branching is None else self._p(self.branching, tree, position)
            if p is None:
                path = along(tree, self.text.ids[position:])
                found = ReplayedRound(tree, len(path), len(path))
            else:
                reached = chances(tree, p, speculation.verification)
                path, by_token = draw(tree, reached), sum(chances(tree, p, "token")[1:])
                found = ReplayedRound(tree, sum(reached[1:]), by_token)
            if isinstance(drafting, ChainDrafting) and (estimates := drafting.estimates):
                judged = judged_chances(tree, p, len(path), speculation.verification)
                found.judged = list(zip(estimates, judged, strict=False))
            yield found
            drafting.learn(tree, path)
            position += len(path) + 1

    def _drafting(
        self, speculation: SpeculationConfig, with_head: bool, session: Reading, rates: AcceptanceRates | None
    ) -> Drafting:
        estimator = (self.assistant.head if with_head else None) or DraftProbability()
        processing, greedy = Processing(self.sampling.processors), self.sampling.greedy
        if speculation.tree is None:
            rule = make_rule(speculation, estimator, rates=rates)
            return ChainDrafting(rule, session, processing, not greedy, self.text.eos)
        randomness, by_rank = None if greedy else TorchRandomness(), self.assistant.config.acceptance_by_rank
        trees = TreeDrafting(speculation, estimator, session, processing, randomness, self.text.eos, by_rank)
        trees.rates = rates
        return trees

    def _p(self, branching: BranchingText, tree: DraftTree, position: int) -> Mapping[int, Tensor]:
        """p after every node that has children, the tree's root being the last of `position` tokens."""
        inner = [node for node in tree.depth_first()[1:] if tree.children[node]]
        states = branching.states[position - 1 : position]
        if inner:
            ancestors, depths = Lineage().feed(tree, [0, *inner])
            starts = torch.full((len(inner),), position)
            below, places = ancestors[1:, 1:], position - 1 + depths[1:]
            device = self.reader.device
            tokens = torch.tensor([tree.tokens[node] for node in inner])
            nodes = branching.read(*(tensor.to(device) for tensor in (tokens, starts, below, places)))
            branching.forget(len(inner))
            states = torch.cat((states, nodes))
        p = self.sampling.p(self.reader.logits(states, self.vocab_size))
        return dict(zip((0, *inner), p, strict=True))


def along(tree: DraftTree, following: Sequence[int]) -> list[int]:
    """The nodes of the tree that a greedy text takes."""
    path: list[int] = []
    for token in following:
        node = path[-1] if path else 0
        found = [child for child in tree.children[node] if tree.tokens[child] == token]
        if not found:
            break
        path.append(found[0])
    return path


def chances(tree: DraftTree, p: Mapping[int, Tensor], verification: Verification) -> list[float]:
    """The chance that each node is accepted, the root's being 1.

    Args:
        p: `[vocab]`, the target's distribution after each node that has children.
    """
    if not len(tree):
        return [1.0]
    rows = p[0].new_zeros((len(tree) + 1, len(p[0])))
    rows[list(p)] = torch.stack(list(p.values()))
    reached = ending_chances(TreePass(tree, range(len(rows))), rows, verification).tolist()
    for node in tree.depth_first()[:0:-1]:  # an accepted node's parent is accepted
        reached[tree.parents[node]] += reached[node]
    return reached


def judged_chances(
    chain: DraftTree, p: Mapping[int, Tensor] | None, accepted: int, verification: Verification
) -> list[float]:
    """The chance of each candidate of a chain that verification got to, given those before it, whatever comes later.

    As a block (`docs/verification.md`), i candidates or more stand with chance c_i given their draws; given the next
    draw, too, with chance c_{i+1} + (1 - c_{i+1}) h_i. So candidate i + 1 has c_{i+1} divided by that.

    Example: the ratios p / q of three candidates are 2, 0.5 and 4, of which all were accepted: 1, 0.5 and 1, token by
    token and as a block.

    Args:
        p: `[vocab]` after each node that has children; `None` for a greedy target.
        accepted: how many candidates were.
    """
    if p is None:
        return [1.0] * accepted + [0.0] * (len(chain) > accepted)
    places = range(len(chain))
    p_rows, q_rows = torch.stack([p[node] for node in places]), torch.stack([chain.q(node) for node in places])
    ratios = chain_ratios(chain.candidates, p_rows, q_rows)
    found = ratios.clamp_max(1.0)
    if verification == "block":
        survival = carried(ratios)
        tests = block_tests(survival[:-1], leftovers(survival[:-1], p_rows, q_rows))
        found = (survival[1:] / (survival[1:] + (1.0 - survival[1:]) * tests)).nan_to_num(0.0)
    return found[: accepted + 1].tolist()


def draw(tree: DraftTree, reached: Sequence[float]) -> list[int]:
    """An accepted path, drawn by the chances of its nodes."""
    path: list[int] = []
    node = 0
    while children := tree.children[node]:
        weights = [reached[child] for child in children]
        weights.append(max(reached[node] - sum(weights), 0.0))
        chosen = int(torch.tensor(weights, dtype=torch.float64).multinomial(1))
        if chosen == len(children):
            break
        node = children[chosen]
        path.append(node)
    return path


def replay_rounds(
    config: BenchmarkConfig,
    log: RunLog,
    contestants: Sequence[Contestant],
    target: CausalLM,
    assistant: SpecDecPPAssistant,
    sets: Iterable[tuple[str, Mapping[str, Text], Sampling]],
) -> list[dict[str, Any]]:
    """Counts of every contestant that can be replayed on every text: rows of the log.

    A contestant that calibrates its estimates goes on with what it has learned from text to text and from set to set.

    Args:
        log: what has been counted before; grows. A run that goes on learns anew.
        sets: `replay.runner.text_sets`.
    """
    # `throughput` depends on costs, too.
    replayed = [(c, c.speculation) for c in contestants if c.speculation and c.speculation.rule != "throughput"]
    counted, learned = {_key(row): row for row in log.rows}, dict[tuple[str, float], AcceptanceRates]()
    wanted = []
    for name, texts, sampling in sets:
        for prompt, text in logging.tqdm(texts.items(), desc=f"rounds on {name}", unit="text"):
            seed = seed_of(config.seed, name, prompt, sampling.temperature)
            replay = None
            for each, speculation in replayed:
                row = {"set": name, "prompt": prompt, "temperature": sampling.temperature, "contestant": each.name}
                if (key := _key(row)) not in counted:
                    replay = replay or RoundReplay(text, assistant, target, sampling, seed)
                    rates = None
                    if speculation.adapt:
                        rates = learned.setdefault((each.name, sampling.temperature), AcceptanceRates())
                    counted[key] = log.add(row | _counts(replay.rounds(speculation, each.with_head, rates)))
                wanted.append(counted[key])
    return [row for row in wanted if row["rounds"]]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("set", "prompt", "temperature", "contestant"))


def _counts(rounds: Iterable[ReplayedRound]) -> dict[str, Any]:
    found = list(rounds)
    return {
        "rounds": len(found),
        "drafted": sum(len(each.tree) for each in found),
        "accepted": sum(each.accepted for each in found),
        "by_token": sum(each.by_token for each in found),
        "draft_passes": sum(each.tree.passes for each in found),
        "judged": [[round(value, 5) for value in pair] for each in found for pair in each.judged],
    }
