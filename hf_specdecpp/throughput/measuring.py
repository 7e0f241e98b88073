"""What drafting and verifying cost on this machine, before the first text of a target and a draft: assumed or measured.

From then on the costs follow the rounds (`KnownCosts`), and are kept on disk.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import logging

from hf_specdecpp.caches.rollback import undoing
from hf_specdecpp.caches.static import width_of
from hf_specdecpp.clocks import computing_clock, least_times
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.chain import draft_chains, drafting
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.estimators import DraftStep, Estimator
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import forget, recall
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, longest_text, trying
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.provenance import device_name
from hf_specdecpp.sampling.at_once import verify_sampled
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.sampling.successors import MixedProcessing, Successors, contexts_of
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.own_passes import OwnPasses
from hf_specdecpp.trees.algorithms import grow_shape
from hf_specdecpp.trees.shapes import from_expansions
from hf_specdecpp.trees.siblings import Level
from hf_specdecpp.trees.slots import Growth, SoftmaxBuffer
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.version import __version__

logger = logging.get_logger("hf_specdecpp")

CONTEXT = 16  # tokens in the caches while they are measured: longer ones cost time, and change little
BATCH_CONTEXT = 128  # in the target's of a batch, where further tokens cost more the more there are to attend to
DRAFTED = 4  # candidates in a measured round
READ = 32  # tokens that the draft reads at once
WIDTH = 8  # nodes of a measured level of a tree
# Assumed shares of a pass over one token: of each further token; of a draft's step beside its share of the target's
# weights; of a token that the draft reads among many, or of a further place of its pass, in its steps.
WIDER, LEAST_STEP, AMONG_MANY = 0.03, 0.03, 0.1
DRAFT_SECONDS, GROWING_SECONDS, TARGET_SECONDS = 0.4, 0.2, 1.0
MOST_TURNS = 25

# In this process, by what they depend on.
_known: dict[str, KnownCosts] = {}


@dataclass(frozen=True)
class Rounds:
    """Rounds whose costs are asked for.

    Attributes:
        max_tokens: candidates of the largest.
        trees: whether these are trees, or chains.
        rows: of a batch.
        own: the passes of the text at hand, where they are others than over a cache that grows.
        mixes: whether the draft's logits are mixed with the target's successors (`SpeculationConfig.draft_successors`).
        products: which matrix products they may take (`SpeculationConfig.products`).
    """

    target: CausalLM
    drafter: Draft
    estimator: Estimator
    max_tokens: int
    trees: bool = False
    rows: int = 1
    own: OwnPasses | None = None
    mixes: bool = False
    products: str = "own"


def costs_of(rounds: Rounds, assume: bool = False) -> KnownCosts:
    """What rounds cost, measured before or now; or, if they are assumed, until the first text has shown it.

    Of a batch that of one row: its share of passes over all rows.
    """
    # Read before: what is known of costs must not keep a target alive.
    is_recurrent, has_own = keeps_recurrent_state(rounds.target), rounds.own is not None
    max_tokens, rows = rounds.max_tokens, rounds.rows

    def form(costs: Costs) -> Costs:
        """What a rule reckons with."""
        if is_recurrent:
            costs = costs.read_twice(max_tokens)
        if has_own:
            costs = in_widths(costs, max_tokens)
        return costs if rows == 1 else costs.share(rows)

    of = conditions(rounds)
    name = json.dumps(of, sort_keys=True)
    if name not in _known or (_known[name].is_assumed and not assume):
        try:
            _known[name] = KnownCosts.from_dict(recall("costs", of), form, of)
        except ValueError:  # not measured yet, or the file is damaged
            if assume:
                _known[name] = KnownCosts(assumed(rounds), form, of, is_assumed=True)
                return _known[name]
            measured = _measured(rounds)
            logger.info(f"Measured what drafting and verifying cost here: {measured}.")
            # What a clock cannot tell is not kept: another process may have a better one.
            if measured is None:
                _known[name] = KnownCosts(assumed(rounds), form, None, is_assumed=True)
            else:
                _known[name] = KnownCosts(measured, form, of)
            _known[name].save()
    return _known[name]


def _measured(rounds: Rounds) -> Costs | None:
    """Costs measured now.

    Raises:
        ValueError: a model fails on text alone, such as one whose every pass needs an image.
    """
    try:
        return measure(rounds)
    except Exception as failure:
        raise ValueError(
            f"What rounds cost here cannot be measured ({type(failure).__name__}: {failure}), which rule='throughput' "
            "needs to know. Use another rule, SpeculationConfig('fixed'), or give costs=."
        ) from failure


def in_widths(costs: Costs, max_tokens: int) -> Costs:
    """What rounds cost where passes are filled up with dummies, as over static caches (`caches.static`).

    Example: passes over 1, 2, 3, 4 and 5 tokens take 10, 11, 12, 13 and 14 ms, so one over 8 is expected to take 17. A
    pass over 3 tokens then costs 13 ms, and one over 5 to 8 costs 17.
    """
    verify = costs.verify_seconds(width_of(max_tokens + 1) - 1)
    return replace(costs, verify=tuple(float(verify[width_of(n) - 1]) for n in range(1, max_tokens + 2)))


def forget_costs() -> None:
    """Forget all measured costs of this machine: each is measured again when it is needed."""
    _known.clear()
    forget("costs")


def conditions(rounds: Rounds) -> dict[str, Any]:
    """All that the costs of rounds depend on; JSON-able."""
    drafter, estimator = rounds.drafter, rounds.estimator
    head = estimator.to_config() if isinstance(estimator, AcceptanceHead) else {}
    return {
        "target": _describe(rounds.target),
        "draft": {} if drafter.model is None else _describe(drafter.model),
        **drafter.describe(),
        "head": {name: head[name] for name in ("inputs", "num_blocks", "hidden_size", "rank") if name in head},
        "max_tokens": rounds.max_tokens,
        "trees": rounds.trees,
        "rows": rounds.rows,
        "passes": None if rounds.own is None else rounds.own.how,
        "mixes": rounds.mixes,
        "products": rounds.products,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "versions": [__version__, torch.__version__, transformers.__version__],
    }


def assumed(rounds: Rounds) -> Costs:
    """What rounds cost before any was timed, in passes of the target over one token.

    A measurement before the first text would take as long as many of its rounds, and on a busy machine be wrong.
    """
    verify = tuple(1.0 + WIDER * rounds.rows * further for further in range(rounds.max_tokens + 1))
    if not rounds.drafter.places:
        return Costs(0.0, verify)
    draft = _num_multiplied(rounds.drafter.parts) / max(_num_multiplied([rounds.target]), 1) + LEAST_STEP
    return Costs(draft, verify, read=AMONG_MANY * draft, branch=AMONG_MANY * draft, block=rounds.drafter.block)


def _num_multiplied(models: Sequence[nn.Module]) -> int:
    """Numbers in the weights of linear layers."""
    layers = {layer for model in models for layer in model.modules() if isinstance(layer, nn.Linear)}
    return sum(layer.weight.numel() for layer in layers)


@torch.inference_mode()
def measure(rounds: Rounds) -> Costs | None:
    """Time the draft and the target, of a batch all rows together: under two seconds, unless they are slow themselves.

    `None` if the clock cannot tell: it stands, is set back, or is too coarse.

    Everything that a round does for a candidate is included: its estimate, its draw and its verification, and mixing
    its q and taking note of what the target said. Each number is the minimum of several, since other load only ever
    adds to it; with one thread on a CPU the processor's time is taken, which leaves other load out. Torch's generators
    are left as they were.
    """
    target, drafter = rounds.target, rounds.drafter
    processing, successors = Processing([]), None
    if rounds.mixes:  # with those of a target that has said nothing, which takes as long
        successors = Successors(_vocab_size(target), drafter.device)
        processing = MixedProcessing(processing, successors, greedy=True)
    devices = [target.device, drafter.device]
    accelerators = [device.index or 0 for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=accelerators):
        drafting = _time_draft(rounds, processing) if drafter.places else {"draft": 0.0}
        own = rounds.own
        verify = _time_target(rounds, successors) if own is None else _time_own(rounds, own, successors)
        if rounds.trees and drafter.places and drafter.block == 1 and drafting is not None:
            growing = _time_growing(rounds, processing)
            drafting = None if growing is None else drafting | growing
    return None if drafting is None or not verify else Costs(verify=verify, block=drafter.block, **drafting)


class _FixedAndJudged(StoppingRule):
    def __init__(self, estimator: Estimator) -> None:
        super().__init__(DRAFTED)
        self.estimator = estimator

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)


def _time_draft(rounds: Rounds, processing: Processing) -> dict[str, float] | None:
    """Seconds of starting to draft, of a step, of further candidates of a block, and of reading a token among many, for
    all rows together; `None` if the clock cannot tell."""
    target, drafter, rows = rounds.target, rounds.drafter, rounds.rows
    rule, randomness = _FixedAndJudged(rounds.estimator), TorchRandomness()
    count, several = int(min(READ, drafter.max_length)), int(min(DRAFTED, drafter.places))
    vocab_size, text = _vocab_size(target), _tokens(1, drafter.device)

    def step(session: Reading, candidates: list[Tensor]) -> DraftStep | None:
        if (found := session.step(candidates)) is None:
            return None
        scores = processing.one(text, candidates, found[0])
        return session.draft_step(len(candidates), scores, found[1], greedy=False)

    def draft(count: int) -> None:
        drafted = [drafting(partial(step, each), rule, randomness, count) for each in _begun(sessions, drafter, 1)]
        draft_chains(drafted, prepare)

    def read() -> None:
        sessions, prepare = _sessions(drafter, vocab_size, rows)
        _begun(sessions, drafter, count)
        prepare({place: [] for place in range(rows)})
        for session in sessions:
            if (found := session.step([])) is not None:
                found[0].argmax().item()

    sessions, prepare = _sessions(drafter, vocab_size, rows)
    _begun(sessions, drafter, _context(drafter.max_length))
    clock = computing_clock(target.device, drafter.device)
    actions: dict[int, Callable[[], None]] = {1: partial(draft, 1), several: partial(draft, several), READ: read}
    times = least_times(actions, DRAFT_SECONDS, clock, _turns(drafter), least=3)
    if set(actions) - set(times):
        return None
    seconds = {"start": 0.0, "draft": times[1], "read": times[READ] / count}
    further = (times[several] - times[1]) / max(several - 1, 1)
    if drafter.block > 1:
        return {**seconds, "branch": max(further, 0.0)}
    each = min(max(further, 0.5 * times[1] / (DRAFTED - 1)), times[1])
    return {**seconds, "start": times[1] - each, "draft": each}


def _sessions(
    drafter: Draft, vocab_size: int, rows: int
) -> tuple[Sequence[Reading], Callable[[dict[int, list[Tensor]]], bool]]:
    """The draft's sides of some texts, and what is called before each of their steps (`draft_chains`)."""
    if rows == 1:
        return [drafter.chain_session(vocab_size)], lambda _: True
    sessions = [drafter.row_session(vocab_size) for _ in range(rows)]
    batch = drafter.batch(sessions)

    def prepare(asking: dict[int, list[Tensor]]) -> bool:
        batch.step(asking)
        return True

    return sessions, prepare


def _begun(sessions: Sequence[Reading], drafter: Draft, count: int) -> Sequence[Reading]:
    """The sessions, each in a round of the draft after so many further tokens."""
    for session in sessions:
        _begin(session, drafter, count)
    return sessions


def _begin(session: Reading, drafter: Draft, count: int) -> None:
    """A round of the draft after so many further tokens."""
    width = 0 if drafter.reads is None else drafter.reads.width
    states = torch.zeros((1, count, width), dtype=drafter.dtype, device=drafter.device) if width else None
    session.begin_round(_tokens(count, drafter.device), 0, states)


def _turns(drafter: Draft, rounds: int = 2) -> int:
    """How often so many rounds can be drafted: each leaves a token in the draft's text, whose positions end."""
    room = (drafter.max_length - _context(drafter.max_length) - DRAFTED - 4) // rounds
    return int(max(min(MOST_TURNS, room), 1))


def _time_growing(rounds: Rounds, processing: Processing) -> dict[str, float] | None:
    """Seconds of starting to grow a tree, of a draft pass over a level, and of each further node in it; `None` if the
    clock cannot tell."""
    target, drafter = rounds.target, rounds.drafter
    session, buffer = drafter.tree_session(_vocab_size(target)), SoftmaxBuffer(WIDTH + 1)
    text = _tokens(1, drafter.device)

    def expand(tree: DraftTree, nodes: list[int]) -> Level:
        logits, hidden = session.expand(tree, nodes)
        scores = processing.after_each(text, [tree.path(node) for node in nodes], logits)
        return Level(scores, hidden, session.embed)

    def grow(*expansions: int) -> None:
        _begin(session, drafter, 1)
        growth = Growth(expand, rounds.estimator, TorchRandomness(), root=0, max_depth=2, buffer=buffer)
        grow_shape(growth, from_expansions(expansions))
        session.keep([])

    _begin(session, drafter, _context(drafter.max_length))
    clock = computing_clock(target.device, drafter.device)
    # A pass over the root; two, the second over a child; and the same over several children.
    actions: dict[int, Callable[[], None]] = {
        1: partial(grow, 1),
        2: partial(grow, 1, 1),
        WIDTH: partial(grow, WIDTH, 1),
    }
    times = least_times(actions, GROWING_SECONDS, clock, _turns(drafter, len(actions)), least=3)
    if set(actions) - set(times):
        return None
    draft = min(max(times[2] - times[1], 0.5 * times[1]), times[1])
    return {"start": times[1] - draft, "draft": draft, "branch": max(times[WIDTH] - times[2], 0.0) / (WIDTH - 1)}


def _time_target(rounds: Rounds, successors: Successors | None = None) -> tuple[float, ...]:
    """Seconds of verifying 1 to `max_tokens` + 1 tokens of each row; those that there is no time for are interpolated.

    Fewer where the target has no positions for so many after the context; `Costs` extrapolates.
    """
    target, rows = rounds.target, rounds.rows
    context = _context(longest_text(target), CONTEXT if rows == 1 else BATCH_CONTEXT)
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    inputs: dict[str, Any] = {cache_argument(target): cache, "use_cache": True}
    most = int(min(rounds.max_tokens + 1, longest_text(target) - context))
    # Steps are where few tokens become several, and at multiples of a vector's or tile's width.
    wanted = [1, most, 4, 2, 8, 3, 5, 6, 12, 16, 9, 17, 7, 10, 32, 24]
    with trying(target) as read:
        read(_tokens(context, target.device), **inputs)
        cache.activate_past_recording()
        if rows > 1:
            cache.batch_repeat_interleave(rows)

        def verify(count: int) -> Tensor:
            undo = undoing(cache, count)
            logits: Tensor = read(_tokens(count, target.device).expand(rows, -1), context, **inputs).logits
            undo()
            return logits

        return _time_verifying(verify, [count for count in wanted if count <= most], target.device, successors)


def _time_own(rounds: Rounds, own: OwnPasses, successors: Successors | None) -> tuple[float, ...]:
    """The same of a text's own passes, of which only those that fill a width are made."""
    own.settle(rounds.max_tokens)
    widths = [count + 1 for count in own.counts(rounds.max_tokens)]
    return _time_verifying(lambda width: own.make(width - 1)[None], widths, rounds.target.device, successors)


def _time_verifying(
    read: Callable[[int], Tensor], counts: Sequence[int], device: torch.device, successors: Successors | None
) -> tuple[float, ...]:
    """Seconds of verifying 1, 2, ... tokens, interpolated between those that there was time for; empty if the clock
    cannot tell of any.

    Args:
        read: makes a pass over so many tokens: logits `[rows, tokens, vocab]`.
        counts: to be timed, the most important first.
        successors: that take note of the logits.
    """
    randomness = TorchRandomness()

    def verify(count: int) -> None:
        tokens, logits = _tokens(count, device)[0].tolist(), read(count).float()
        if successors is not None:
            contexts = contexts_of(_tokens(1, device), [tokens[:place] for place in range(count)])
            for row in logits:
                successors.learn(contexts, row)
        for p in logits.softmax(dim=-1):
            verify_sampled(tokens[1:], p, p[:-1], randomness, "block")

    times = least_times({count: partial(verify, count) for count in counts}, TARGET_SECONDS, computing_clock(device))
    if not (measured := sorted(times)):
        return ()
    return tuple(np.interp(np.arange(1, max(counts) + 1), measured, [times[count] for count in measured]).tolist())


def _describe(model: CausalLM) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    return {
        "name": model.config.name_or_path,
        "class": type(model).__name__,
        "bytes": model.get_memory_footprint(),
        "layers": config.num_hidden_layers,
        "vocab": config.vocab_size,
        "dtype": str(model.dtype),
        "attention": getattr(config, "_attn_implementation", None),
        "device": device_name(model.device),
    }


def _context(longest: float, wanted: int = CONTEXT) -> int:
    """Tokens in a model's cache while it is measured, of so many at most: each round of a draft leaves one more."""
    return int(max(min(wanted, longest - MOST_TURNS - DRAFTED - 2), 1))


def _tokens(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)[None] % 8


def _vocab_size(target: CausalLM) -> int:
    return target.config.get_text_config().vocab_size
