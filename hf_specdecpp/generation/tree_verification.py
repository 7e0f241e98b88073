"""Which path of a token tree stands, and the token after it, by the target's logits (`TreeVerification`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TreeRandomness
from hf_specdecpp.sampling.verification import Verification, likeliest_tokens
from hf_specdecpp.trees.at_once import verify_tree_at_once
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.tree_pass import TreePass
from hf_specdecpp.trees.verification import verify_tree, verify_tree_block, verify_tree_greedy


class TreeVerification:
    """Verifies the trees of one generation.

    Args:
        processing: what makes p of logits.
        randomness: of sampled texts; `None` takes the likeliest token.
        verification: of sampled trees.
        eos: token ids that end the text.
    """

    def __init__(
        self,
        processing: Processing,
        randomness: TreeRandomness | None,
        verification: Verification,
        eos: Collection[int],
    ) -> None:
        self.processing, self.randomness, self.verification, self.eos = processing, randomness, verification, eos

    def accept(self, tree: DraftTree, scores: Callable[[int], Tensor]) -> tuple[list[int], int]:
        """The accepted nodes and the token after them, by `[vocab]` scores that are asked for where they matter."""
        randomness = self.randomness
        if randomness is None:
            return verify_tree_greedy(tree, lambda node: likeliest_tokens(scores(node)[None])[0])
        is_block = self.verification == "block" and not self.processing.in_order
        verify = verify_tree_block if is_block else verify_tree
        return verify(tree, lambda node: scores(node).softmax(dim=-1), randomness)

    def accept_at_once(self, tree_pass: TreePass, scores: Tensor) -> tuple[list[int], int]:
        """The same with one read from the device, by the scores of all rows, `[rows, vocab]`."""
        randomness, tree = self.randomness, tree_pass.tree
        if randomness is None:
            choices = likeliest_tokens(scores)
            return verify_tree_greedy(tree, lambda node: choices[tree_pass.rows[node]])
        verification = self.verification
        return verify_tree_at_once(tree_pass, scores.softmax(dim=-1), randomness, verification)

    def draw(self, scores: Tensor) -> int:
        """A token by `[vocab]` processed scores of the target."""
        if self.randomness is None:
            return likeliest_tokens(scores[None])[0]
        return int(self.randomness.categorical(scores.softmax(dim=-1)))

    def process_all(self, input_ids: Tensor, tree_pass: TreePass, scores: Tensor) -> Tensor:
        """Process the scores of all rows, `[rows, vocab]`."""
        tree, order = tree_pass.tree, tree_pass.order
        rows = [row for row, node in enumerate(order) if not self.ends_text(tree, node)]
        paths, process = [tree.path(order[row]) for row in rows], self.processing.after_each
        if len(rows) == len(scores):
            return process(input_ids, paths, scores)
        scores[rows] = process(input_ids, paths, scores[rows])
        return scores

    def ends_text(self, tree: DraftTree, node: int) -> bool:
        """Whether a node ends the text: plain generation does not ask the processors what would follow."""
        return node > 0 and tree.tokens[node] in self.eos
