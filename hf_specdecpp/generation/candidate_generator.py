"""`SpecDecPPCandidateGenerator`: transformers' interface to the drafting of one generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from hf_specdecpp.captured import graphs
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.drafting.chain import Drafting, at_once, drafted_alone, drafting, point_mass, stepper
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule, Threshold
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftProbability, Estimator
from hf_specdecpp.generation.setup import DraftSetup, looking_up, plan_of, rule_of
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.tree_drafting import TreeDrafting
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, longest_text
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain, TorchRandomness, TreeRandomness
from hf_specdecpp.sampling.successors import MixedProcessing, Successors
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.round_times import Drafting as Drafted
from hf_specdecpp.throughput.round_times import RoundTimes
from hf_specdecpp.throughput.target_passes import passes_of
from hf_specdecpp.trees.checks import check_tree
from hf_specdecpp.trees.tree import DraftTree

logger = logging.get_logger("hf_specdecpp")

MOST_READ = 32  # tokens that the draft reads at the beginning of a round whose drafting tells what a step costs


class SpecDecPPCandidateGenerator(CandidateGenerator):
    """Drafts the candidates of one `generate()` call and learns from their fate.

    It works in transformers' own assisted decoding loop and in ours (`decoding.py`); both doors of the assistant draft
    through it.

    Args:
        setup: the draft and what decides how far it drafts.
        generation_config: the target's, as prepared by `generate()`.
        logits_processor: the target's processors; they are applied to the draft's logits too.
        attention_mask: `[1, length]` of the prompt, or `None`. Masked tokens are not shown to the draft.
        randomness: draws the candidates when sampling.
        target: the model that decides; `rule="throughput"` measures it. Trees are drafted only where it is given.
        products: of another row of the same batch. To make them reads every packed weight.

    Attributes:
        stats: of this generation.
        products: the matrix products of target and draft, within which the loops draft and verify.
        trees: drafts trees; `None` where chains are drafted.
        rule: stops chains; `None` where trees are drafted.
        plan: of `rule="throughput"`, which reckons with what rounds cost; `None` for others.
        lookup: finds candidates in the text, if it is asked to.
        times: of its rounds, where the costs follow them.
        rests: whether rounds are left to the target, as drafting does not pay: nothing is noted for the draft then.
        successors: what the target said lately, which the draft's logits are mixed with, if they shall be.

    Raises:
        ValueError: the speculation config or a processor cannot be used, a model cannot read trees, or the draft
            cannot do what is asked of it (`Draft.cannot`).
    """

    def __init__(
        self,
        setup: DraftSetup,
        generation_config: GenerationConfig,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        attention_mask: Tensor | None = None,
        randomness: TreeRandomness | None = None,
        target: CausalLM | None = None,
        products: FasterProducts | None = None,
    ) -> None:
        setup.speculation.validate()
        draws_trees = setup.speculation.tree is not None and target is not None
        for asked, what in ((target is None, "unattached"), (setup.rows > 1, "batches"), (draws_trees, "trees")):
            if asked:
                setup.drafter.check_can(what)
        width = setup.vocab_size if target is None else target.config.get_text_config().vocab_size
        self.setup = setup
        self.vocab_size = width or 0
        session = setup.drafter.row_session if setup.rows > 1 else setup.drafter.session
        self.session: Reading = session(self.vocab_size)
        self.processing = Processing(logits_processor or [])
        self.draft_processing = self.processing if target is None else self.processing.for_draft()
        greedy = not generation_config.do_sample
        temperature = 1.0 if greedy else setup.decisions.draft_temperature
        self.successors: Successors | None = None
        captures = setup.speculation.graphs == "auto" and target is not None and setup.rows == 1
        captures = captures and graphs.can_capture(input_device(target))
        # Rounds that are captured whole are faster than what the target said lately makes others.
        unasked = captures and setup.decisions.draft_successors is None
        mixes = setup.decisions.mixes(greedy, setup.drafter.reads is not None) and not unasked
        if mixes and target is not None and setup.drafter.places:
            self.successors = setup.memory.recall_successors(target, self.vocab_size, setup.drafter.device)
            self.draft_processing = MixedProcessing(self.draft_processing, self.successors, greedy, temperature)
        elif temperature != 1.0:
            self.draft_processing = self.draft_processing.cooled(temperature)
        at_once = target is not None and not self.processing.in_order
        verification = "equality" if greedy else setup.decisions.verification if at_once else "token"
        decided = setup.decided(target, verification, self.successors is not None)
        self.stats = SpeculationStats(suspect=setup.drafter.suspect, remedies=setup.remedies(target), decided=decided)
        self.max_length: int | None = generation_config.max_length
        self.eos_token_ids = eos_ids(generation_config)
        draws = setup.drafter.places > 0
        sample = randomness or (TorchRandomness() if draws else AsPlain())
        self.randomness = sample if generation_config.do_sample else None
        if draws_trees:  # before products that round more coarsely than the check allows for
            check_tree(target, "target")
            setup.drafter.check_tree()
        self._products = products
        self.rests = False
        self._target, self._generation_config = target, generation_config
        self.trees = self._tree_drafting() if draws_trees else None
        self.plan: Plan | None = plan_of(setup, target, generation_config, captures)
        self.rule: StoppingRule | None = None
        if self.trees is None:
            self.rule = rule_of(setup, target, generation_config, self.plan)
        elif target is not None:
            self.trees.follow(self.plan, target, generation_config)
        self.lookup: LookingUp | None = looking_up(setup, target, generation_config, self.plan)
        self.times: RoundTimes | None = None
        if self.plan is not None:
            self.plan.begin_text()
            if target is not None and self.plan.known.follows:
                self.times = RoundTimes(computing_clock(input_device(target), setup.drafter.device))
        self._attention_mask = attention_mask
        self._draft_max_length = setup.drafter.max_length
        self._seen_length = 0
        self._num_accepted = 0
        self._tree = DraftTree.chain()

    @property
    def expects_drafts(self) -> bool:
        """Whether rounds are expected to have candidates."""
        return self.plan is None or self.plan.pays

    @property
    def products(self) -> FasterProducts:
        """Made where they are needed first: that reads every packed weight."""
        if self._products is None:
            begin = time.perf_counter()
            self._products = self.setup.products(self._target)
            own = set() if self._target is None else set(self._target.modules())
            self.stats.has_products = any(layer in own for layer in self._products.layers)
            self.stats.preparing_seconds += time.perf_counter() - begin
        return self._products

    def _tree_drafting(self) -> TreeDrafting:
        return TreeDrafting(self.setup, self.session, self.draft_processing, self.randomness, self.eos_token_ids)

    def begin_text(self, length: int) -> None:
        """Find out, before a prompt of so many tokens is read, whether the text rests."""
        follows = self.lookup is not None or not self.setup.drafter.places
        self.rests = self.plan is not None and not follows and self.plan.rests(length)
        if self.rests and self._target is not None:
            self.successors = None
            if passes_of(self._target, self.setup.other_product(self._target)).chosen.get(1) == "own":
                self._products = FasterProducts()  # hardly a pass of the text would take others

    @torch.inference_mode()
    def propose(self, input_ids: Tensor, max_tokens: int | None = None, states: Tensor | None = None) -> DraftTree:
        """Draft the next round: a token tree, or a chain, which has one branch.

        Args:
            input_ids: `[1, length]`, everything emitted so far, the prompt included.
            max_tokens: cap on the candidates, on top of the rule's own and of the room left under `max_length`. Where a
                tree may have more nodes there is none: cutting it would depend on what was drawn.
            states: `[1, n, size]`, if the draft reads them: the target's at the n tokens that it has read since the
                last round, candidates that were not accepted left out.
        """
        if self.rests:
            if self.times is not None:
                self.times.begin()
            return self.note(DraftTree.chain())
        self._time_round(input_ids)
        if self.trees is not None:
            return self.note(self._draft_tree(self.trees, input_ids, max_tokens, states))
        row = self.drafting(input_ids, max_tokens, states)
        read = self.session.unread - 1
        if self.lookup is not None and ((count := self.lookup.count()) or self.lookup.waits):
            self._time_draft(None)
            return self.note(self.lookup.take(count))
        chain = drafted_alone(row)
        chain.passes = self.session.passes
        self._time_draft(Drafted(chain.passes, read, max(len(chain) - chain.passes, 0)))
        return self.note(self._extended(chain))

    def _extended(self, chain: DraftTree) -> DraftTree:
        """With candidates after it that were looked up, where that pays."""
        if self.lookup is None or self.rule is None or self.rule.survival is None:
            return chain
        if self.eos_token_ids.intersection(chain.candidates):
            return chain
        return self.lookup.extend(chain, self.rule.survival)

    def drafting(self, input_ids: Tensor, max_tokens: int | None, states: Tensor | None) -> Drafting:
        """A chain as a coroutine, so that the rows of a batch draft together: then `note` it."""
        self._begin_round(input_ids, states, max_tokens)
        room = self._room(input_ids.shape[1])
        limit = room if max_tokens is None else min(room, max_tokens)
        if self.rule is None or not self.setup.drafter.places:
            return at_once(DraftTree.chain())
        step = stepper(self.session, self.draft_processing, input_ids, greedy=self.randomness is None)
        return drafting(step, self.rule, self.randomness, limit, self.eos_token_ids, self.session.unread)

    def _draft_tree(
        self, trees: TreeDrafting, input_ids: Tensor, max_tokens: int | None, states: Tensor | None
    ) -> DraftTree:
        self._begin_round(input_ids, states, max_tokens)
        read = self.session.unread - 1
        has_room = max_tokens is None or max_tokens >= trees.most_nodes
        count = 0 if self.lookup is None else self.lookup.count()
        waits = self.lookup is not None and self.lookup.waits
        depth = 0 if count or waits or not has_room else self._room(input_ids.shape[1])
        tree = trees.draft(input_ids, depth)
        self._time_draft(Drafted(tree.passes, read, len(tree.scores) - tree.passes) if tree.passes else None)
        if self.lookup is not None:
            self.lookup.branch(tree, count)
        return tree

    def note(self, tree: DraftTree) -> DraftTree:
        """Take note of what was drafted, which is returned."""
        self._tree, self._num_accepted = tree, 0
        self.stats.draft_passes += tree.passes
        return tree

    def saw(self, tree: DraftTree, path: list[int], length: int) -> None:
        """Learn which nodes of the last round were accepted.

        Args:
            length: of the text before the round.
        """
        if self.rests:
            self._end_rest(length)
            return
        drawn, accepted = tree.num_drawn, len(tree.drawn(path))
        self._num_accepted = len(path)
        self.stats.record(tree, path)
        if self.lookup is not None:
            drafting = None if self.trees is None else 0.0
            if self.trees is not None and self.plan is not None and tree.passes:
                drafting = self.plan.costs.tree_seconds(tree.passes, len(tree.scores), 0.0) - self.plan.costs.overhead
            self.lookup.learn(min(drawn, tree.levels), accepted, len(tree), len(path) + 1, drafting)
        if self.trees is not None:
            self.trees.session.keep(path)
            self.trees.learn(tree, path)
        elif self.rule is not None:
            self.rule.saw(tree, tree.drawn(path))
        tree.forget()

    def _end_rest(self, length: int) -> None:
        """Take note of a round without a draft. One that needs no states may begin now, at this length of the text."""
        self.stats.record(DraftTree.chain(), [])
        if self.plan is not None:
            self.plan.credit.rest()
            self.rests = self.setup.drafter.reads is not None or self.plan.rests(length)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Candidates in transformers' form.

        Args:
            input_ids: `[1, length]`.

        Returns:
            `[1, length + k]` token ids, and `[1, k, vocab]` logits whose softmax the candidates were drawn from (`None`
            when k is 0).
        """
        if self.trees is not None:
            raise ValueError("This generator drafts trees, which only an attached target verifies. Set tree=None.")
        chain = self.propose(input_ids)
        if not len(chain):
            return input_ids, None
        candidates = input_ids.new_tensor([chain.candidates])
        return torch.cat((input_ids, candidates), dim=1), torch.stack(self.scores_of(chain, input_ids.device))[None]

    def scores_of(self, chain: DraftTree, device: torch.device) -> list[Tensor]:
        """For each candidate the `[vocab]` logits whose softmax it was drawn from: all on one token where it was looked
        up."""
        looked_up = chain.candidates[chain.num_drawn :]
        return [*chain.drawn_from, *(point_mass(token, self.vocab_size, device) for token in looked_up)]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor | None, num_matches: int) -> None:  # noqa: ARG002
        """Learn that `num_matches` candidates of the last chain were accepted."""
        self.saw(self._tree, list(range(1, int(num_matches) + 1)), input_ids.shape[1])

    def read_prompt(self, input_ids: Tensor, states: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
        """The session, all that it has to read of a text `[1, length]`, and the target's states there, at once."""
        self.session.begin_round(*self._read_as_round(input_ids, states))
        tokens, states = self.session.take_all()  # type: ignore[attr-defined]  # of a captured draft
        return self.session, tokens, states

    def _read_as_round(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, int, Tensor | None]:
        new_tokens, states = self._read(input_ids, states)
        return new_tokens, 0, states

    def has_positions(self, input_ids: Tensor, count: int) -> bool:
        """Whether both models have positions for so many candidates after a text `[1, length]`."""
        longest = self._draft_max_length if self._target is None else longest_text(self._target)
        return input_ids.shape[1] + count <= min(self._draft_max_length, longest)

    @property
    def estimator(self) -> Estimator:
        """What judges candidates."""
        return self.setup.head or DraftProbability()

    def learned_rates(self) -> AcceptanceRates:
        """What rounds of this target, drawn in this way, have said of estimates."""
        setup = self.setup
        owner = setup.drafter if self._target is None else self._target
        return setup.memory.recall(setup.decisions, owner, self.estimator, self._generation_config).rates

    def note_captured(self, candidates: list[int], estimates: list[float], accepted: int, steps: int) -> None:
        """Learn what became of a round that is over: its candidates, what they were judged by, how many stand."""
        self.stats.draft_passes += steps
        # Their scores stayed on the device, where nobody needs them any more.
        tree, path = DraftTree.chain(candidates, [torch.empty(0)] * len(candidates)), list(range(1, accepted + 1))
        self.stats.record(tree, path)
        if isinstance(self.rule, Threshold):
            self.rule.estimates = estimates
            self.rule.saw(tree, path)
        elif estimates:  # which only `rule="throughput"` asks for beside it
            self.learned_rates().observe(estimates, len(candidates), accepted)

    def begin_again(self) -> None:
        """The draft has read nothing yet."""
        self.session = self.setup.drafter.session(self.vocab_size)
        self._seen_length = 0

    def end_round(self, length: int, width: int) -> None:
        """Take note that a round is over, for the costs of those to come.

        Args:
            length: of the text before it.
            width: tokens that the target's pass read.
        """
        if self.times is not None:
            self.times.end(length, width)

    def finish(self) -> None:
        """Learn, at the end of a generation, what its rounds cost. Whatever goes wrong here, the text is complete."""
        if self.plan is not None and self.times is not None:
            try:
                self.plan.learn(self.times)
            except Exception as error:  # noqa: BLE001
                logger.warning(f"Nothing was learned of what the rounds of this text cost: {error!r}.")

    def remember(self, answer: Tensor) -> None:
        """Keep an answer `[n]` for later lookups, if there shall be any."""
        if self.setup.speculation.lookup == "history":
            self.setup.memory.answers.add(answer.tolist())

    def _time_round(self, input_ids: Tensor) -> None:
        if self.plan is not None and self.setup.rows == 1:  # the rows of a batch share a plan
            self.plan.follow(input_ids.shape[1])  # a new plan takes a while, which is no cost of this round
        if self.times is not None:
            self.times.begin()

    def _time_draft(self, drafted: Drafted | None) -> None:
        if self.times is not None:
            # What the draft reads of a prompt or after a pause is another kind of pass.
            self.times.drafted(drafted if drafted is not None and drafted.read <= MOST_READ else None)

    def _read(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is new in the text, and the target's states there, padding left out."""
        if states is not None and self._seen_length == 0 and self._attention_mask is not None:
            mask = self._attention_mask[0, -states.shape[1] :].bool()
            states = states[:, mask.to(states.device)] if bool(mask.any()) else states
        new_tokens = self._new_tokens(input_ids)
        return new_tokens, states

    def _begin_round(self, input_ids: Tensor, states: Tensor | None, max_tokens: int | None) -> None:
        length = input_ids.shape[1]
        new_tokens, states = self._read(input_ids, states)
        # A stop string may have cut the text among the candidates; a row of a batch may go on after it.
        num_accepted = min(self._num_accepted, new_tokens.shape[1] - 1)
        self.session.begin_round(new_tokens, num_accepted, states)
        if self.lookup is not None:
            room = self._text_room(length) if max_tokens is None else min(self._text_room(length), max_tokens)
            unread = self.session.unread if self.setup.rows == 1 else 0  # the rows of a batch read together
            self.lookup.begin_round(new_tokens[0].tolist(), room, unread)

    def _new_tokens(self, input_ids: Tensor) -> Tensor:
        new = input_ids[:, self._seen_length :]
        if self._seen_length == 0 and self._attention_mask is not None:
            # Padding: the target ignores these tokens, and the draft is simply not shown them. The mask is longer than
            # the prompt where that continues a cache.
            mask = self._attention_mask[0].bool()[-new.shape[1] :]
            kept = torch.cat((new[:, : mask.shape[0]][:, mask], new[:, mask.shape[0] :]), dim=1)
            new = kept if kept.shape[1] else new
        self._seen_length = input_ids.shape[1]
        return new

    def _room(self, length: int) -> int:
        draft_room = self._draft_max_length - self.session.length + 1
        return int(max(min(self._text_room(length), draft_room, self.setup.drafter.places), 0))

    def _text_room(self, length: int) -> int:
        # One place under max_length belongs to the token that the target adds after the candidates.
        return max(self.max_length - length - 1, 0) if self.max_length is not None else MOST_CANDIDATES
