"""The candidate generator of one sequence of a `generate()` call (`SpecDecPPCandidateGenerator`), and the drafting of
trees (`TreeDrafting`). `drafting/chain.py` drafts chains."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.costs import DraftWork
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps
from hf_specdecpp.drafting.chain import ChainDrafting, Threshold, draft_chains, run_shared
from hf_specdecpp.drafting.draft import DraftingSession
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftProbability
from hf_specdecpp.generation.refusals import LateRefusalError
from hf_specdecpp.generation.setup import DraftSetup, looking_up, plan_of, rule_of, why_chains, without_padding
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.lookup.looking_up import LookingUp, counts_of, with_lookups
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, longest_text, num_logits
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain, Randomness, TorchRandomness
from hf_specdecpp.throughput.known_costs import RoundTimes
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.tree_plan import TreePlan
from hf_specdecpp.trees import growth
from hf_specdecpp.trees.growth import Growth, Slots, check_estimator
from hf_specdecpp.trees.shapes import size
from hf_specdecpp.trees.tree import Chain, DraftTree

logger = logging.get_logger("hf_specdecpp")

NO_TREES = "This generator drafts trees, which transformers' own loop does not verify. Set tree=False."
NO_STATES = "This generator's draft reads hidden states of the target, which transformers' own loop does not hand over."


class SpecDecPPCandidateGenerator(CandidateGenerator):
    """Drafts the candidates of one sequence, for the loop of `decoding.py` or transformers' own assisted decoding.

    `ValueError` for invalid settings, trees that target or draft cannot read, or a batch that the draft cannot serve.

    Args:
        setup: the draft, head and settings.
        generation_config: the call's, as prepared by `generate()`.
        logits_processor: the call's. Processors that may be called for candidates process the draft's logits, too.
        attention_mask: `[1, length]` of the prompt, or `None`. The draft does not read masked tokens.
        target: the model that verifies.
        first: in later rows of a batch, the generator of the first row, whose captured draft steps serve all rows.

    Attributes:
        stats: counts and seconds of this generation.
        products: context in which target and draft run with faster matrix multiplications, on a CPU.
        method: drafts chains (`ChainDrafting`) or trees (`TreeDrafting`).
        plan: the costs and decisions of `rule="throughput"`; `None` for other rules.
        observers: objects whose `record_outcome` is called after each round: `stats`, `lookup` and those of `method`.
        lookup: finds candidates in earlier text, if enabled; else `None`.
        times: measures the seconds of the rounds, if the costs of `plan` follow them; else `None`.
        is_paused: whether the draft reads and proposes nothing, because that is faster or the draft's cache is lost.
        emitted: in captured rounds, the new tokens of the sequence that `lookup` has not read yet.
        corrections: the target's latest choices, if the draft's logits are mixed with them; else `None`.
    """

    def __init__(
        self, setup: DraftSetup, generation_config: GenerationConfig,
        logits_processor: Sequence[LogitsProcessor] | None = None, attention_mask: Tensor | None = None, *,
        target: CausalLM, first: SpecDecPPCandidateGenerator | None = None,
    ) -> None:  # fmt: skip
        setup.check()
        self.setup, self.vocab_size = setup, num_logits(target)
        self._target, self._generation_config = target, generation_config
        session = setup.drafter.row_session if setup.rows > 1 else setup.drafter.session
        self.session: DraftingSession = session(self.vocab_size)
        most = math.inf if generation_config.max_length is None else generation_config.max_length
        # All candidates need positions in the target. The token after them counts for `most`, but is not read.
        self._longest = min(longest_text(target), most - 1)
        self.eos_token_ids = eos_ids(generation_config)
        sample: Randomness = TorchRandomness() if setup.drafter.places else AsPlain()
        self.randomness = sample if generation_config.do_sample else None
        self.processing = Processing(logits_processor or [])
        captures = setup.speculation.graphs == "auto" and graphs.can_capture(input_device(target))
        processing, greedy = self.processing.for_draft(), self.randomness is None
        self.draft_processing, self.corrections = setup.draft_processing(processing, target, greedy, captures)
        chains = why_chains(setup, target, captures, self.processing)
        decided = setup.decided(target, greedy, self.processing, self.corrections is not None, chains)
        self.stats = SpeculationStats(remedies=setup.remedies, decided=decided)
        own = setup.drafter.round_steps(self.vocab_size, setup.speculation.compile) if captures and not first else None
        self.round_steps: RoundSteps | None = own if first is None else first.round_steps
        self.plan: Plan | None = plan_of(setup, target, generation_config, captures, trees=chains is None)
        how = self.session, self.draft_processing, self.randomness, self.eos_token_ids
        self.method: ChainDrafting | TreeDrafting
        if chains is None:
            self.method = trees = TreeDrafting(setup, *how, decided)
            trees.set_plan(self.plan, target, generation_config)
        else:
            self.method = ChainDrafting(*how, rule_of(setup, target, generation_config, self.plan))
        self.lookup: LookingUp | None = looking_up(setup, target, generation_config, self.plan)
        self.observers = self._observers()
        self.times: RoundTimes | None = None
        if self.plan is not None:
            self.plan.begin_text()
            if self.plan.known.follows:
                self.times = RoundTimes(computing_clock(input_device(target), setup.drafter.device))
        self.is_paused, self._num_accepted = False, 0
        self._mask, self._shown = attention_mask, 0  # `_shown`: tokens of the sequence passed to the draft so far

    def _observers(self) -> list[Any]:
        return [each for each in (self.stats, self.lookup, *self.method.observers) if each is not None]

    @cached_property
    def products(self) -> FasterProducts:
        """Made by `DraftSetup.products` at first use, which is slow: every weight with a copy is read."""
        begin = time.perf_counter()
        products = self.setup.products(self._target)
        self._describe(products)
        self.stats.preparing_seconds += time.perf_counter() - begin
        return products

    def begin_text(self, length: int) -> None:
        """Called before a prompt of `length` tokens is read: sets `is_paused` if `plan` expects no gain by drafting."""
        # Captured rounds decide later whether to draft, and may need the target's states of the prompt.
        follows = self.lookup is not None or not self.setup.drafter.places or self.round_steps is not None
        self.is_paused = self.plan is not None and not follows and self.plan.leaves_to_target(length)
        if self.is_paused:
            self.corrections = None

    def propose(self, input_ids: Tensor, max_tokens: int | None = None, states: Tensor | None = None) -> DraftTree:
        """Draft the candidates of the next round: a token tree, or a chain, which has one branch.

        Args:
            input_ids: `[1, length]`, the prompt and all emitted tokens.
            max_tokens: largest number of candidates, in addition to the limits of the rule and of `max_length`. Trees
                of `rule="throughput"` stop there; of other trees, one that could exceed it is left empty.
            states: `[1, n, size]`, if the draft reads hidden states of the target: those at the n tokens committed
                in the last round.
        """
        (tree,) = propose_together([self], [input_ids], [max_tokens], [states])
        return tree

    def record_outcome(self, tree: DraftTree, path: list[int], length: int) -> None:
        """Called after a round with the accepted nodes `path` of `tree`, in a sequence of `length` tokens: calls the
        observers, frees the tree's logits and q, and may end a pause (`is_paused`)."""
        self._num_accepted = len(path)
        if self.plan is not None and (tree.num_drawn or not len(tree)):
            self.plan.num_tokens += len(path) + 1
        for each in self.observers:
            each.record_outcome(tree, path)
        tree.scores.clear()  # large tensors
        tree.distributions.clear()
        if self.is_paused and self.plan is not None:  # a draft that reads no target states may begin now
            self.is_paused = self.setup.drafter.reads is not None or self.plan.leaves_to_target(length)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Any, Any]:
        """Draft k candidates in transformers' form: token ids `[1, length + k]`, and logits `[1, k, vocab]` whose
        softmax is q (`None` if k is 0). `ValueError` if the draft reads hidden states, or settings require trees."""
        if self.setup.drafter.reads is not None:
            raise ValueError(NO_STATES)
        self.method.refuse(NO_TREES)
        self._tree = chain = cast(Chain, self.propose(input_ids))
        if not len(chain):
            return input_ids, None
        candidates = input_ids.new_tensor([chain.candidates])
        looked_up = chain.candidates[chain.num_drawn :]
        certain = functional.one_hot(input_ids.new_tensor(looked_up), self.vocab_size).log()
        return torch.cat((input_ids, candidates), dim=1), torch.stack([*chain.drawn_from, *certain])[None]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor | None, num_matches: int) -> None:
        """Called by transformers after a round. `num_matches`: number of accepted candidates of the last chain."""
        self.record_outcome(self._tree, list(range(1, int(num_matches) + 1)), input_ids.shape[1])

    def begin_captured(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Called before the first captured round. Returns unmasked tokens `[1, n]` for the draft to read: all, and
        `None`; or, for a draft that reads states, the last n, and the target's states `[1, n, size]` before them."""
        self.observers = [self.stats, *([rule] if isinstance(rule := self.method.rule, Threshold) else [])]
        tokens, states = self._new_tokens(input_ids, states)
        if self.lookup is not None:
            self.observers.append(self.lookup)
            self.lookup.choice = None  # the shape of a round is chosen by measured rounds
            self.emitted = tokens[0].tolist()
        if states is None:
            return tokens, None
        known = min(states.shape[1], tokens.shape[1])  # fewer than the tokens if a cache is reused
        return tokens[:, -known:], states[:, -known:]

    def look_up(self, length: int) -> LookingUp | None:
        """Called before a captured round of `length` earlier tokens: makes `lookup` read `emitted` and search."""
        if self.lookup is not None:
            self.lookup.look_up(self.emitted, int(min(MOST_CANDIDATES, self.left(length))))
        return self.lookup

    def left(self, length: int) -> float:
        """Number of candidates that may follow a sequence of `length` tokens; infinite without a limit."""
        return max(self._longest - length, 0)

    def learned_rates(self, trees: bool = False) -> AcceptanceRates:
        """Acceptance rates of earlier rounds with this target and this way of sampling, of chains or trees."""
        return self.setup.learned_rates(self._target, self._generation_config, trees)

    def record_estimates(self, estimates: list[float]) -> None:
        """Called after a captured round: gives the candidates' acceptance estimates to `rule="threshold"`."""
        if isinstance(rule := self.method.rule, Threshold):
            rule.estimates = estimates

    def restart_draft(self) -> None:
        """Called if captured rounds have failed: makes draft and lookups read the sequence from its start again."""
        self.lookup = looking_up(self.setup, self._target, self._generation_config, self.plan)
        self._shown, self.observers = 0, self._observers()

    def stop_drafting(self) -> None:
        """Stop drafting for the rest of this sequence, because the draft's cache is lost."""
        self.is_paused, self.plan, self.times, self.observers = True, None, None, [self.stats]

    def _describe(self, products: FasterProducts) -> None:
        """Describe the present matrix multiplications in `stats`."""
        self.stats.decided["products"] = products.described

    def finish(self) -> None:
        """Called at the end of a call: adds its measured rounds to the learned costs. Errors are logged, not raised."""
        self._describe(self.products)  # copies may have been made meanwhile
        if self.plan is not None and self.times is not None:
            try:
                self.plan.end_text(self.times)
            except Exception as error:  # noqa: BLE001 - the text is complete, and must be returned
                logger.warning(f"Nothing was learned of what the rounds of this text cost: {error!r}.")

    def begin_round(self, input_ids: Tensor, max_tokens: int | None, states: Tensor | None) -> int:
        """Pass new tokens to the draft and the lookups. Returns the largest depth of the candidates of this round."""
        session, draft = self.session, self.setup.drafter
        new_tokens, states = self._new_tokens(input_ids, states)
        session.read_verified(new_tokens, self._num_accepted, states)
        room = int(min(MOST_CANDIDATES, max(self._longest - input_ids.shape[1], 0)))
        most = MOST_CANDIDATES if max_tokens is None else max_tokens
        if self.lookup is not None:
            self.lookup.look_up(new_tokens[0].tolist(), min(room, most))
        return max(int(min(self.method.longest(room, most), draft.max_length - session.length + 1, draft.places)), 0)

    def _new_tokens(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens `[1, n]` not yet passed to the draft, and `states` `[1, m, size]`, both without masked tokens."""
        new, is_prompt = input_ids[:, self._shown :], not self._shown
        self._shown = input_ids.shape[1]
        return without_padding(new, states, self._mask) if is_prompt and self._mask is not None else (new, states)


@torch.inference_mode()
def propose_together(
    rows: Sequence[SpecDecPPCandidateGenerator], texts: Sequence[Tensor], most: Sequence[int | None],
    states: Sequence[Tensor | None], batch: Any = None,
) -> list[DraftTree]:  # fmt: skip
    """Draft the candidates of one sequence, or chains for the rows of a batch in shared draft passes.

    Args:
        texts, most, states: the arguments of `propose` for each row.
        batch: runs the draft for all rows of a batch (`Draft.batch`); `None` if each row runs it alone.
    """
    first, plan, lengths = rows[0], rows[0].plan, [text.shape[1] for text in texts]
    if plan is not None and not first.is_paused:
        plan.set_length(max(lengths))  # before the round's clock, because a new plan takes long
    # Costs are those of a complete batch, so they are measured only until a row has ended.
    times = first.times if len(rows) == first.setup.rows else None
    if times is not None:
        times.begin_round()
    if first.is_paused:
        return [Chain() for _ in rows]
    longest = list(map(SpecDecPPCandidateGenerator.begin_round, rows, texts, most, states))
    unread = max([row.session.unread for row in rows])
    if plan is not None:
        plan.weigh_reading(unread, first.left(min(lengths)))
    lookups = [row.lookup for row in rows if row.lookup is not None]
    looks_up = counts_of(lookups) if lookups else [0] * len(rows)
    for place, count in enumerate(looks_up):
        if count or (plan is not None and plan.waits):
            longest[place] = 0
    if isinstance(first.method, TreeDrafting):
        trees: list[DraftTree] = [first.method.draft(texts[0], longest[0])]
    else:
        methods = [cast(ChainDrafting, row.method) for row in rows]
        prepare = partial(run_shared, [each.rule for each in methods], batch) if first.setup.rows > 1 else None
        trees = [*draft_chains(list(map(ChainDrafting.draft, methods, texts, longest)), prepare)]
        for row, tree in zip(rows, trees, strict=True):
            tree.passes = row.session.passes
    if times is not None:
        passes = max([row.session.passes for row in rows])
        further = max([len(tree.scores) for tree in trees]) - passes
        times.drafted(None if any(looks_up) else DraftWork(passes, unread - 1, max(further, 0)))
    if not lookups and not first.method.makes_chains:
        return trees
    given = zip(rows, trees, looks_up, strict=True)
    return [with_lookups(tree, row.lookup, count, row.method, first.setup.rows == 1) for row, tree, count in given]


class TreeDrafting:
    """Drafts the token trees of one sequence, with the interface of `ChainDrafting`. `ValueError` if the estimator
    cannot estimate a candidate's acceptance before it is drawn, or `tree="static"` has no measured rates.

    Args:
        decided: `SpeculationStats.decided`; `refuse` stores its reason there.

    Attributes:
        most, limit: the largest number of nodes of any tree, and of the next one if `throughput` is set.
        throughput: decides how far trees grow, and learns from rounds (`rule="throughput"`). `None`: a fixed budget.
    """

    for_trees, rule = True, None

    def __init__(
        self, setup: DraftSetup, session: DraftingSession, processing: Processing, randomness: Randomness | None,
        eos_token_ids: frozenset[int], decided: dict[str, str],
    ) -> None:  # fmt: skip
        self.setup, self.config, self.session, self.decided = setup, setup.speculation, session, decided
        self.shape = setup.static_shape(greedy=randomness is None)
        estimator = setup.estimator if self.shape is None else DraftProbability()  # for statistics only
        check_estimator(estimator)
        self.most = self.limit = self.config.most_drafted if self.shape is None else size(self.shape)
        self.slots = Slots(estimator, randomness, eos_token_ids, embed=session.embed)
        self.processing, self.pace = processing, growth.ThresholdSchedule()
        self.makes_chains = self.config.tree == "auto"
        self.throughput: TreePlan | None = None

    def set_plan(self, plan: Plan | None, target: CausalLM, generation: GenerationConfig) -> None:
        """Called once: lets `plan` decide how trees grow or, without one, calibrates estimates (`Decisions.adapt`)."""
        if plan is not None:
            self.throughput = rule = cast(TreePlan, plan)
            self.slots.rates, self.slots.expected = rule.rates, rule.expected
            if self.config.tree == "auto":
                self.slots.branches = self.setup.tries_trees(target, rule)
                if rule.refused:
                    self.refuse(rule.refused)
        elif self.setup.decisions.adapt and self.shape is None:
            self.slots.rates = self.setup.learned_rates(target, generation, trees=True)

    def refuse(self, reason: str) -> None:
        """Draft only chains from now on, because of `reason`; `LateRefusalError` if the settings require trees."""
        if self.config.draws_trees:
            raise LateRefusalError(reason)
        self.slots.branches, self.decided["tree"] = False, f"chains: {reason}"

    @property
    def observers(self) -> list[TreeDrafting]:
        return [self]

    @property
    def branches(self) -> bool:
        return self.slots.branches

    def longest(self, room: int, most: int) -> int:
        # Removing nodes would depend on the drawn candidates, so a tree that could have too many nodes is left empty.
        # Trees of `rule="throughput"` stop at `room`.
        self.limit = min(most, self.most)
        return room if most >= (self.most if self.throughput is None else 1) else 0

    def draft(self, input_ids: Tensor, longest: int) -> DraftTree:
        """Draft a tree with at most `longest` levels of candidates after the sequence `input_ids` `[1, length]`."""

        def expand(tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
            scores, hidden = self.session.expand(tree, nodes)
            if not self.processing.does_nothing:
                paths = [tree.path(node) for node in nodes]
                scores = self.processing.after_each(input_ids, paths, scores).to(scores)
            return scores, hidden

        config, threshold = self.config, self.setup.decisions.tree_threshold
        depth = min(longest, self.setup.decisions.tree_depth) if self.shape is None else longest
        root, rule = int(input_ids[0, -1]), self.throughput
        if not depth or (rule is not None and not rule.should_draft(self.session.unread)):
            return DraftTree(root)
        grown = Growth(expand, self.slots, root, depth)
        if rule is not None:
            rule.limit = self.limit
            rule.grow(grown, threshold)
        elif self.shape is not None:
            growth.grow_shape(grown, self.shape)
        elif config.tree == "dyspec":
            growth.grow_by_level(grown, config.tree_budget, self.pace, threshold)
        else:
            growth.grow_exactly(grown, config.tree_budget, threshold)
        grown.tree.passes = self.session.passes
        return grown.tree

    def survival(self, tree: DraftTree) -> float | None:
        if not set(tree.candidates).isdisjoint(self.slots.eos_token_ids):
            return None
        return tree.values[-1] * self.slots.calibrated(tree.estimates[-1])

    def record_outcome(self, tree: DraftTree, path: list[int]) -> None:
        self.session.commit_path(path)
        if self.throughput is not None:
            self.throughput.record_outcome(tree, path)
        elif self.slots.rates is not None:
            self.slots.rates.observe_tree(tree.judged(path))
