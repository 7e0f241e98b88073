"""The drafting of one generation, which has transformers' interface, too (`SpecDecPPCandidateGenerator`), and how trees
are drafted (`TreeDrafting`); `drafting/chain.py` drafts chains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.drafting.chain import ChainDrafting, Drafting, Threshold, point_mass
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftProbability
from hf_specdecpp.generation.refusals import LateRefusalError
from hf_specdecpp.generation.setup import DraftSetup, looking_up, plan_of, rule_of, why_chains, without_padding
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, modules_of, num_logits
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain, TorchRandomness, TreeRandomness
from hf_specdecpp.throughput.known_costs import Drafting as Drafted
from hf_specdecpp.throughput.known_costs import RoundTimes
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.trees import TreePlan
from hf_specdecpp.trees import growth
from hf_specdecpp.trees.growth import Growth, Slots, SlotValuation, SoftmaxBuffer, check_estimator
from hf_specdecpp.trees.head_siblings import Level
from hf_specdecpp.trees.shapes import size
from hf_specdecpp.trees.tree import Chain, DraftTree

logger = logging.get_logger("hf_specdecpp")

NO_TREES = "This generator drafts trees, which transformers' own loop does not verify. Set tree=False."
NO_STATES = "This generator's draft reads hidden states of the target, which transformers' own loop does not hand over."


class SpecDecPPCandidateGenerator(CandidateGenerator):
    """Drafts the candidates of one `generate()` call and learns from their fate, in transformers' own assisted decoding
    loop and in ours (`decoding.py`); `ValueError` if the config or a processor cannot be used, a model cannot read
    trees, or the draft cannot do what is asked (`Draft.cannot`).

    Args:
        setup: the draft and what decides how far it drafts.
        generation_config: the target's, as prepared by `generate()`.
        logits_processor: the target's processors; they are applied to the draft's logits too.
        attention_mask: `[1, length]` of the prompt, or `None`. Masked tokens are not shown to the draft.
        target: the model that decides.

    Attributes:
        stats: of this generation.
        products: the matrix products of target and draft, within which the loops draft and verify.
        method: drafts chains, or trees.
        plan: of `rule="throughput"`, which reckons with what rounds cost; `None` for others.
        observers: are told of each round which of its candidates stand: statistics, lookups, the rule or the trees.
        lookup: finds candidates in the text, if it is asked to.
        times: of its rounds, where the costs follow them.
        rests: whether rounds are left to the target, as drafting does not pay: nothing is noted for the draft then.
        successors: what the target said lately, which the draft's logits are mixed with, if they shall be.
    """

    def __init__(
        self,
        setup: DraftSetup,
        generation_config: GenerationConfig,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        attention_mask: Tensor | None = None,
        *,
        target: CausalLM,
    ) -> None:
        setup.check()
        self.setup, self.vocab_size = setup, num_logits(target)
        self._target, self._generation_config = target, generation_config
        session = setup.drafter.row_session if setup.rows > 1 else setup.drafter.session
        self.session: Reading = session(self.vocab_size)
        self.max_length: int | None = generation_config.max_length
        self.eos_token_ids = eos_ids(generation_config)
        sample: TreeRandomness = TorchRandomness() if setup.drafter.places else AsPlain()
        self.randomness = sample if generation_config.do_sample else None
        self.processing = Processing(logits_processor or [])
        captures = setup.speculation.graphs == "auto" and graphs.can_capture(input_device(target))
        processing, greedy = self.processing.for_draft(), self.randomness is None
        self.draft_processing, self.successors = setup.draft_processing(processing, target, greedy, captures)
        at_once = self.processing.answers_all
        verification = "equality" if greedy else setup.decisions.verification if at_once else "token"
        chains = why_chains(setup, target, captures, self.processing)
        decided = setup.decided(target, verification, self.successors is not None, chains)
        self.stats = SpeculationStats(remedies=setup.remedies, decided=decided)
        self.round_steps = setup.drafter.round_steps(self.vocab_size) if captures else None
        self._products: FasterProducts | None = None
        self.plan: Plan | None = plan_of(setup, target, generation_config, captures, trees=chains is None)
        how = self.session, self.draft_processing, self.randomness, self.eos_token_ids
        self.method: ChainDrafting | TreeDrafting
        if chains is None:
            self.method = trees = TreeDrafting(setup, *how, decided)
            trees.follow(self.plan, target, generation_config)
        else:
            self.method = ChainDrafting(*how, rule_of(setup, target, generation_config, self.plan))
        self.lookup: LookingUp | None = looking_up(setup, target, generation_config, self.plan)
        self.observers = self._observers()
        self.times: RoundTimes | None = None
        if self.plan is not None:
            self.plan.begin_text()
            if self.plan.known.follows:
                self.times = RoundTimes(computing_clock(input_device(target), setup.drafter.device))
        self.rests = False
        self._mask, self._shown = attention_mask, 0  # the latter: tokens of the text that the draft was shown
        self._draft_max_length = setup.drafter.max_length
        self._num_accepted = 0

    def _observers(self) -> list[Any]:
        return [each for each in (self.stats, self.lookup, *self.method.observers) if each is not None]

    @property
    def products(self) -> FasterProducts:
        """Made where they are needed first: that reads every weight that there is a copy of."""
        if self._products is None:
            begin = time.perf_counter()
            self._products = self.setup.products(self._target)
            own = set(modules_of(self._target))
            self.stats.has_products = any(layer in own for layer in self._products.layers)
            self.stats.decided["products"] = self._described()
            self.stats.preparing_seconds += time.perf_counter() - begin
        return self._products

    def share_products(self, other: SpecDecPPCandidateGenerator) -> None:
        """Take the products of another row of the same batch: to make them reads every weight with a copy."""
        self._products = other.products

    def begin_text(self, length: int) -> None:
        """Find out, before a prompt of so many tokens is read, whether the text rests."""
        # Captured rounds choose by themselves whether to draft, and may want the target's states for that.
        follows = self.lookup is not None or not self.setup.drafter.places or self.round_steps is not None
        self.rests = self.plan is not None and not follows and self.plan.rests(length)
        if self.rests:
            self.successors = None

    @torch.inference_mode()
    def propose(self, input_ids: Tensor, max_tokens: int | None = None, states: Tensor | None = None) -> DraftTree:
        """Draft the next round: a token tree, or a chain, which has one branch.

        Args:
            input_ids: `[1, length]`, everything emitted so far, the prompt included.
            max_tokens: cap on the candidates, on top of the rule's own and of the room left under `max_length`. Where a
                tree may have more nodes there is none.
            states: `[1, n, size]`, if the draft reads them: the target's at the n tokens that it has read since the
                last round, candidates that were not accepted left out.
        """
        times, lookup, method = self.times, self.lookup, self.method
        if self.plan is not None and not self.rests:
            self.plan.follow(input_ids.shape[1])  # a new plan takes a while, which is no cost of this round
        if times is not None:
            times.begin()
        if self.rests:
            return Chain()
        longest, looks_up = self._begin_round(input_ids, states, max_tokens), 0
        read = self.session.unread - 1
        if lookup is not None and ((looks_up := lookup.count()) or lookup.waits):
            longest = 0
        tree = method.draft(input_ids, longest)
        if times is not None:
            times.drafted(Drafted(tree.passes, read, max(len(tree.scores) - tree.passes, 0)))
        if lookup is not None and method.branches:
            lookup.branch(tree, looks_up)
        if method.makes_chains:
            tree = tree.as_chain()
        if lookup is not None and not method.branches:
            tree = lookup.take(looks_up) if looks_up else lookup.extend(tree, method.survival(tree))
        return tree

    def draft_step_by_step(self, input_ids: Tensor, states: Tensor | None) -> Drafting:
        """A chain as a coroutine, so that the rows of a batch draft together."""
        longest = self._begin_round(input_ids, states, None)
        return cast(ChainDrafting, self.method).step_by_step(input_ids, longest)

    def saw(self, tree: DraftTree, path: list[int], length: int) -> None:
        """Learn which nodes of the last round, before which the text had this length, were accepted."""
        self._num_accepted = len(path)
        for each in self.observers:
            each.saw(tree, path)
        tree.scores.clear()  # which are large
        tree.distributions.clear()
        if self.rests and self.plan is not None:  # a draft that needs no states may begin now
            self.rests = self.setup.drafter.reads is not None or self.plan.rests(length)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Candidates in transformers' form: `[1, length + k]` token ids, and `[1, k, vocab]` logits whose softmax the k
        candidates after `input_ids` `[1, length]` were drawn from (`None` when k is 0)."""
        if self.setup.drafter.reads is not None:
            raise ValueError(NO_STATES)
        self.method.refuse(NO_TREES)
        self._tree = chain = cast(Chain, self.propose(input_ids))
        if not len(chain):
            return input_ids, None
        candidates = input_ids.new_tensor([chain.candidates])
        looked_up = chain.candidates[chain.num_drawn :]
        certain = [point_mass(token, self.vocab_size, input_ids.device) for token in looked_up]
        return torch.cat((input_ids, candidates), dim=1), torch.stack([*chain.drawn_from, *certain])[None]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor | None, num_matches: int) -> None:  # noqa: ARG002
        """Learn that `num_matches` candidates of the last chain were accepted."""
        self.saw(self._tree, list(range(1, int(num_matches) + 1)), input_ids.shape[1])

    def begin_captured(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All tokens of a text `[1, length]` that captured rounds draft after, and the target's states before each."""
        self.observers = [self.stats, *([rule] if isinstance(rule := self.method.rule, Threshold) else [])]
        tokens, states = self._new(input_ids, states)
        if states is None:
            return tokens, None
        known = min(states.shape[1], tokens.shape[1])  # fewer than the tokens where a cache is carried on
        return tokens[:, -known:], states[:, -known:]

    def learned_rates(self, trees: bool = False) -> AcceptanceRates:
        """What rounds of this target, drawn in this way, have said of estimates."""
        return self.setup.learned_rates(self._target, self._generation_config, trees)

    def note_captured(self, estimates: list[float]) -> None:
        """Take note of what `rule="threshold"` judged the candidates of a captured round by."""
        if isinstance(rule := self.method.rule, Threshold):
            rule.estimates = estimates

    def begin_again(self) -> None:
        """The first round is not captured: the draft has been shown nothing yet."""
        self._shown, self.observers = 0, self._observers()

    def _described(self) -> str:
        """How the layers of target and draft multiply now."""
        return f"{self.products.described}{', draft in int8' if self.setup.drafts_in_int8 else ''}"

    def stop(self) -> None:
        """Draft nothing more in this text, of which the draft has not read all."""
        self.rests, self.plan, self.times, self.observers = True, None, None, [self.stats]

    def finish(self) -> None:
        """Learn, at the end of a generation, what its rounds cost. Whatever goes wrong here, the text is complete."""
        self.stats.decided["products"] = self._described()
        if self.plan is not None and self.times is not None:
            try:
                self.plan.learn(self.times)
            except Exception as error:  # noqa: BLE001
                logger.warning(f"Nothing was learned of what the rounds of this text cost: {error!r}.")

    def _begin_round(self, input_ids: Tensor, states: Tensor | None, max_tokens: int | None) -> int:
        """Let draft and lookups take note of what is new; the longest path of candidates that there is room for."""
        session, drafter, room = self.session, self.setup.drafter, MOST_CANDIDATES
        new_tokens, states = self._new(input_ids, states)
        session.begin_round(new_tokens, self._num_accepted, states)
        if self.max_length is not None:  # under which one place belongs to the token that the target adds
            room = max(self.max_length - input_ids.shape[1] - 1, 0)
        most = MOST_CANDIDATES if max_tokens is None else max_tokens
        if self.lookup is not None:
            unread = session.unread if self.setup.rows == 1 else 0  # the rows of a batch read together
            self.lookup.begin_round(new_tokens[0].tolist(), min(room, most), unread)
        longest = self.method.longest(room, most)
        return int(max(min(room, longest, self._draft_max_length - session.length + 1, drafter.places), 0))

    def _new(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the draft was not shown of a text: tokens `[1, n]`, and the target's states `[1, m, size]` there."""
        new, is_prompt = input_ids[:, self._shown :], not self._shown
        self._shown = input_ids.shape[1]
        return without_padding(new, states, self._mask) if is_prompt and self._mask is not None else (new, states)


class TreeDrafting:
    """Drafts the token trees of one text: grows them on the draft. It has the answers of `ChainDrafting`, and a pace of
    growth that learns; `ValueError` if the estimator cannot value slots, or a static tree has neither shape nor rates.

    Args:
        setup: its settings say which algorithm; its estimator values slots, but for static trees.
        session, processing, randomness, eos_token_ids: as in `SpecDecPPCandidateGenerator`.
        decided: what was decided for the generation (`SpeculationStats.decided`).

    Attributes:
        most, room: nodes that a tree may have, and that of the next round, if it grows by costs.
        throughput: for `"dyspec"`: decides how far trees grow, and learns from them. `None` uses up the budget.
        rates: calibrates the estimates of a budget's trees; `None` takes them as they are.
        rule: none stops trees.
    """

    for_trees, rule = True, None

    def __init__(
        self, setup: DraftSetup, session: Reading, processing: Processing, randomness: TreeRandomness | None,
        eos_token_ids: frozenset[int], decided: dict[str, str],
    ) -> None:  # fmt: skip
        self.decided = decided
        self.setup, self.config, self.session = setup, setup.speculation, session
        self.shape = setup.static_shape(greedy=randomness is None)
        estimator = setup.estimator if self.shape is None else DraftProbability()  # for the records only
        check_estimator(estimator)
        self.most = self.room = self.config.most_drafted if self.shape is None else size(self.shape)
        self.slots = Slots(estimator, randomness, eos_token_ids, buffer=SoftmaxBuffer(self.most))
        self.processing = processing
        self.pace = growth.ThresholdSchedule()
        self.makes_chains = self.config.tree == "auto"
        self.throughput: TreePlan | None = None
        self.rates: AcceptanceRates | None = None

    def follow(self, plan: Plan | None, target: CausalLM, generation: GenerationConfig) -> None:
        """Let trees grow as `rule="throughput"` says, if there is a plan, else by what is known of the target."""
        if plan is not None:
            self.slots.valuation = self.throughput = rule = plan.rule(self.slots.estimator)
            if self.config.tree == "auto":
                self.slots.branches = self.setup.tries_trees(target, rule)
                if rule.refused:
                    self.refuse(rule.refused)
        elif self.setup.decisions.adapt and self.shape is None:
            self.rates = self.setup.learned_rates(target, generation, trees=True)
            self.slots.valuation = SlotValuation(self.rates)

    def refuse(self, reason: str) -> None:
        """Draft chains in this text; `LateRefusalError` where a kind of tree is asked for."""
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
        # To cut a tree would depend on what was drawn, so there is none where it might have more nodes; those of
        # `rule="throughput"` stop growing before.
        self.room = min(most, self.most)
        return room if most >= (self.most if self.throughput is None else 1) else 0

    def draft(self, input_ids: Tensor, longest: int) -> DraftTree:
        """A tree below the last token of `input_ids` `[1, length]`, no deeper than `longest`."""

        def expand(tree: DraftTree, nodes: list[int]) -> Level:
            passes = self.session.passes
            scores, hidden = self.session.expand(tree, nodes)
            if not self.processing.does_nothing:
                paths = [tree.path(node) for node in nodes]
                scores = self.processing.after_each(input_ids, paths, scores).to(scores)
            return Level(scores, hidden, self.session.embed, self.session.passes - passes)

        config, threshold = self.config, self.setup.decisions.tree_threshold
        depth = min(longest, self.setup.decisions.tree_depth) if self.shape is None else longest
        root, rule = int(input_ids[0, -1]), self.throughput
        if not depth or (rule is not None and not rule.starts(self.session.unread)):
            return DraftTree(root)
        grown = Growth(expand, self.slots, root, depth)
        if rule is not None:
            rule.room = self.room
            rule.grow(grown, threshold)
        elif self.shape is not None:
            growth.grow_shape(grown, self.shape)
        elif config.tree == "dyspec":
            growth.grow_by_level(grown, config.tree_budget, self.pace, threshold)
        else:
            growth.grow_exactly(grown, config.tree_budget, threshold)
        return grown.tree

    def survival(self, tree: DraftTree) -> float | None:
        if not set(tree.candidates).isdisjoint(self.slots.eos_token_ids):
            return None
        return tree.values[-1] * self.slots.valuation.calibrated(tree.estimates[-1])

    def saw(self, tree: DraftTree, path: list[int]) -> None:
        self.session.keep(path)
        if self.throughput is not None:
            self.throughput.saw(tree, path)
        elif self.rates is not None:
            self.rates.observe_tree(tree.judged(path))
