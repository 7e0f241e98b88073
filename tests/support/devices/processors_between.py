"""Logits processors that no graph can run, on made-up distributions, as rounds call them and as plain sampling does."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass
from support.enumeration.next_tokens import Path

PROMPT = torch.tensor([[0, 1, 0, 1]])
Process: TypeAlias = Callable[[OutputText, TreePass, Tensor], Tensor]


def another_token(_: int, ids: Tensor) -> list[int]:
    """Never the same token twice in a row; what follows such a text it does not know, as a trie would not."""
    tokens = ids.tolist()
    known = all(one != other for one, other in zip(tokens, tokens[1:], strict=False))
    return [token for token in range(3) if token != tokens[-1]] if known else []


PROCESSORS: dict[str, list[LogitsProcessor]] = {
    "n-grams": [NoRepeatNGramLogitsProcessor(3)],
    "bad words": [NoBadWordsLogitsProcessor([[2, 0], [1, 1]])],
    "a trie": [PrefixConstrainedLogitsProcessor(another_token, 1)],
}


class Between:
    """A target whose distributions are processed.

    Args:
        raw: its distributions.
        name: of `PROCESSORS`.
    """

    def __init__(self, raw: Callable[[Path], Tensor], name: str) -> None:
        self.raw, self.text = raw, OutputText.__new__(OutputText)
        self.text._ids, self.text.length, self.text._further = PROMPT, PROMPT.shape[1], []
        self.text.processing, self.text.eos = Processing(PROCESSORS[name]), set()
        self.text.max_length, self.text.randomness = float("inf"), TorchRandomness()

    def p(self, path: Path) -> Tensor:
        """As plain sampling knows it."""
        return self.text.processing.one(PROMPT, path, self.raw(path).log()).softmax(-1)

    def rows(self, tree: DraftTree, process: Process) -> Tensor:
        """As a round knows it, `[nodes + 1, vocab]`."""
        scores = torch.stack([self.raw(tuple(tree.path(node))).log() for node in range(len(tree) + 1)])
        return process(self.text, TreePass(tree, range(len(tree) + 1)), scores).softmax(-1)

    def chain(self, tokens: Sequence[int]) -> DraftTree:
        return Chain(list(tokens), [torch.empty(0)] * len(tokens))


def rightly(text: OutputText, tree_pass: TreePass, scores: Tensor) -> Tensor:
    return text.process(tree_pass, scores)


def of_the_next(text: OutputText, tree_pass: TreePass, scores: Tensor) -> Tensor:
    return rightly(text, tree_pass, scores.roll(1, 0)).roll(-1, 0)


def of_the_text_alone(text: OutputText, _: TreePass, scores: Tensor) -> Tensor:
    return torch.stack([text.processing.one(text.ids, [], row) for row in scores])


def of_none(_: OutputText, _pass: TreePass, scores: Tensor) -> Tensor:
    return scores


MISTAKES: dict[str, Process] = {
    "row i has the prefix of row i + 1": of_the_next,
    "candidates are no part of the prefix": of_the_text_alone,
    "nothing is processed": of_none,
}
