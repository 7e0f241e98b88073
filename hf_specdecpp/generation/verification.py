"""Verification of a round, one route for chains and trees: which candidates stand, and the token after them.

The tests are pure functions in `sampling.verification` (chains) and `trees.verification` (trees), with a version for
devices beside each. Here it is decided which of them is asked, and when the logits processors are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hf_specdecpp.sampling.at_once import verify_sampled
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TreeRandomness, waits_for_reads
from hf_specdecpp.sampling.verification import Verification, likeliest_tokens, verify_greedy
from hf_specdecpp.trees.at_once import verify_tree_at_once
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.tree_pass import TreePass
from hf_specdecpp.trees.verification import follow_tree, verify_tree, verify_tree_block, verify_tree_greedy


@dataclass
class Verdict:
    """What the target says of a round.

    Example: the chain 7 8 9 was read, 7 and 8 stand, and 4 follows: `path` is [1, 2], `emitted` [7, 8, 4].

    Attributes:
        path: the accepted nodes.
        emitted: their k - 1 tokens, and the token after them.
        scores, raw: `[k, vocab]` or more rows, logits that the emitted tokens were chosen from, with and without
            processing. `raw` is `scores` where nobody asked for it.
        waited: seconds that reading from the device took, which has the target's pass to finish first.
    """

    path: list[int]
    emitted: list[int]
    scores: Tensor
    raw: Tensor
    waited: float = 0.0


class Verifier:
    """Verifies the rounds of one text.

    Args:
        processing: the target's logits processors, which make p of its logits.
        randomness: of sampled texts; `None` takes the likeliest tokens.
        verification: of sampled texts.
        eos: token ids that end the text.
        keeps_raw: whether logits before processing are asked for.
    """

    def __init__(
        self,
        processing: Processing,
        randomness: TreeRandomness | None,
        verification: Verification,
        eos: Collection[int],
        keeps_raw: bool,
    ) -> None:
        self.processing, self.randomness, self.verification = processing, randomness, verification
        self.eos, self.keeps_raw = eos, keeps_raw

    def tests_families(self, device: torch.device) -> bool:
        """Whether sampled trees are verified on the device, by lists of families that it has to be given."""
        return self.randomness is not None and waits_for_reads(device) and not self.processing.in_order

    def verify(self, input_ids: Tensor, tree_pass: TreePass, logits: Tensor) -> Verdict:
        """Which candidates stand after the text `input_ids` `[1, length]`.

        Processors that must be called once for each emitted token, in order, are asked on the way down only. All others
        are asked about every node of a chain, and of a tree on a device, which then is read once; on a CPU only about
        those nodes of a tree that p is needed at.

        Args:
            logits: `[rows, vocab]` of the target, in the order of the pass.
        """
        one_by_one = not tree_pass.tree.is_chain and not waits_for_reads(input_ids.device)
        if self.processing.in_order or one_by_one:
            return self._verify_asking(input_ids, tree_pass, logits)
        return self._verify_at_once(input_ids, tree_pass, logits)

    def _verify_at_once(self, input_ids: Tensor, tree_pass: TreePass, logits: Tensor) -> Verdict:
        """By p of all nodes."""
        tree, device = tree_pass.tree, input_ids.device
        scores = logits.to(device, torch.float32, copy=self.keeps_raw or not tree.is_chain)
        if tree.is_chain:
            scores = self.processing.along(input_ids, tree.ids(device), scores)
        else:
            scores = self._process_nodes(input_ids, tree_pass, scores)
        begin = time.perf_counter()
        path, token = self._accept_chain(tree, scores) if tree.is_chain else self._accept_tree(tree_pass, scores)
        waited = time.perf_counter() - begin if waits_for_reads(device) else 0.0
        if not tree.is_chain:  # of which the rows that stand are the first
            rows = tree_pass.rows_of(path)
            scores, logits = torch.stack([scores[row] for row in rows]), logits[rows] if self.keeps_raw else logits
        return self._verdict(tree, path, token, scores, logits, waited)

    def _verify_asking(self, input_ids: Tensor, tree_pass: TreePass, logits: Tensor) -> Verdict:
        """By p of the nodes that matter, each processed once."""
        tree, rows = tree_pass.tree, tree_pass.rows

        @cache
        def scores(node: int) -> Tensor:
            row = logits[rows[node]].to(input_ids.device, torch.float32, copy=True)
            return row if self._ends_text(tree, node) else self.processing.one(input_ids, tree.path(node), row)

        path, token = self._accept_asking(tree, scores)
        path, token = follow_tree(tree, path, token, lambda node: self._draw(scores(node)))
        chosen_from = torch.stack([scores(node) for node in (0, *path)])
        raw = logits[tree_pass.rows_of(path)] if self.keeps_raw else logits
        return self._verdict(tree, path, token, chosen_from, raw)

    def _verdict(
        self, tree: DraftTree, path: list[int], token: int, scores: Tensor, raw: Tensor, waited: float = 0.0
    ) -> Verdict:
        emitted = [*(tree.tokens[node] for node in path), token]
        return Verdict(path, emitted, scores, raw.to(scores) if self.keeps_raw else scores, waited)

    def _accept_chain(self, tree: DraftTree, scores: Tensor) -> tuple[list[int], int]:
        if self.randomness is None:
            accepted, token = verify_greedy(tree.candidates, scores)
        else:
            q = [tree.q(node) for node in range(tree.num_drawn)]
            # What was looked up is compared on the host with what is drawn.
            candidates = tree.candidates if tree.looked_up else tree.ids(scores.device)
            p, q_rows = scores.softmax(dim=-1), torch.stack(q).to(scores.device) if q else scores[:0]
            accepted, token = verify_sampled(candidates, p, q_rows, self.randomness, self.verification)
        return list(range(1, accepted + 1)), token

    def _accept_tree(self, tree_pass: TreePass, scores: Tensor) -> tuple[list[int], int]:
        tree, rows = tree_pass.tree, tree_pass.rows
        if self.randomness is None:
            choices = likeliest_tokens(scores)
            path, token = verify_tree_greedy(tree, lambda node: choices[rows[node]])
        else:
            path, token = verify_tree_at_once(tree_pass, scores.softmax(dim=-1), self.randomness, self.verification)
        return follow_tree(tree, path, token, lambda node: self._draw(scores[rows[node]]))

    def _accept_asking(self, tree: DraftTree, scores: Callable[[int], Tensor]) -> tuple[list[int], int]:
        if self.randomness is None:
            return verify_tree_greedy(tree, lambda node: likeliest_tokens(scores(node)[None])[0])
        # To accept a block, processors would be called for candidates that are then rejected.
        is_block = self.verification == "block" and not self.processing.in_order
        verify = verify_tree_block if is_block else verify_tree
        return verify(tree, lambda node: scores(node).softmax(dim=-1), self.randomness)

    def _draw(self, scores: Tensor) -> int:
        """A token by `[vocab]` processed scores of the target."""
        if self.randomness is None:
            return likeliest_tokens(scores[None])[0]
        return int(self.randomness.categorical(scores.softmax(dim=-1)))

    def _process_nodes(self, input_ids: Tensor, tree_pass: TreePass, scores: Tensor) -> Tensor:
        """Process the scores of all rows, `[rows, vocab]`."""
        tree, order = tree_pass.tree, tree_pass.order
        rows = [row for row, node in enumerate(order) if not self._ends_text(tree, node)]
        paths, process = [tree.path(order[row]) for row in rows], self.processing.after_each
        if len(rows) == len(scores):
            return process(input_ids, paths, scores)
        scores[rows] = process(input_ids, paths, scores[rows])
        return scores

    def _ends_text(self, tree: DraftTree, node: int) -> bool:
        """Whether a node ends the text: plain generation does not ask the processors what would follow."""
        return node > 0 and tree.tokens[node] in self.eos
