"""Assisted decoding of an attached target: the steps of transformers' `_assisted_decoding`, made exact.

Differences from it: the prompt gets a forward of its own as in plain `generate()`, so a warm cache, chunked prefill and
sliding windows behave as they do there; stopping criteria are asked token by token, so a stop string ends the output
where it ends; scores, hidden states and attentions belong to the token they are returned for.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.caches.paths import PathRows
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.drafting.chain import Chain
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.part import Captured
from hf_specdecpp.generation.captured.text import CapturedText
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.generation.prefix import Prefix, try_pass
from hf_specdecpp.generation.refusals import check_numbers, check_prompt
from hf_specdecpp.generation.tree_verification import TreeVerification
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device, upload
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.sampling.at_once import verify_sampled
from hf_specdecpp.sampling.randomness import waits_for_reads
from hf_specdecpp.sampling.successors import contexts_of
from hf_specdecpp.sampling.verification import verify_greedy
from hf_specdecpp.throughput.own_passes import OwnPasses
from hf_specdecpp.throughput.target_passes import passes_of
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.tree_pass import TreePass
from hf_specdecpp.trees.verification import follow_tree

MOST_PENDING = 16  # tokens that a target with recurrent layers reads again and again before a round settles them


class AssistedDecoding:
    """One `generate()` call of an attached target.

    Args:
        target: the model that decides.
        generator: drafts the candidates.
        stopping_criteria, generation_config, streamer: as prepared by `generate()`.
        model_kwargs: the forward's other arguments, the cache among them.
    """

    def __init__(
        self,
        target: CausalLM,
        generator: SpecDecPPCandidateGenerator,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.generator, self.config, self.streamer = target, generator, generation_config, streamer
        self.states = TargetStates(target, None if generator.rests else generator.setup.drafter.reads)
        self.prefix: Prefix | CapturedText = Prefix(target, self.states.asked_for(model_kwargs))
        generator.session.share(self.prefix)
        self.device = input_device(target)
        self.passes = passes_of(target, generator.setup.speculation)
        self.stats = generator.stats
        self.records = TokenRecords(generation_config, target.config.get_text_config(decoder=True))
        # Those before processors, where anyone asks for them.
        self.keeps_logits = self.records.keeps_logits or generator.successors is not None
        self.captured = Captured(self)
        self.criteria = stopping_criteria
        # Lengths and token ids are checked on the host for a whole round; any other criterion sees every token.
        self.max_lengths = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
        self.eos = {i for c in stopping_criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist()}
        self.all_simple = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in stopping_criteria)

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after `input_ids` `[1, length]`: what `generate()` returns."""
        try:
            input_ids = self._generate(input_ids)
        except BaseException:
            self.captured.end().roll_back()
            raise
        finally:
            self.captured.end().end()
        self.generator.finish()
        self.generator.remember(input_ids)
        if self.streamer is not None:
            self.streamer.end()
        return self._output(input_ids)

    def _generate(self, input_ids: Tensor) -> Tensor:
        """The prompt's pass, then rounds until the text ends."""
        products, begin = self.generator.products, time.perf_counter()
        with products:
            input_ids, finished = self._prompt(input_ids)
        self.stats.prompt_seconds = time.perf_counter() - begin  # its token has been read
        with self.target._optimize_model_for_decode():
            if not finished:
                self.captured.begin(input_ids)
            input_ids = self._rounds(input_ids, finished)
        self.stats.plain_pass_seconds, self.stats.same_pass_seconds = self.passes.seconds(1)
        return input_ids

    def _rounds(self, input_ids: Tensor, finished: bool) -> Tensor:
        """Rounds until the text ends."""
        with self.generator.products:
            while not finished:
                if self.captured.rounds is None:
                    self._plan(input_ids)
                    self.compare_passes(input_ids)
                begin = time.perf_counter()
                spent = self.stats.draft_seconds + self.stats.target_seconds
                length = input_ids.shape[1]
                input_ids, finished = self._round(input_ids)
                if self.captured.rounds is None:
                    self.generator.end_round(length, self.prefix.width)
                spent = self.stats.draft_seconds + self.stats.target_seconds - spent
                self.stats.overhead_seconds += time.perf_counter() - begin - spent
            self.prefix.read_pending(input_ids)
        return input_ids

    def _prompt(self, input_ids: Tensor) -> tuple[Tensor, bool]:
        """The forward over the prompt and the first token, exactly as in plain `generate()`."""
        prefix: Any = self.prefix  # which is not captured yet
        outputs = self.states.catch(self.target._prefill, input_ids, self.config, prefix.model_kwargs)
        cache = cache_among(outputs)
        check_prompt(outputs)
        check_numbers(self.target, outputs.logits, prefix.model_kwargs.get("attention_mask"))
        if self.generator.trees is not None:
            prefix.check_rows(input_ids, cache, getattr(self.config, "_mask_length", None))
        # Not earlier: a sliding-window layer that records would keep the whole prompt.
        cache.activate_past_recording()
        self.stats.plain_passes += 1
        return self._select(input_ids, Chain([], []), outputs)

    def _round(self, input_ids: Tensor) -> tuple[Tensor, bool]:
        """Draft, one target pass, verify, emit."""
        if (whole := self.captured.round(input_ids)) is not None:
            return whole
        if self.generator.rests:
            self.generator.begin_rest()
            return self._pass(input_ids, Chain([], []))
        if self.generator.trees is not None:
            return self._tree_round(input_ids)
        # Tokens that are read again with every round cost more than one round without candidates, which settles them.
        most = 0 if self.prefix.pending >= MOST_PENDING or not self.captured.drafts else self._room(input_ids)
        return self._pass(input_ids, self._draft(input_ids, most))

    def _pass(self, input_ids: Tensor, chain: Chain) -> tuple[Tensor, bool]:
        """One target pass over candidates, verify, emit."""
        begin = time.perf_counter()
        inputs = self.prefix.chain_inputs(input_ids, chain.ids(input_ids.device))
        outputs = self._read(inputs, len(chain.tokens) + 1)
        self.stats.target_seconds += time.perf_counter() - begin
        if self.prefix.mark is not None:
            self.stats.state_bytes = self.prefix.mark.num_bytes
        return self._select(input_ids, chain, outputs)

    def _read(self, inputs: dict[str, Any], count: int) -> Any:
        """The target's pass over `count` tokens, in a static cache with dummies after them."""
        if isinstance(self.prefix, CapturedText):
            outputs = self.prefix.forward(**inputs)
            self.states.give(outputs.states)
            return outputs
        is_timed = self.device.type == "cpu"  # elsewhere a pass goes on after its call
        has_choice = self.generator.products.has_choice
        with self.passes.timed(self.prefix.width, has_choice) if is_timed else nullcontext():
            outputs = self.states.catch(self.target, **inputs, return_dict=True)
        if self.prefix.static is not None:
            # Without the dummies' and, like plain generation, out of the memory that a CUDA graph writes to again.
            outputs.logits = outputs.logits[:, :count].clone()
        return outputs

    def _plan(self, input_ids: Tensor) -> None:
        """Let the generator measure what the text's passes cost, if it waits for that and there is room for any."""
        if self.generator.waits and self.prefix.most_candidates(input_ids) != 0:
            self.generator.plan_rounds(self.own_passes(input_ids))

    def own_passes(self, input_ids: Tensor) -> OwnPasses:
        """Passes after the text in its cache, which is left as it was."""
        make = partial(try_pass, self.prefix, self._read, input_ids, self.generator.trees is not None)
        room = self.prefix.most_candidates(input_ids)
        how = {"captured": isinstance(self.prefix, CapturedText)}
        return OwnPasses(make, MOST_CANDIDATES if room is None else room, how)

    def _room(self, input_ids: Tensor) -> int | None:
        """How many candidates the next pass has room for."""
        self.stats.rounds_at_change += self.prefix.is_at_change(input_ids)
        return self.prefix.most_candidates(input_ids)

    def _draft(self, input_ids: Tensor, most: int | None) -> Chain:
        """The candidates of a round, at most `most`."""
        return self.generator.draft(input_ids, max_tokens=most, states=self.states.found)

    def _select(self, input_ids: Tensor, chain: Chain, outputs: Any) -> tuple[Tensor, bool]:
        """Verify the candidates, emit what stands, leave every cache at the emitted text."""
        if self.generator.processing.in_order:
            return self._select_in_order(input_ids, chain, outputs)
        count, ids = len(chain.tokens), chain.ids(input_ids.device)
        logits = outputs.logits[0, -count - 1 :].to(input_ids.device, torch.float32)
        raw = logits.clone() if self.keeps_logits else logits
        scores = self.generator.processing.along(input_ids, ids, logits)
        begin = time.perf_counter()
        accepted, token = self._verify(chain, ids, scores)
        self._note_wait(begin)
        if self.generator.successors is not None:
            paths = [chain.tokens[:place] for place in range(count + 1)]
            self.generator.successors.learn(contexts_of(input_ids, paths), raw)
        self._learn(input_ids, scores, accepted)
        emitted = [*chain.tokens[:accepted], token]
        return self._emit(input_ids, emitted, scores, raw, outputs, count)

    def _learn(self, input_ids: Tensor, scores: Tensor, accepted: int) -> None:
        """Tell the generator what became of a round; the prompt's pass is none."""
        if self.stats.generated and self.generator.rests:
            self.generator.end_rest(input_ids.shape[1])
        elif self.stats.generated:
            self.generator.update_candidate_strategy(input_ids, scores, accepted)

    def _verify(self, chain: Chain, ids: Tensor, scores: Tensor) -> tuple[int, int]:
        """How many candidates stand, and the token after them.

        Args:
            ids: the k candidates `[k]`, where the scores are.
            scores: `[k + 1, vocab]`, of the target, processed.
        """
        randomness = self.generator.randomness
        if randomness is None:
            return verify_greedy(chain.tokens, scores)
        q = torch.stack(chain.q).to(scores.device) if chain.q else scores[:0]
        verification = self.generator.setup.speculation.verification
        # What was looked up is compared on the host with what is drawn.
        candidates = chain.tokens if chain.looked_up else ids
        return verify_sampled(candidates, scores.softmax(dim=-1), q, randomness, verification)

    def _note_wait(self, begin: float) -> None:
        """Verification reads from the device, which has the target's pass to finish first: that time is the pass's.

        So nothing waits for the device only to know the time. What the prompt's pass takes is `prompt_seconds`.
        """
        if self.stats.generated and waits_for_reads(self.device):
            self.stats.target_seconds += time.perf_counter() - begin

    def _tree_round(self, input_ids: Tensor) -> tuple[Tensor, bool]:
        """The same with a tree. The target reads it in depth-first order, so a path is ascending rows of `outputs`."""
        tree = self.generator.draft_tree(input_ids, self.states.found, self._room(input_ids))
        tree_pass = TreePass(tree)
        is_tested = self.generator.randomness is not None and self._verifies_at_once(input_ids)
        inputs = self.prefix.tree_inputs(input_ids, tree_pass, families=is_tested)
        begin = time.perf_counter()
        outputs = self._read(inputs, len(tree) + 1)
        self.stats.target_seconds += time.perf_counter() - begin
        path, emitted, scores, raw, rows = self._walk(input_ids, tree_pass, outputs)
        self.generator.update_tree(tree, path)
        return self._emit(input_ids, emitted, scores, raw, outputs, len(tree), rows)

    def _select_in_order(self, input_ids: Tensor, chain: Chain, outputs: Any) -> tuple[Tensor, bool]:
        """Like `_select`, one candidate after the other: a chain is a tree of one branch.

        Token by token: to accept a block, the processors would be called for candidates that are then rejected.
        """
        tree, count = DraftTree.chain(int(input_ids[0, -1]), chain.tokens, chain.scores), len(chain.tokens)
        path, emitted, scores, raw, _ = self._walk(input_ids, TreePass(tree), outputs)
        self._learn(input_ids, scores, len(path))
        return self._emit(input_ids, emitted, scores, raw, outputs, count)

    def _walk(
        self, input_ids: Tensor, tree_pass: TreePass, outputs: Any
    ) -> tuple[list[int], list[int], Tensor, Tensor, list[int]]:
        """Verify a tree. Processors are called at the nodes that p is asked about, once each: those that must be called
        in order at the nodes on the way down only; on a device all others at every node.

        Returns:
            The accepted nodes; the k emitted tokens; `[k, vocab]` logits that they were chosen from, with and without
            processing; the rows of the root and the accepted nodes in the pass.
        """
        tree, rows, generator = tree_pass.tree, tree_pass.rows, self.generator
        verification = generator.setup.speculation.verification
        verifier = TreeVerification(generator.processing, generator.randomness, verification, self.eos)
        logits = outputs.logits[0, -len(rows) :]
        if self._verifies_at_once(input_ids):
            every = logits.to(input_ids.device, torch.float32, copy=True)
            every = verifier.process_all(input_ids, tree_pass, every)
            begin = time.perf_counter()
            path, token = verifier.accept_at_once(tree_pass, every)
            self._note_wait(begin)

            def scores(node: int) -> Tensor:
                return every[rows[node]]
        else:

            @cache
            def scores(node: int) -> Tensor:
                row = logits[rows[node]].to(input_ids.device, torch.float32, copy=True)
                if verifier.ends_text(tree, node):
                    return row
                return self.generator.processing.one(input_ids, tree.path(node), row)

            path, token = verifier.accept(tree, scores)
        path, token = follow_tree(tree, path, token, lambda node: verifier.draw(scores(node)))
        if self.generator.successors is not None:
            paths = [tree.path(node) for node in tree_pass.order]
            self.generator.successors.learn(contexts_of(input_ids, paths), logits)
        kept = [0, *path]
        emitted = [*(tree.tokens[node] for node in path), token]
        kept_rows = [rows[node] for node in kept]
        chosen_from = torch.stack([scores(node) for node in kept])
        raw = logits[kept_rows].to(chosen_from) if self.keeps_logits else chosen_from
        return path, emitted, chosen_from, raw, kept_rows

    def _verifies_at_once(self, input_ids: Tensor) -> bool:
        """Whether a tree is verified on the device, with one read."""
        return waits_for_reads(input_ids.device) and not self.generator.processing.in_order

    def _emit(
        self,
        input_ids: Tensor,
        emitted: list[int],
        scores: Tensor,
        raw: Tensor,
        outputs: Any,
        count: int,
        path: list[int] | None = None,
    ) -> tuple[Tensor, bool]:
        """Emit what stands of the verified tokens, leave the cache at it.

        Args:
            emitted: k tokens.
            scores, raw: `[k, vocab]` or more, logits that they were chosen from, with and without processing.
            count: how many candidates the target read.
            path: rows of the root and the accepted candidates in its pass, where they were a tree.
        """
        before = input_ids.shape[1]
        # As int64 whatever the prompt's type is, like plain generation.
        known = [torch.tensor([emitted])] + ([] if path is None else [torch.tensor(path)])
        new_ids, *on_device = upload(known, input_ids.device)
        input_ids = torch.cat((input_ids, new_ids), dim=1)
        kept, finished = self._first_stop(input_ids, before, emitted, scores, raw)
        input_ids = input_ids[:, : before + kept]
        self.records.add_states(outputs, kept, count, path, again=self.prefix.pending)
        self._settle(outputs, kept, count, None if path is None else PathRows(path, *on_device))
        self.stats.generated += kept
        if self.streamer is not None:
            self.streamer.put(input_ids[:, before:].cpu())
        return input_ids, finished

    def emit_read(self, input_ids: Tensor, emitted: list[int]) -> tuple[Tensor, bool]:
        """Emit what stands of a round that is over on the device, where both models have read all of it."""
        before = input_ids.shape[1]
        (new_ids,) = upload([torch.tensor([emitted])], input_ids.device)
        input_ids = torch.cat((input_ids, new_ids), dim=1)
        nothing = torch.empty(0, 0)
        kept, finished = self._first_stop(input_ids, before, emitted, nothing, nothing)
        if isinstance(self.prefix, CapturedText):
            self.prefix.forget(len(emitted) - kept)
        self.stats.generated += kept
        if self.streamer is not None:
            self.streamer.put(torch.tensor([emitted[:kept]]))
        return input_ids[:, : before + kept], finished

    def _settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None) -> None:
        """Keep what the draft reads of the pass, and leave the cache at what was emitted."""
        # All of the prompt; later the last token before the round and the accepted candidates.
        if not self.stats.generated:
            rows: Tensor | slice = slice(None)
        elif not num_candidates and not self.prefix.pending:
            rows = slice(-1, None)  # the text before it may have been read anew
        elif path is None:
            rows = slice(self.prefix.pending, self.prefix.pending + kept)
        else:
            rows = path.on_device[:kept]
        self.states.keep(rows)
        self.prefix.settle(outputs, kept, num_candidates, path)

    def _first_stop(
        self, input_ids: Tensor, before: int, emitted: list[int], scores: Tensor, raw: Tensor
    ) -> tuple[int, bool]:
        """How many of the emitted tokens stand, and whether generation ends with them."""
        ends = [i + 1 for i, token in enumerate(emitted) if token in self.eos]
        limits = [max(length - before, 1) for length in self.max_lengths] + ends[:1]
        kept = min([len(emitted), *limits])
        finished = kept in limits
        if self.all_simple:
            self.records.add_scores(scores, raw, kept)
            return kept, finished
        for i in range(kept):
            self.records.add_scores(scores[i:], raw[i:], 1)
            if bool(self.criteria(input_ids[:, : before + i + 1], self.records.scores).all()):
                return i + 1, True
        return kept, finished

    def compare_passes(self, input_ids: Tensor) -> None:
        """Time a pass over one token beside those of the rounds, where these do not tell what it takes."""
        if isinstance(self.prefix, CapturedText):
            return
        tell_it = self.generator.rests and self.device.type == "cpu"
        if tell_it or self.prefix.pending or self.prefix.is_at_change(input_ids):
            return
        product = self.passes.missing(1, self.stats.rounds, self.generator.products.has_choice)
        if product is not None:
            begin = time.perf_counter()
            self.passes.make(1, product, self.target, self.prefix.chain_inputs(input_ids, []), self.device)
            self.stats.compared_passes += 1
            self.stats.preparing_seconds += time.perf_counter() - begin

    def _output(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        if not self.config.return_dict_in_generate:
            return input_ids
        return self.records.output(input_ids, self.prefix.cache)
