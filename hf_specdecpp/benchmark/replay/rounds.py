"""Tokens per target pass of trees and chains, along texts that the target wrote, with less luck than in generations.

Every round drafts what a generation would draft there. A greedy target's choice is the text, so the rounds are those
of the live generation. A sampled target reads each draft, and a round counts the accepted candidates that are
expected given what was drawn, by both ways to verify. One outcome is drawn, too, which says how much of the text the
round takes; what stands there is the text's, so all contestants meet the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.loading import Benchmark, RunLog
from hf_specdecpp.benchmark.replay.record import Text
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.sampling.verification import Verification
from hf_specdecpp.texts.branches import BranchingText, target_states
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.trees.tree import DraftTree, Lineage
from hf_specdecpp.trees.verification import child_tests, verify_tree_greedy


class ReplayedRound(NamedTuple):
    """What a round drafted, and how many candidates are expected to stand: by its verification, and token by token."""

    tree: DraftTree
    accepted: float
    by_token: float


class Rereading:
    """The draft's side of a text whose candidates never stand: the text may have other tokens at their places."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None) -> None:  # noqa: ARG002
        self.session.begin_round(new_tokens, 0, states)

    def keep(self, path: list[int]) -> None:  # noqa: ARG002
        self.session.keep([])


class RoundReplay:
    """Rounds along a text that the target wrote under `sampling`; `ValueError` where a model cannot read a tree."""

    def __init__(
        self, text: Text, assistant: SpecDecPPAssistant, target: CausalLM, sampling: Sampling, seed: int
    ) -> None:
        self.text, self.assistant, self.target = text, assistant, target
        self.sampling, self.seed = sampling, seed
        self.vocab_size = target.config.get_text_config().vocab_size

    @cached_property
    def branching(self) -> BranchingText | None:
        """What the target reads to judge drafts; a greedy one's choice is the text."""
        return None if self.sampling.greedy else BranchingText(Reader(self.target), self.text.ids[:-1])

    @cached_property
    def states(self) -> Tensor | None:
        """What the draft reads of the target along the text."""
        return target_states(self.target, self.assistant.ready_drafter(), self.text.ids)

    @torch.no_grad()
    def rounds(self, setup: DraftSetup) -> Iterator[ReplayedRound]:
        """What each round drafts with a setup, and is expected to be worth; its memory learns."""
        torch.manual_seed(self.seed)
        ids, position, seen = torch.tensor([self.text.ids]), self.text.first, 0
        generator = self._generator(setup)
        while position < len(self.text.ids):
            states = None if self.states is None else self.states[:, max(seen - 1, 0) : position - 1]
            tree = generator.propose(ids[:, :position], states=states)
            if self.branching is None:
                following = [*self.text.ids[position:], -1]
                path, _ = verify_tree_greedy(tree, lambda node: following[tree.depths[node]])  # noqa: B023
                yield ReplayedRound(tree, len(path), len(path))
            else:
                p = self._p(self.branching, tree, position)
                ends = ends_at(tree, p, setup.decisions.verification)
                path = tree.nodes_to(int(ends.multinomial(1)))
                depths = torch.tensor(tree.depths, dtype=ends.dtype)
                yield ReplayedRound(tree, float(ends @ depths), float(ends_at(tree, p, "token") @ depths))
            generator.saw(tree, path, position)
            seen, position = position, position + len(path) + 1

    def _generator(self, setup: DraftSetup) -> SpecDecPPCandidateGenerator:
        how = {} if self.sampling.greedy else {"do_sample": True, "temperature": self.sampling.temperature}
        config = GenerationConfig(max_length=self.text.max_length, eos_token_id=sorted(self.text.eos) or None, **how)
        found = SpecDecPPCandidateGenerator(setup, config, self.sampling.processors, target=self.target)
        session: Any = Rereading(found.session)
        found.session = session
        if found.trees is not None:
            found.trees.session = session
        return found

    def _p(self, branching: BranchingText, tree: DraftTree, position: int) -> Tensor:
        """`[nodes, vocab]`, p after every node that has children, below the last of `position` tokens; else zeros."""
        inner = [node for node in tree.depth_first()[1:] if tree.children[node]]
        states = branching.states[position - 1 : position]
        if inner:
            ancestors, depths = Lineage().feed(tree, [0, *inner])
            starts = torch.full((len(inner),), position)
            below, places = ancestors[1:, 1:], position - 1 + depths[1:]
            tokens = torch.tensor([tree.tokens[node] for node in inner])
            nodes = branching.read(*(each.to(branching.reader.device) for each in (tokens, starts, below, places)))
            branching.forget(len(inner))
            states = torch.cat((states, nodes))
        p = self.sampling.p(branching.reader.logits(states, self.vocab_size))
        rows = p.new_zeros((len(tree) + 1, p.shape[-1]))
        rows[[0, *inner]] = p
        return rows


def ends_at(tree: DraftTree, p: Tensor, verification: Verification) -> Tensor:
    """`[nodes]`, the chance that each node is the last that is accepted; `p`: `[nodes, vocab]`."""
    return ending_chances(tree, p.cpu(), verification)


def ending_chances(tree: DraftTree, p: Tensor, verification: Verification) -> Tensor:
    """`[nodes]` float64, the chance that each node is the last accepted one; `p` `[nodes, vocab]` on the host.

    For p = [0.5, 0.3, 0.2] at the root and its child 1 from q = [0.2, 0.6, 0.2]: [0.5, 0.5].
    """
    one = torch.ones((), dtype=p.dtype)
    owed, ends, order, is_block = [one] * len(p), [1.0] * len(p), [], verification == "block"
    for node, children in enumerate(tree.children):  # parents come first
        if not children:
            continue
        *chances, (own, _) = child_tests(tree, node, p[node], owed[node] if is_block else one)
        owed[node] = own
        for child, (chance, _) in zip(children, chances, strict=True):
            owed[child] = chance
            ends[child] = ends[node] * float(owed[child])  # token by token
            ends[node] -= ends[child]
    if is_block:  # nodes are tested after all nodes below them, and what is below first children first
        left, stack = 1.0, [0]
        while stack:
            order.append(stack.pop())
            stack += tree.children[order[-1]]
        for node in reversed(order):
            ends[node] = left * float(owed[node])
            left -= ends[node]
    return torch.tensor(ends, dtype=torch.float64)


def replay_rounds(
    benchmark: Benchmark, log: RunLog, sets: Iterable[tuple[str, Mapping[str, Text], Sampling]]
) -> list[dict[str, Any]]:
    """Counts of every contestant that can be replayed on every text, rows of the log; estimates learn on the way."""
    wanted = []
    for each in benchmark.contestants:
        each.memory.clear()
    for name, texts, sampling in sets:
        for prompt, text in logging.tqdm(texts.items(), desc=f"rounds on {name}", unit="text"):
            seed = seed_of(benchmark.config.seed, name, prompt, sampling.temperature)
            replay = RoundReplay(text, benchmark.assistant, benchmark.target, sampling, seed)
            for each in benchmark.contestants:
                # `throughput` depends on costs, too.
                if each.speculation is None or each.speculation.rule == "throughput":
                    continue
                where = {
                    "set": name, "prompt": prompt, "temperature": sampling.temperature, "contestant": each.name
                }  # fmt: skip
                with each.arguments(benchmark.assistant, benchmark.target):
                    wanted.append(log.once(where, partial(_counts, replay, benchmark.assistant)))
    return [row for row in wanted if row["rounds"]]


def _counts(replay: RoundReplay, assistant: SpecDecPPAssistant) -> dict[str, Any]:
    """Sums over the rounds that the assistant drafts as it is set up now."""
    counts = [
        (1, len(tree), accepted, by_token, tree.passes) for tree, accepted, by_token in replay.rounds(assistant.setup())
    ]
    names = ("rounds", "drafted", "accepted", "by_token", "draft_passes")
    return dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True)) if counts else {"rounds": 0}
