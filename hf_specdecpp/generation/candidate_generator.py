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
from hf_specdecpp.drafting.chain import Drafting, at_once, point_mass
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule, Threshold
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.generation.drafting.chains import ChainDrafting
from hf_specdecpp.generation.drafting.new_text import NewText
from hf_specdecpp.generation.drafting.trees import TreeDrafting
from hf_specdecpp.generation.setup import DraftSetup, looking_up, plan_of, rule_of
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, longest_text
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain, TorchRandomness, TreeRandomness
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.round_times import Drafting as Drafted
from hf_specdecpp.throughput.round_times import RoundTimes
from hf_specdecpp.throughput.target_passes import passes_of
from hf_specdecpp.trees.checks import check_tree
from hf_specdecpp.trees.tree import DraftTree

logger = logging.get_logger("hf_specdecpp")

NO_TREES = "This generator drafts trees, which only an attached target verifies. Set tree=None."
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
        target: the model that decides. Trees are drafted only where it is given.

    Attributes:
        stats: of this generation.
        products: the matrix products of target and draft, within which the loops draft and verify.
        drafting: drafts chains, or trees.
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
    ) -> None:
        setup.speculation.validate()
        self.draws_trees = setup.speculation.tree is not None and target is not None
        for asked, what in ((target is None, "unattached"), (setup.rows > 1, "batches"), (self.draws_trees, "trees")):
            if asked:
                setup.drafter.check_can(what)
        width = setup.vocab_size if target is None else target.config.get_text_config().vocab_size
        self.setup, self.vocab_size = setup, width or 0
        self._target, self._generation_config = target, generation_config
        session = setup.drafter.row_session if setup.rows > 1 else setup.drafter.session
        self.session: Reading = session(self.vocab_size)
        self.max_length: int | None = generation_config.max_length
        self.eos_token_ids = eos_ids(generation_config)
        sample = randomness or (TorchRandomness() if setup.drafter.places else AsPlain())
        self.randomness = sample if generation_config.do_sample else None
        self.processing = Processing(logits_processor or [])
        captures = setup.speculation.graphs == "auto" and target is not None and setup.rows == 1
        captures = captures and graphs.can_capture(input_device(target))
        processing = self.processing if target is None else self.processing.for_draft()
        greedy = self.randomness is None
        self.draft_processing, self.successors = setup.draft_processing(processing, target, greedy, captures)
        at_once = target is not None and not self.processing.in_order
        verification = "equality" if greedy else setup.decisions.verification if at_once else "token"
        decided = setup.decided(target, verification, self.successors is not None)
        self.stats = SpeculationStats(suspect=setup.drafter.suspect, remedies=setup.remedies(target), decided=decided)
        if self.draws_trees:  # before products that round more coarsely than the check allows for
            check_tree(target, "target")
            setup.drafter.check_tree()
        self._products: FasterProducts | None = None
        self.plan: Plan | None = plan_of(setup, target, generation_config, captures)
        self.drafting = self._make_drafting()
        self.lookup: LookingUp | None = looking_up(setup, target, generation_config, self.plan)
        self.times: RoundTimes | None = None
        if self.plan is not None:
            self.plan.begin_text()
            if target is not None and self.plan.known.follows:
                self.times = RoundTimes(computing_clock(input_device(target), setup.drafter.device))
        self.rests = False
        self._new = NewText(attention_mask)
        self._draft_max_length = setup.drafter.max_length
        self._num_accepted = 0
        self._tree = DraftTree.chain()

    def _make_drafting(self) -> ChainDrafting | TreeDrafting:
        setup, target, config = self.setup, self._target, self._generation_config
        how = self.session, self.draft_processing, self.randomness, self.eos_token_ids
        if not self.draws_trees or target is None:
            return ChainDrafting(rule_of(setup, target, config, self.plan), *how)
        drafting = TreeDrafting(setup, *how)
        drafting.follow(self.plan, target, config)
        return drafting

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

    def share_products(self, other: SpecDecPPCandidateGenerator) -> None:
        """Take the products of another row of the same batch: to make them reads every packed weight."""
        self._products = other.products

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
                tree may have more nodes there is none.
            states: `[1, n, size]`, if the draft reads them: the target's at the n tokens that it has read since the
                last round, candidates that were not accepted left out.
        """
        if self.rests:
            if self.times is not None:
                self.times.begin()
            return self.note(DraftTree.chain())
        self._time_round(input_ids)
        room = self._begin_round(input_ids, states, max_tokens)
        read = self.session.unread - 1
        looks_up = self.lookup.count() if self.lookup is not None else 0
        rests = looks_up > 0 or (self.lookup is not None and self.lookup.waits)
        if self.draws_trees:
            tree = self.drafting.draft(input_ids, 0 if rests else room)
            rests = not tree.passes
        elif rests or not self.setup.drafter.places:
            tree = DraftTree.chain()
        else:
            tree = self.drafting.draft(input_ids, room)
        self._time_draft(None if rests else Drafted(tree.passes, read, max(len(tree.scores) - tree.passes, 0)))
        return self.note(self._with_lookups(tree, looks_up))

    def _with_lookups(self, tree: DraftTree, count: int) -> DraftTree:
        """With what was looked up: `count` candidates in the place of a chain, or what pays beside what was drafted."""
        if self.lookup is None:
            return tree
        if not tree.is_chain:
            self.lookup.branch(tree, count)
            return tree
        if count:
            return self.lookup.take(count)
        survival = self.drafting.survival
        if survival is None or self.eos_token_ids.intersection(tree.candidates):
            return tree
        return self.lookup.extend(tree, survival)

    def draft_step_by_step(self, input_ids: Tensor, states: Tensor | None) -> Drafting:
        """A chain as a coroutine, so that the rows of a batch draft together: then `note` it."""
        room = self._begin_round(input_ids, states, None)
        if isinstance(self.drafting, TreeDrafting):
            raise ValueError(NO_TREES)
        return self.drafting.step_by_step(input_ids, room) if self.setup.drafter.places else at_once(DraftTree.chain())

    @property
    def rule(self) -> StoppingRule | None:
        """What stops chains; `None` where trees are drafted."""
        return None if isinstance(self.drafting, TreeDrafting) else self.drafting.rule

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
            drafting = 0.0 if self.draws_trees else None
            if self.draws_trees and self.plan is not None and tree.passes:
                drafting = self.plan.costs.tree_seconds(tree.passes, len(tree.scores), 0.0) - self.plan.costs.overhead
            self.lookup.learn(min(drawn, tree.levels), accepted, len(tree), len(path) + 1, drafting)
        self.drafting.saw(tree, path)
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
        if self.draws_trees:
            raise ValueError(NO_TREES)
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
        new_tokens, states = self._new.take(input_ids, states)
        self.session.begin_round(new_tokens, 0, states)
        tokens, states = self.session.take_all()  # type: ignore[attr-defined]  # of a captured draft
        return self.session, tokens, states

    def has_positions(self, input_ids: Tensor, count: int) -> bool:
        """Whether both models have positions for so many candidates after a text `[1, length]`."""
        longest = self._draft_max_length if self._target is None else longest_text(self._target)
        return input_ids.shape[1] + count <= min(self._draft_max_length, longest)

    def learned_rates(self) -> AcceptanceRates:
        """What rounds of this target, drawn in this way, have said of estimates."""
        setup = self.setup
        owner = setup.drafter if self._target is None else self._target
        return setup.memory.recall(setup.decisions, owner, setup.estimator, self._generation_config).rates

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
        self.session = self.drafting.session = self.setup.drafter.session(self.vocab_size)
        self._new.begin_again()

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

    def _begin_round(self, input_ids: Tensor, states: Tensor | None, max_tokens: int | None) -> int:
        """Let draft and lookups take note of what is new; how many candidates the draft has room for."""
        new_tokens, states = self._new.take(input_ids, states)
        # A stop string may have cut the text among the candidates; a row of a batch may go on after it.
        self.session.begin_round(new_tokens, min(self._num_accepted, new_tokens.shape[1] - 1), states)
        room = self._text_room(input_ids.shape[1])
        most = MOST_CANDIDATES if max_tokens is None else max_tokens
        if self.lookup is not None:
            unread = self.session.unread if self.setup.rows == 1 else 0  # the rows of a batch read together
            self.lookup.begin_round(new_tokens[0].tolist(), min(room, most), unread)
        depth = self.drafting.depth_within(room, most)
        return int(max(min(depth, self._draft_max_length - self.session.length + 1, self.setup.drafter.places), 0))

    def _text_room(self, length: int) -> int:
        # One place under max_length belongs to the token that the target adds after the candidates.
        return max(self.max_length - length - 1, 0) if self.max_length is not None else MOST_CANDIDATES
