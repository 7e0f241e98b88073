"""One sequence of a `generate()` call (`OutputText`): verifies candidates by the functions of `trees.verification`,
appends the emitted tokens, and finds the end of the sequence."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specdecpp.caches.cached_context import PathRows
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.generation.refusals import Call
from hf_specdecpp.sampling.ngram_corrections import contexts_of
from hf_specdecpp.sampling.processors import class_of, extend
from hf_specdecpp.sampling.randomness import NothingToDrawError, Randomness, waits_for_reads
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass, upload
from hf_specdecpp.trees.verification import (
    as_float32,
    follow_tree,
    likeliest_tokens,
    test_children,
    verify_greedy,
    verify_sampled,
    verify_tree,
)

NO_SCORES = torch.empty(0, 0)


@dataclass
class RoundResult:
    """The result of verifying a round. Node 0 is the last token before the round, nodes 1, 2, ... are candidates.

    Example: of the chain 7 8 9 the candidates 7 and 8 are accepted, and 4 follows: `path` is [1, 2], `emitted` is
    [7, 8, 4]. If `Walk` finds that 8 ends the sequence, `emitted` is [7, 8], and `path` is still [1, 2]."""

    path: list[int]  # the accepted nodes
    emitted: list[int]  # their tokens and the next token
    scores: Tensor  # `[k, vocab]` or more rows: processed logits, from which the k emitted tokens were chosen
    raw: Tensor  # logits before processing; `scores` unless `output_logits` is set
    rows: list[int] | None = None  # of a tree: the root's and the accepted nodes' rows in the pass
    ended: bool | None = None  # if stopping criteria were already called: whether the sequence has ended
    ids: Tensor | None = None  # then also the sequence with these tokens, as processors and criteria have left it
    waited: float = 0.0  # seconds of waiting for the device, including the rest of the target's pass


class OutputText:
    """A sequence during its `generate()` call. `ids`: `[1, length]`, at first the prompt.

    Attributes:
        length: number of tokens of the prompt and emitted ones.
        states: `[1, n, width]`, if the draft reads hidden states of the target: those at the n tokens that the last
            pass committed.
        before: length before the latest round.
        finished: whether the sequence has ended.
        goes_on: whether it continues after its end until all rows of the batch have ended, as without EOS ids.
        is_rewritten: whether a stopping criterion has replaced the last token of the latest round.
        end_length: length at which the sequence ends, as far as known; at first the maximum length.
        waits: whether reading a value from its device waits for all queued work, as on a GPU.
        records: scores, logits, hidden states and attentions for `return_dict_in_generate`.
    """

    before: int
    states: Tensor | None = None

    def __init__(self, call: Call, generator: SpecDecPPCandidateGenerator, ids: Tensor) -> None:
        self.generator, self.stats, self.streamer = generator, generator.stats, call.streamer
        self._ids, self._further = ids, list[int]()  # `_further`: emitted tokens, not yet in `_ids`
        self.length = self.prompt_length = ids.shape[1]
        self.waits = waits_for_reads(ids.device)
        self.finished = self.goes_on = self.is_rewritten = False
        self.records = TokenRecords(call.config, call.target.config.get_text_config(decoder=True))
        self.criteria = criteria = call.criteria
        # Length and EOS criteria are checked on the host once per round; any other criterion is called for each token.
        lengths = [c.max_length for c in criteria if class_of(c) is MaxLengthCriteria]
        self.max_length: float = min(lengths, default=math.inf)
        self.end_length = self.max_length
        self.eos = {i for c in criteria if class_of(c) is EosTokenCriteria for i in c.eos_token_id.tolist()}
        self.all_simple = all(class_of(c) in (EosTokenCriteria, MaxLengthCriteria) for c in criteria)
        self.processing, self.randomness = generator.processing, generator.randomness
        self.verification, self.keeps_raw = generator.setup.decisions.verification, "logits" in self.records.kept

    @property
    def ids(self) -> Tensor:
        """`[1, length]`, the prompt and the emitted tokens. Tokens of chains are copied to the device at first use."""
        if self._further:
            further, self._further = torch.tensor([self._further], device="cpu"), []  # int64, as in plain generation
            self._ids = torch.cat((self._ids, further.to(self._ids.device)), dim=1)
        return self._ids

    def verify(self, each: Round) -> RoundResult:
        """Choose the accepted candidates of a round and the next token, by the logits in its `outputs`. If processors
        have to be called for each emitted token in order, a `Walk` chooses."""
        logits = each.outputs.logits[0, -len(each.tree) - 1 :]
        if self.generator.corrections is not None:
            self.record_corrections(each.rows, logits)
        if not self.processing.answers_all:
            return self._verify_in_order(each, logits)
        return self._verify_chain(each, logits) if isinstance(each.tree, Chain) else self._verify_tree(each, logits)

    def record_corrections(self, tree_pass: TreePass, logits: Tensor) -> None:
        """Record the target's choices after the n nodes, by `logits` `[n, vocab]`, if drafting uses them later."""
        tree, generator = tree_pass.tree, self.generator
        # If plain generation is faster, recording would be most of the time that a round adds.
        if generator.corrections is not None and (len(tree) or generator.plan is None or generator.plan.pays):
            generator.corrections.record(contexts_of(self.ids, [tree.path(node) for node in tree_pass.order]), logits)

    def emit(self, result: RoundResult) -> Emitted:
        """Append the tokens of `result`, up to the first that ends the sequence. Returns how many were appended."""
        emitted, rows = result.emitted, result.rows
        kept, self.before = len(emitted), self.length
        path: PathRows | None = None
        if rows is None:
            self._further += emitted
        else:
            new_ids, on_device = upload(
                [torch.tensor([emitted], device="cpu"), torch.tensor(rows, device="cpu")], self.ids.device
            )
            path, self._ids = PathRows(rows, on_device), torch.cat((self.ids, new_ids), dim=1)
        if result.ids is not None:
            self._ids, self._further = result.ids, []
        self.finished = bool(result.ended)
        if result.ended is None:
            ids = None if self.all_simple else self.ids
            kept, self.finished = self.first_stop(self.before + kept, emitted, result.scores, result.raw, ids)
        self.length = self.before + kept
        if kept < len(emitted):
            self._ids = self.ids[:, : self.length]
        if self.is_rewritten:
            result.path = result.path[: kept - 1]
        return Emitted(kept, path)

    def end(self) -> None:
        """Called after the call's last round: stores what later calls use of it, and ends the streamer."""
        self.generator.finish()
        setup = self.generator.setup
        if setup.speculation.lookup == "history":  # for lookups of later calls
            setup.memory.answers.add(self.ids[0, self.prompt_length :].tolist())
        if self.streamer is not None:
            self.streamer.end()

    def first_stop(
        self, length: int, emitted: list[int], scores: Tensor, raw: Tensor, ids: Tensor | None
    ) -> tuple[int, bool]:
        """Returns how many of the last tokens, `emitted`, are kept, and whether the sequence then ends. `ids`
        `[1, length]`: the sequence with all of them, or `None` if `all_simple`. Records `scores` of the kept ones.

        If the sequence `goes_on`, stopping criteria remove no tokens, but set `end_length`. If one writes another last
        token to `ids`, no later token is kept (`is_rewritten`)."""
        self.is_rewritten = False
        before = length - len(emitted)
        kept, finished, room = len(emitted), False, max(self.max_length - before, 1)
        if kept >= room or not self.eos.isdisjoint(emitted):
            ends = [place for place, token in enumerate(emitted, 1) if token in self.eos or place >= room]
            kept, finished = ends[0], True
        if ids is None:
            if self.records.kept:
                self.records.add_scores(scores, raw, kept)
            return kept, finished
        for i in range(kept):
            self.records.add_scores(scores[i:], raw[i:], 1)
            # As in plain generation, which reads one bit of the integers that a criterion may return.
            if not bool((~self.criteria(ids[:, : before + i + 1], self.records.kept.get("scores")) & 1).any()):
                self.end_length = min(self.end_length, before + i + 1)
                if not self.goes_on:
                    return i + 1, True
            if int(ids[0, before + i]) != emitted[i]:
                self.is_rewritten = True
                return i + 1, False
        return kept, finished

    # Verification. --------------------------------------------------------------------------------------------------

    def _verify_chain(self, each: Round, logits: Tensor) -> RoundResult:
        """Verify a chain, with p computed after all of its candidates."""
        chain = each.tree
        scores = logits.to(self.ids.device, torch.float32, copy=self.keeps_raw)
        if not self.processing.does_nothing:
            scores = self.process(TreePass(chain, range(len(chain) + 1)), scores)
        begin = time.perf_counter()
        path, token = self._accept_chain(chain, as_float32(scores, self.randomness is None))
        waited = time.perf_counter() - begin if self.waits else 0.0
        raw = logits.to(scores) if self.keeps_raw else scores
        return RoundResult(path, [*chain.tokens[1 : len(path) + 1], token], scores, raw, waited=waited)

    def _verify_tree(self, each: Round, logits: Tensor) -> RoundResult:
        """Verify a tree, with p computed after tested nodes only; on a GPU after all nodes, copied in one read."""
        tree, rows, randomness, begin = each.tree, each.rows.rows, self.randomness, 0.0
        if self.waits:
            processed = logits.to(self.ids.device, torch.float32, copy=True)
            if not self.processing.does_nothing:
                processed = self.process(each.rows, processed)
            begin, exact = time.perf_counter(), as_float32(processed, randomness is None)
            read: Any = likeliest_tokens(exact) if randomness is None else self._on_host(tree, exact)

        @cache
        def scores(node: int) -> Tensor:
            if self.waits:
                return processed[rows[node]]
            row = logits[rows[node]].to(self.ids.device, torch.float32, copy=self.keeps_raw)
            if self.processing.does_nothing or self._ends_text(tree, node):
                return row
            return self.processing.one(self.ids, tree.path(node), row)

        def target_at(node: int) -> Any:
            """The likeliest token after a node (greedy), or p after the node (sampled)."""
            if self.waits:
                return read[rows[node]]
            exact = as_float32(scores(node), randomness is None)
            return likeliest_tokens(exact[None])[0] if randomness is None else exact.softmax(dim=-1)

        if randomness is None:
            path, token = verify_greedy(tree, target_at)
        else:
            path, token = verify_tree(tree, target_at, randomness, self.verification)
            path, token = follow_tree(tree, path, token, lambda node: self._draw(scores(node), randomness))
        waited = time.perf_counter() - begin if self.waits else 0.0
        taken, chosen_from = [rows[node] for node in (0, *path)], torch.stack([scores(node) for node in (0, *path)])
        raw = logits[taken].to(chosen_from) if self.keeps_raw else chosen_from
        return RoundResult(path, [tree.tokens[node] for node in path] + [token], chosen_from, raw, taken, waited=waited)

    def _verify_in_order(self, each: Round, logits: Tensor) -> RoundResult:
        """Verify token by token, with p computed after accepted nodes only."""
        walk = Walk(self, each.rows, logits)
        while walk.node is not None:
            walk.choose(self.processing.one(walk.ids, [], walk.raw))
        return walk.result

    def _accept_chain(self, chain: DraftTree, scores: Tensor) -> tuple[list[int], int]:
        if (randomness := self.randomness) is None:
            return verify_greedy(chain, likeliest_tokens(scores).__getitem__)
        p, drawn = scores.softmax(dim=-1), chain.num_drawn
        q = torch.stack([chain.q(node) for node in range(drawn)]).to(p.device) if drawn else p[:0]
        accepted, token = verify_sampled(chain.candidates[:drawn], p[: drawn + 1], q, randomness, self.verification)
        path = list(range(1, accepted + 1))
        return follow_tree(chain, path, token, lambda node: self._draw(scores[node], randomness))

    def _on_host(self, tree: DraftTree, scores: Tensor) -> Tensor:
        """Copy p `[rows, vocab]` after all nodes to the host, and in this one read also the q of `tree`. Returns p."""
        parents = [node for node, children in enumerate(tree.children) if children]
        of_draft = [tree.scores[node].to(scores.device)[None] for node in parents]
        both = torch.cat((scores, *of_draft)).softmax(dim=-1).cpu()
        tree.distributions = dict(zip(parents, both[len(scores) :], strict=True))
        return both

    def _draw(self, scores: Tensor, randomness: Randomness) -> int:
        """Draw a token by processed `scores` `[vocab]` of the target; `NothingToDrawError` if all are -inf."""
        p = as_float32(scores).softmax(dim=-1)
        token = randomness.categorical(p)
        if self.waits and not bool(p.gather(0, token.view(1)) > 0.0):
            raise NothingToDrawError
        return int(token)

    def process(self, tree_pass: TreePass, scores: Tensor) -> Tensor:
        """Returns processed scores of all rows of a pass, for `scores` `[rows, vocab]` float32, perhaps overwritten."""
        tree, order, processing = tree_pass.tree, tree_pass.order, self.processing
        if not processing.answers_all:
            return self._process_allowed(tree_pass, scores.clone())
        rows = [row for row, node in enumerate(order) if not self._ends_text(tree, node)]
        paths = [tree.path(order[row]) for row in rows]
        if len(rows) == len(scores):
            return processing.after_each(self.ids, paths, scores)
        found = processing.after_each(self.ids, paths, scores[rows])
        scores = scores.to(found.dtype)  # a processor may return another
        scores[rows] = found
        return scores

    def _process_allowed(self, tree_pass: TreePass, scores: Tensor) -> Tensor:
        """`process` only for nodes that may be accepted: greedy choices, or candidates that the processors allow.
        Waits for the device once per level of the tree."""
        tree, rows, level = tree_pass.tree, tree_pass.rows, [0]
        while level:
            here = [rows[node] for node in level]
            found = self.processing.after_each(self.ids, [tree.path(node) for node in level], scores[here])
            scores = scores.to(found.dtype)
            scores[here] = found
            below = [each for node in level for each in tree.below(node) if not self._ends_text(tree, each)]
            parents, tokens = [rows[tree.parents[node]] for node in below], [tree.tokens[node] for node in below]
            if self.randomness is None:  # argmax also gives a token if all are -inf
                accepted = (scores[parents].argmax(-1) == torch.tensor(tokens, device=scores.device)).tolist()
            else:
                accepted = (scores[parents, tokens] > -math.inf).tolist()
            level = list(compress(below, accepted))
        return scores

    def _ends_text(self, tree: DraftTree, node: int) -> bool:
        """Whether the token of a node ends the sequence, so that plain generation calls no processors after it."""
        return node > 0 and (tree.tokens[node] in self.eos or self.length + tree.depths[node] >= self.max_length)


class Walk:
    """Verifies a round token by token. As in plain generation, the scores after a token are processed, the next token
    is chosen, and the stopping criteria are called, before the next scores are processed.

    Attributes:
        ids: `[1, length]`, the sequence with the tokens chosen so far.
        node: the accepted node after which the next token is chosen; `None` at the end of the round.
        ended: whether the sequence has ended.
    """

    def __init__(self, text: OutputText, tree_pass: TreePass, logits: Tensor) -> None:
        self.text, self.tree_pass, self.logits = text, tree_pass, logits
        self.ids, self.node, self.ended = text.ids, cast("int | None", 0), False
        self._path: list[int] = []
        self._emitted: list[int] = []

    @property
    def raw(self) -> Tensor:
        """A copy of the target's logits after `node`, `[vocab]` float32."""
        row = self.tree_pass.rows[cast(int, self.node)]
        return self.logits[row].to(self.ids.device, torch.float32, copy=True)

    def choose(self, scores: Tensor) -> None:
        """Choose the next token by the processed `scores` `[vocab]` after `node`, and call the stopping criteria."""
        text, raw = self.text, self.raw if self.text.keeps_raw else scores
        tree, node = self.tree_pass.tree, cast(int, self.node)
        if text.randomness is None:
            token = likeliest_tokens(scores[None])[0]
            child = tree.child(node, token)
        else:  # token by token (DySpec, Algorithm 3)
            child, token = test_children(tree, node, as_float32(scores).softmax(dim=-1), text.randomness)
        child = tree.looked_up.get((node, token)) if child is None else child
        self.ids = extend(self.ids, [token])
        self._emitted.append(token)
        if child is not None:
            self._path.append(child)
        ids = None if text.all_simple else self.ids
        _, self.ended = text.first_stop(self.ids.shape[1], [token], scores[None], raw[None], ids)
        self.node = None if self.ended or text.is_rewritten else child

    @property
    def result(self) -> RoundResult:
        """The result of the round, with the tokens chosen so far; without scores, which were recorded already."""
        rows, is_chain = self.tree_pass.rows, isinstance(self.tree_pass.tree, Chain)
        taken = None if is_chain else [rows[node] for node in (0, *self._path)]
        return RoundResult(self._path, self._emitted, NO_SCORES, NO_SCORES, taken, self.ended, self.ids)


class Emitted(NamedTuple):
    """Number of tokens that a round appended and, for a tree, the pass's rows of the root and accepted candidates."""

    kept: int
    path: PathRows | None = None


@dataclass
class Round:
    """One round of the sequence `text`, from the proposal of candidates to the commit."""

    text: OutputText
    tree: DraftTree  # the candidates; a chain is a tree with one branch, no candidates an empty tree
    is_prompt: bool = False  # whether this is the prompt's pass, which statistics and rules do not count as a round
    is_verified: bool = False  # whether `result` is known before `_finish_round`: on a GPU, or of rows `InStep`
    # Of the target's pass: `logits` `[1, rows, vocab]` and requested outputs; of captured rounds the `RoundReport`.
    outputs: Any = None
    width: int = 0  # tokens of a row in the pass, with padding; 0 in captured rounds
    result: RoundResult = field(init=False)
    emitted: Emitted = field(init=False)

    @cached_property
    def rows(self) -> TreePass:
        """The nodes of the tree in the order of the rows of the target's pass."""
        return TreePass(self.tree)
