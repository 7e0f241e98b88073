"""Tokens per target pass of trees, along texts that the target wrote, with less luck in them than in generations.

Every round grows the tree that a generation would grow after the same text. A greedy target's choice is the text, so no
target pass is needed, and the rounds are those of the live generation. For a sampled target each tree is read by the
target, and the coins of the verification are integrated out: a round counts the accepted candidates that are expected
given what was drawn. One outcome is drawn, too; it says how much of the text the round takes. What stands there is the
text's, whatever was accepted, so all contestants meet the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import Contestant
from hf_specdecpp.benchmark.replay.record import Text
from hf_specdecpp.benchmark.run_log import RunLog
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.tree_drafting import TreeDrafting
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TorchRandomness, seed_of
from hf_specdecpp.sampling.verification import Verification
from hf_specdecpp.texts.branches import BranchingText
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.trees.at_once import ending_chances
from hf_specdecpp.trees.tree import DraftTree, Lineage


def as_tree(speculation: SpeculationConfig | None) -> SpeculationConfig | None:
    """The tree that a contestant drafts, or its chain of fixed length as one; `None` if its rounds depend on more."""
    if speculation is None or speculation.rule == "throughput":
        return None
    if speculation.tree is None and speculation.rule == "fixed":
        return replace(speculation, tree="static", tree_shape=[1] * speculation.num_tokens)
    return speculation if speculation.tree is not None else None


class TreeReplay:
    """Trees along one text.

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

    @torch.no_grad()
    def rounds(self, speculation: SpeculationConfig, with_head: bool) -> Iterator[tuple[DraftTree, float]]:
        """Of each round: the tree, and how many of its candidates are expected to be accepted."""
        torch.manual_seed(self.seed)
        ids, position = torch.tensor([self.text.ids]), self.text.first
        session = DraftSession(self.assistant.ready_drafter(), self.vocab_size)
        drafting = self._drafting(speculation, with_head, session)
        seen = 0
        while position < len(self.text.ids):
            session.begin_round(ids[:, seen:position], 0)
            tree = drafting.draft(ids[:, :position], max(self.text.max_length - position - 1, 0))
            session.keep([])
            seen = position
            if self.branching is None:
                path = along(tree, self.text.ids[position:])
                expected = float(len(path))
            else:
                reached = chances(tree, self._p(self.branching, tree, position), speculation.verification)
                path, expected = draw(tree, reached), sum(reached[1:])
            yield tree, expected
            drafting.learn(tree, path)
            position += len(path) + 1

    def _drafting(self, speculation: SpeculationConfig, with_head: bool, session: DraftSession) -> TreeDrafting:
        head = self.assistant.head if with_head else None
        return TreeDrafting(
            speculation,
            head or DraftProbability(),
            session,
            Processing(self.sampling.processors),
            None if self.sampling.greedy else TorchRandomness(),
            self.text.eos,
            self.assistant.config.acceptance_by_rank,
        )

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
    reached = ending_chances(tree, rows, verification).tolist()
    for node in tree.depth_first()[:0:-1]:  # an accepted node's parent is accepted
        reached[tree.parents[node]] += reached[node]
    return reached


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


def replay_trees(
    config: BenchmarkConfig,
    log: RunLog,
    contestants: Sequence[Contestant],
    target: CausalLM,
    assistant: SpecDecPPAssistant,
    sets: Iterable[tuple[str, Mapping[str, Text], Sampling]],
) -> list[dict[str, Any]]:
    """Counts of every contestant that drafts trees, or chains of a fixed length, on every text: rows of the log.

    Args:
        log: what has been counted before; grows.
        sets: `replaying.text_sets`.
    """
    trees = [(each, speculation) for each in contestants if (speculation := as_tree(each.speculation)) is not None]
    counted = {_key(row): row for row in log.rows}
    wanted = []
    for name, texts, sampling in sets:
        for prompt, text in logging.tqdm(texts.items(), desc=f"trees on {name}", unit="text"):
            seed = seed_of(config.seed, name, prompt, sampling.temperature)
            replay = None
            for each, speculation in trees:
                row = {"set": name, "prompt": prompt, "temperature": sampling.temperature, "contestant": each.name}
                if (key := _key(row)) not in counted:
                    replay = replay or TreeReplay(text, assistant, target, sampling, seed)
                    counted[key] = log.add(row | _counts(replay, speculation, each.with_head))
                wanted.append(counted[key])
    return [row for row in wanted if row["rounds"]]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("set", "prompt", "temperature", "contestant"))


def _counts(replay: TreeReplay, speculation: SpeculationConfig, with_head: bool) -> dict[str, float]:
    counts = [(1, len(tree), expected, tree.passes) for tree, expected in replay.rounds(speculation, with_head)]
    rounds, drafted, accepted, passes = (sum(field) for field in zip((0, 0, 0, 0), *counts, strict=True))
    return {"rounds": rounds, "drafted": drafted, "accepted": accepted, "draft_passes": passes}
