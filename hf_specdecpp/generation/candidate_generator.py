"""`SpecDecPPCandidateGenerator`: transformers' interface to the drafting of one generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.drafting.chain import Drafting, at_once, drafted_alone, drafting, next_step, point_mass
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule, Threshold
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.generation.setup import DraftSetup, looking_up, plan_of, rule_of, why_chains
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.tree_drafting import TreeDrafting
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, modules_of, num_logits
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain, TorchRandomness, TreeRandomness
from hf_specdecpp.throughput.known_costs import Drafting as Drafted
from hf_specdecpp.throughput.known_costs import RoundTimes
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.trees.attention import check_trees
from hf_specdecpp.trees.tree import DraftTree

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
        randomness: draws the candidates when sampling.
        target: the model that decides.

    Attributes:
        stats: of this generation.
        products: the matrix products of target and draft, within which the loops draft and verify.
        rule: stops chains; `None` where trees are drafted.
        trees: drafts these; `None` where chains are drafted.
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
        randomness: TreeRandomness | None = None,
        *,
        target: CausalLM,
    ) -> None:
        setup.speculation.validate()
        draws_trees = setup.speculation.draws_trees
        for asked, what in ((setup.rows > 1, "batches"), (draws_trees, "trees")):
            if asked and (reason := setup.drafter.cannot.get(what)) is not None:
                raise ValueError(reason)
        self.setup, self.vocab_size = setup, num_logits(target)
        self._target, self._generation_config = target, generation_config
        session = setup.drafter.row_session if setup.rows > 1 else setup.drafter.session
        self.session: Reading = session(self.vocab_size)
        self.max_length: int | None = generation_config.max_length
        self.eos_token_ids = eos_ids(generation_config)
        sample = randomness or (TorchRandomness() if setup.drafter.places else AsPlain())
        self.randomness = sample if generation_config.do_sample else None
        self.processing = Processing(logits_processor or [])
        captures = setup.speculation.graphs == "auto" and graphs.can_capture(input_device(target))
        processing, greedy = self.processing.for_draft(), self.randomness is None
        self.draft_processing, self.successors = setup.draft_processing(processing, target, greedy, captures)
        at_once = self.processing.answers_all
        verification = "equality" if greedy else setup.decisions.verification if at_once else "token"
        decided = setup.decided(target, verification, self.successors is not None)
        self.stats = SpeculationStats(remedies=setup.remedies, decided=decided)
        reason = None if draws_trees else why_chains(setup, target, captures, self.processing)
        decided["tree"] = f"chains: {reason}" if reason else "where siblings pay"
        if draws_trees:  # before products that round more coarsely than the check allows for
            check_trees(setup.tree_readers(target))
        self.round_steps = setup.drafter.round_steps(self.vocab_size) if captures else None
        self._products: FasterProducts | None = None
        self.plan: Plan | None = plan_of(setup, target, generation_config, captures, trees=reason is None)
        self.rule: StoppingRule | None = None
        self.trees: TreeDrafting | None = None
        if reason is None:
            how = self.session, self.draft_processing, self.randomness, self.eos_token_ids, decided
            self.trees = TreeDrafting(setup, *how)
            self.trees.follow(self.plan, target, generation_config)
        else:
            self.rule = rule_of(setup, target, generation_config, self.plan)
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
        self._tree = DraftTree.chain()

    def _observers(self) -> list[Any]:
        learns = None if self.rule is None or self.rule.looks_at_nothing else self.rule
        return [each for each in (self.stats, self.lookup, learns, self.trees) if each is not None]

    @property
    def expects_drafts(self) -> bool:
        """Whether rounds are expected to have candidates."""
        return self.plan is None or self.plan.pays

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
        times = self.times
        if self.plan is not None and not self.rests:
            self.plan.follow(input_ids.shape[1])  # a new plan takes a while, which is no cost of this round
        if times is not None:
            times.begin()
        if self.rests:
            return self.note(DraftTree.chain())
        room = self._begin_round(input_ids, states, max_tokens)
        read, looks_up, rests = self.session.unread - 1, 0, False
        if self.lookup is not None:
            looks_up = self.lookup.count()
            rests = looks_up > 0 or self.lookup.waits
        if self.trees is not None:
            tree = self.trees.draft(input_ids, 0 if rests else room)
            rests = not tree.passes
        elif rests or not self.setup.drafter.places:
            tree = DraftTree.chain()
        else:
            tree = drafted_alone(self._step_by_step(input_ids, room))
            tree.passes = self.session.passes
        if times is not None:
            times.drafted(None if rests else Drafted(tree.passes, read, max(len(tree.scores) - tree.passes, 0)))
        tree = tree if self.lookup is None else self._with_lookups(self.lookup, tree, looks_up)
        if self.trees is not None and self.setup.speculation.tree == "auto":
            tree.is_chain |= tree.has_one_branch
        return self.note(tree)

    def _with_lookups(self, lookup: LookingUp, tree: DraftTree, count: int) -> DraftTree:
        """With what was looked up: `count` candidates in the place of a chain, or what pays beside what was drafted."""
        if self.trees is not None and self.trees.slots.branches:
            lookup.branch(tree, count)
            return tree
        if count:
            return lookup.take(count)
        rule: Any = self.rule
        survival = rule.survival if self.trees is None else self.trees.survival(tree)
        if survival is None or self.eos_token_ids.intersection(tree.candidates):
            return tree
        return lookup.extend(tree, survival)

    def draft_step_by_step(self, input_ids: Tensor, states: Tensor | None) -> Drafting:
        """A chain as a coroutine, so that the rows of a batch draft together: then `note` it."""
        room = self._begin_round(input_ids, states, None)
        return self._step_by_step(input_ids, room) if self.setup.drafter.places else at_once(DraftTree.chain())

    def _step_by_step(self, input_ids: Tensor, room: int) -> Drafting:
        rule: Any = self.rule
        step = partial(next_step, self.session, self.draft_processing, input_ids, self.randomness is None)
        return drafting(step, rule, self.randomness, room, self.eos_token_ids, self.session.unread)

    def note(self, tree: DraftTree) -> DraftTree:
        """Take note of what was drafted, which is returned."""
        self._tree, self._num_accepted = tree, 0
        self.stats.draft_passes += tree.passes
        return tree

    def saw(self, tree: DraftTree, path: list[int], length: int) -> None:
        """Learn which nodes of the last round, before which the text had this length, were accepted."""
        self._num_accepted = len(path)
        for each in self.observers:
            each.saw(tree, path)
        tree.forget()
        if self.rests and self.plan is not None:  # a draft that needs no states may begin now
            self.rests = self.setup.drafter.reads is not None or self.plan.rests(length)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Candidates in transformers' form: `[1, length + k]` token ids, and `[1, k, vocab]` logits whose softmax the k
        candidates after `input_ids` `[1, length]` were drawn from (`None` when k is 0)."""
        if self.setup.drafter.reads is not None:
            raise ValueError(NO_STATES)
        if self.trees is not None:
            self.trees.refuse(NO_TREES)
        chain = self.propose(input_ids)
        if not len(chain):
            return input_ids, None
        candidates = input_ids.new_tensor([chain.candidates])
        return torch.cat((input_ids, candidates), dim=1), torch.stack(self.scores_of(chain, input_ids.device))[None]

    def scores_of(self, chain: DraftTree, device: torch.device) -> list[Tensor]:
        """For each candidate the logits that it was drawn from `[vocab]`: all on one token where it was looked up."""
        looked_up = chain.candidates[chain.num_drawn :]
        return [*chain.drawn_from, *(point_mass(token, self.vocab_size, device) for token in looked_up)]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor | None, num_matches: int) -> None:  # noqa: ARG002
        """Learn that `num_matches` candidates of the last chain were accepted."""
        self.saw(self._tree, list(range(1, int(num_matches) + 1)), input_ids.shape[1])

    def begin_captured(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All tokens of a text `[1, length]` that captured rounds draft after, and the target's states before each."""
        self.observers = [self.stats, *([self.rule] if isinstance(self.rule, Threshold) else [])]
        tokens, states = self._new(input_ids, states)
        if states is None:
            return tokens, None
        known = min(states.shape[1], tokens.shape[1])  # fewer than the tokens where a cache is carried on
        return tokens[:, -known:], states[:, -known:]

    def learned_rates(self, trees: bool = False) -> AcceptanceRates:
        """What rounds of this target, drawn in this way, have said of estimates."""
        setup, how = self.setup, self._generation_config
        return setup.memory.recall(setup.decisions, self._target, setup.estimator, how, trees).rates

    def note_captured(self, tree: DraftTree, estimates: list[float]) -> None:
        """Take note of what a captured round drafted, and what `rule="threshold"` judged the candidates by."""
        self.stats.draft_passes += tree.passes
        if isinstance(self.rule, Threshold):
            self.rule.estimates = estimates

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

    def remember(self, answer: Tensor) -> None:
        """Keep an answer `[n]` for later lookups, if there shall be any."""
        if self.setup.speculation.lookup == "history":
            self.setup.memory.answers.add(answer.tolist())

    def _begin_round(self, input_ids: Tensor, states: Tensor | None, max_tokens: int | None) -> int:
        """Let draft and lookups take note of what is new; how many candidates the draft has room for."""
        session, drafter = self.session, self.setup.drafter
        new_tokens, states = self._new(input_ids, states)
        session.begin_round(new_tokens, self._num_accepted, states)
        most = room = MOST_CANDIDATES
        if self.max_length is not None:  # under which one place belongs to the token that the target adds
            room = max(self.max_length - input_ids.shape[1] - 1, 0)
        if max_tokens is not None:
            most = max_tokens
        if self.lookup is not None:
            unread = session.unread if self.setup.rows == 1 else 0  # the rows of a batch read together
            self.lookup.begin_round(new_tokens[0].tolist(), min(room, most), unread)
        # To cut a tree would depend on what was drawn, so there is none where it might have more nodes; those of
        # `rule="throughput"` stop growing before.
        if self.trees is not None:
            self.trees.room = min(most, self.trees.most)
            most = room if most >= (self.trees.most if self.plan is None else 1) else 0
        return int(max(min(room, most, self._draft_max_length - session.length + 1, drafter.places), 0))

    def _new(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the draft was not shown of a text: tokens `[1, n]`, and the target's states `[1, m, size]` there."""
        new, is_prompt = input_ids[:, self._shown :], not self._shown
        self._shown = input_ids.shape[1]
        return without_padding(new, states, self._mask) if is_prompt and self._mask is not None else (new, states)


def without_padding(new: Tensor, states: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A prompt `[1, n]` and the target's states `[1, m, size]` in it without padding, which the target ignores.

    Example: of the prompt `[pad, pad, 5, 6]` with the mask `[0, 0, 1, 1]` 5 and 6 are left. The mask `[1, length]` is
    longer than the prompt where that continues a cache, shorter where tokens follow it.
    """
    if states is not None:
        shown = mask[0, -states.shape[1] :].bool()
        states = states[:, shown.to(states.device)] if bool(shown.any()) else states
    shown = mask[0].bool()[-new.shape[1] :]
    kept = torch.cat((new[:, : shown.shape[0]][:, shown], new[:, shown.shape[0] :]), dim=1)
    return kept if kept.shape[1] else new, states
