"""Tokens per target pass of trees and chains, along texts that the target wrote, with less luck than in generations.

    python examples/replay/rounds.py --target org/model --assistant org/assistant --data chat.jsonl \\
        --contestants 'fixed 3,dyspec 16 (head)' --output replay/rounds

Every round drafts what a generation would draft there. A greedy target's choice is the text, so the rounds are those
of the live generation. A sampled target reads each draft, and a round counts the accepted candidates that are
expected given what was drawn, by both ways to verify. One outcome is drawn, too, which says how much of the text the
round takes; what stands there is the text's, so all contestants meet the same text. Contestants have the names that
they have in `specdecpp bench`; the rule `throughput`, which depends on costs, is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from texts import Text, TextSet, load, once, options, text_sets, write
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.benchmark.loading import Benchmark, RunLog
from hf_specdecpp.benchmark.report import markdown_table, mode, ratio
from hf_specdecpp.benchmark.summary import grouped
from hf_specdecpp.figures import ratio_of_sums
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.chains import BranchingText, target_states
from hf_specdecpp.trees.tree import DraftTree, Lineage
from hf_specdecpp.trees.verification import verify_tree_greedy

STEPS = (0.05, 0.19)  # prices of a draft pass, in target passes, that contestants are compared at
Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    arguments = options(__doc__).parse_args(words)
    benchmark = load(arguments)
    log = RunLog(benchmark.config.output, benchmark.settings, "rounds.jsonl")
    rows = replay_rounds(benchmark, log, text_sets(benchmark, arguments.rollouts))
    write(benchmark, {"round_replays": rows}, ["## Rounds, replayed", round_table(rows)])


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

    def __init__(self, text: Text, assistant: SpecDecPPAssistant, target: Any, sampling: Sampling, seed: int) -> None:
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
    def rounds(self, setup: Any) -> Iterator[ReplayedRound]:
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

    def _generator(self, setup: Any) -> SpecDecPPCandidateGenerator:
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
            branching.cache.crop(-len(inner))
            states = torch.cat((states, nodes))
        p = self.sampling.p(branching.reader.logits(states, self.vocab_size))
        rows = p.new_zeros((len(tree) + 1, p.shape[-1]))
        rows[[0, *inner]] = p
        return rows


def ends_at(tree: DraftTree, p: Tensor, verification: str) -> Tensor:
    """`[nodes]` float64, the chance that each node is the last that is accepted, as `verify_tree_block` accepts
    (`"block"`) or `verify_tree` (`"token"`); `p`: `[nodes, vocab]`, the target's distribution after each node.

    For p = [0.5, 0.3, 0.2] at the root and its child 1 from q = [0.2, 0.6, 0.2]: [0.5, 0.5].
    """
    ends, untested = torch.zeros(len(p), dtype=torch.float64), 1.0

    def visit(node: int, owed: float) -> None:
        """`owed`: in a block, the chance with which the node or one below has to be accepted; else, that of getting
        there."""
        nonlocal untested
        block = verification == "block"
        left = p[node].double().cpu() * (owed if block else 1.0)
        q = tree.q(node).double().cpu() if tree.children[node] else left
        for child in tree.children[node]:
            token = tree.tokens[child]
            accept = min(1.0, float(left[token] / q[token])) if left[token] > 0.0 else 0.0
            visit(child, accept if block else owed * accept)
            left = (left - q).clamp_min(0.0)
            total = float(left.sum()) + (1.0 - owed if block else 0.0)
            owed = (float(left.sum()) / total if total else owed) if block else owed * (1.0 - accept)
            left = left / total if total else left
            q = q.index_fill(0, torch.tensor(token), 0.0)
            q = q / q.sum()
        ends[node] = owed * untested if block else owed
        untested *= 1.0 - owed

    visit(0, 1.0)
    return ends


def replay_rounds(benchmark: Benchmark, log: RunLog, sets: Iterable[TextSet]) -> list[Row]:
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
                    wanted.append(once(log, where, partial(_counts, replay, benchmark.assistant)))
    return [row for row in wanted if row["rounds"]]


def _counts(replay: RoundReplay, assistant: SpecDecPPAssistant) -> Row:
    """Sums over the rounds that the assistant drafts as it is set up now."""
    counts = [
        (1, len(tree), accepted, by_token, tree.passes) for tree, accepted, by_token in replay.rounds(assistant.setup())
    ]
    names = ("rounds", "drafted", "accepted", "by_token", "draft_passes")
    return dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True)) if counts else {"rounds": 0}


def round_table(rows: Sequence[Row]) -> str:
    """Replayed rounds by set and of all sets, contestant by contestant; `rows` are `replay_rounds`'."""
    header = ("set", "decoding", "contestant", "tokens/pass (95 %)", "token by token", "lead of the block (95 %)",
              *(f"x plain, step {price:g}" for price in STEPS), "candidates/round", "draft passes/round",
              "texts")  # fmt: skip
    lines = []
    for (name, temperature, contestant), group in grouped(rows).items():
        rounds, drafted, passes, accepted, by_token = (
            [row[field] for row in group] for field in ("rounds", "drafted", "draft_passes", "accepted", "by_token")
        )
        tokens, tokens_by_token = ([a + b for a, b in zip(rounds, each, strict=True)] for each in (accepted, by_token))
        mean, lead = ratio_of_sums(tokens, rounds), ratio_of_sums(tokens, tokens_by_token)
        a_round = sum(rounds)
        speeds = (f"{mean[0] / (1.0 + price * sum(passes) / a_round):.3f}" for price in STEPS)
        gain, low, high = (f"{each - 1.0:+.1%}" for each in lead)
        said = "" if temperature == 0.0 else f"{gain} ({low} to {high})"
        lines.append((name, mode(temperature), contestant, ratio(mean), f"{sum(tokens_by_token) / a_round:.2f}", said,
                      *speeds, f"{sum(drafted) / a_round:.1f}", f"{sum(passes) / a_round:.1f}",
                      len(group)))  # fmt: skip
    return markdown_table(header, sorted(lines))


if __name__ == "__main__":
    main()
