"""One sequence of a `generate()` call (`Text`), and what becomes of it in a round (`Round`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.caches.text import PathRows
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.generation.verification import Verdict, Verifier
from hf_specdecpp.models.causal_lm import CausalLM, upload
from hf_specdecpp.sampling.successors import contexts_of
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.tree_pass import TreePass


class Text:
    """A sequence that is being generated.

    Args:
        target: the model that decides.
        generator: drafts its candidates.
        criteria, config, streamer: as prepared by `generate()`.

    Attributes:
        ids: `[1, length]`, the prompt and what was emitted.
        finished: whether it has ended.
        records: what `return_dict_in_generate` asks for.
    """

    ids: Tensor
    prompt_length: int

    def __init__(
        self,
        target: CausalLM,
        generator: SpecDecPPCandidateGenerator,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.generator, self.stats, self.streamer = generator, generator.stats, streamer
        self.finished = False
        self.records = TokenRecords(config, target.config.get_text_config(decoder=True))
        self.criteria = criteria
        # Lengths and token ids are checked on the host for a whole round; any other criterion sees every token.
        self.max_lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.eos = {i for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist()}
        self.all_simple = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in criteria)
        self.verifier = Verifier(
            generator.processing, generator.randomness, generator.setup.decisions.verification, self.eos,
            keeps_raw=self.records.keeps_logits,
        )  # fmt: skip

    def begin(self, ids: Tensor) -> None:
        """The text is a prompt, `[1, length]`."""
        self.ids, self.prompt_length = ids, ids.shape[1]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def verify(self, tree_pass: TreePass, logits: Tensor) -> Verdict:
        """Which candidates stand, and the token after them, by the target's logits `[rows, vocab]`."""
        successors = self.generator.successors
        # Where drafting does not pay, what this costs would be most of what a round loses to plain decoding.
        if successors is not None and (len(tree_pass.tree) or self.generator.expects_drafts):
            paths = [tree_pass.tree.path(node) for node in tree_pass.order]
            successors.learn(contexts_of(self.ids, paths), logits)
        return self.verifier.verify(self.ids, tree_pass, logits)

    def emit(self, emitted: list[int], scores: Tensor, raw: Tensor, rows: list[int] | None = None) -> Emitted:
        """Add tokens, up to the first that ends the text.

        Args:
            emitted: k tokens.
            scores, raw: `[k, vocab]` or more, logits that they were chosen from, with and without processing.
            rows: of the root and the accepted candidates in the pass, where they were a tree.
        """
        before = self.length
        # As int64 whatever the prompt's type is, like plain generation.
        known = [torch.tensor([emitted])] + ([] if rows is None else [torch.tensor(rows)])
        new_ids, *on_device = upload(known, self.ids.device)
        ids = torch.cat((self.ids, new_ids), dim=1)
        kept, self.finished = self._first_stop(ids, emitted, scores, raw)
        self.ids = ids[:, : before + kept]
        return Emitted(kept, None if rows is None else PathRows(rows, *on_device))

    def hand_over(self, tokens: list[int]) -> None:
        """Count tokens that were added, and stream them."""
        self.stats.generated += len(tokens)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([tokens]))

    def end(self) -> None:
        """The text is complete."""
        self.generator.remember(self.ids[0, self.prompt_length :])
        if self.streamer is not None:
            self.streamer.end()

    def _first_stop(self, ids: Tensor, emitted: list[int], scores: Tensor, raw: Tensor) -> tuple[int, bool]:
        """How many of the emitted tokens, the last of `ids` `[1, length]`, stand, and whether the text ends there."""
        before = ids.shape[1] - len(emitted)
        ends = [i + 1 for i, token in enumerate(emitted) if token in self.eos]
        limits = [max(length - before, 1) for length in self.max_lengths] + ends[:1]
        kept = min([len(emitted), *limits])
        finished = kept in limits
        if self.all_simple:
            self.records.add_scores(scores, raw, kept)
            return kept, finished
        for i in range(kept):
            self.records.add_scores(scores[i:], raw[i:], 1)
            if bool(self.criteria(ids[:, : before + i + 1], self.records.scores).all()):
                return i + 1, True
        return kept, finished


@dataclass(frozen=True)
class Emitted:
    """What a round added to a text.

    Attributes:
        kept: tokens.
        path: rows of the root and the accepted candidates in the pass, where they were a tree.
    """

    kept: int
    path: PathRows | None = None


@dataclass
class Round:
    """A round of one text, from what is proposed to what stands.

    Attributes:
        tree: what the draft proposes; a chain is a tree of one branch, and an empty one leaves the round to the target.
        length: tokens of the text before the round.
        is_prompt: whether it is the pass over the prompt, which is no round for those who learn.
        rows: the tree as the target reads it.
        outputs: of the target's pass: `logits` `[1, rows, vocab]`, and what else the text is asked for.
        width: tokens that the pass read, dummies included.
        verdict: what the target says of the candidates.
        emitted: what was added to the text.
    """

    text: Text
    tree: DraftTree
    is_prompt: bool = False
    outputs: Any = None
    width: int = 0
    length: int = field(init=False)
    rows: TreePass = field(init=False)
    verdict: Verdict = field(init=False)
    emitted: Emitted = field(init=False)

    def __post_init__(self) -> None:
        self.length, self.rows = self.text.length, TreePass(self.tree)

    def verify(self) -> None:
        """One route for chains and trees, greedy or drawn, token by token or as a block."""
        self.verdict = self.text.verify(self.rows, self.outputs.logits[0, -len(self.tree) - 1 :])

    def emit(self) -> None:
        """Add what stands to the text, up to the first token that ends it."""
        verdict = self.verdict
        rows = None if self.tree.is_chain else self.rows.rows_of(verdict.path)
        self.emitted = self.text.emit(verdict.emitted, verdict.scores, verdict.raw, rows)
