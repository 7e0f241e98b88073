"""Chooses how the rounds of a call run (`on_graphs`): as CUDA graphs, with only the target passes as CUDA graphs, or
without graphs; and gives the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isfinite
from threading import Lock
from typing import cast

import torch

from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.caches.masks import why_not_in_place
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundRules, RoundShape
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget, captured_target
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps
from hf_specdecpp.cuda_graphs.fixed_cache import why_not_copied, windows_of
from hf_specdecpp.generation.captured.parts import (
    DraftsBesideGraphs,
    GraphDrafts,
    PassGraphs,
    RoundGraphs,
    memory_ended,
    pass_widths,
    record_reason,
    warn,
)
from hf_specdecpp.generation.decoding import Drafts, RoundTarget, TargetSide
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.single_target import SingleTarget
from hf_specdecpp.models.causal_lm import cache_among, devices_of, has_usual_inputs, num_processes
from hf_specdecpp.models.foreign import active_modes
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import AsPlain
from hf_specdecpp.throughput.round_shapes import (
    SPARE,
    TREES,
    FastestShapes,
    RuleShapes,
    chains_up_to,
    lookups_up_to,
)

MOST_KEPT = 16  # `CapturedRounds` that a target keeps, by draft, way of sampling and number of rows
MOST_TEXTS = 32  # rows of a batch
# Arguments of a forward that captured passes support.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
# Models that prepare their inputs themselves only to switch rotary frequencies, which `why_not_in_place` excludes.
SWITCHES_ROPE = {"phi3", "phimoe"}
_choosing = Lock()
BETWEEN = "captured, with logits processors between the graphs"
IMAGES = "mm_encoder_outputs"  # encoded images and sounds; an empty dict without them


def on_graphs(texts: Sequence[OutputText], drafts: Drafts, usual: TargetSide) -> tuple[Drafts, RoundTarget]:
    """Called after the prompts' pass: returns drafts and target of captured rounds or captured passes if possible, else
    `drafts` and `usual`. Records the choice and its reason in the statistics (`decided["rounds"]`, `uncaptured`)."""
    if not texts or texts[0].generator.setup.speculation.graphs == "off":
        return drafts, usual
    shapes = shapes_of(texts)
    # Passes of batches, even if one row is left, or for drafts that read the cache are captured in whole rounds only.
    only_whole = not isinstance(usual, SingleTarget) or usual.generator.setup.drafter.shares_cache
    not_whole = shapes if isinstance(shapes, str) and only_whole else None
    found = not_whole or _why_not(usual) or _parts(texts, drafts, usual, shapes)
    if not isinstance(found, str):
        return found
    warn(usual, found)
    record_reason(texts, found, "step by step")
    return drafts, usual


def _parts(
    texts: Sequence[OutputText], drafts: Drafts, usual: TargetSide, shapes: list[RoundShape] | str
) -> tuple[Drafts, RoundTarget] | str:
    """Drafts and target that run CUDA graphs, or the reason for none. `shapes`: the result of `shapes_of`."""
    is_entered = False
    try:
        passes = captured_target(usual.model, usual.generator.setup.speculation.compile)
    except Exception as error:  # noqa: BLE001 - quantised modules may have parts of any library
        return f"its modules cannot be copied ({error!r})"
    with _choosing:
        is_busy, passes.busy = passes.busy, True
    if is_busy:
        return "another text is using the captured passes of this target"
    whole = [] if isinstance(shapes, str) else shapes
    try:
        if (reason := _copy_and_compare(passes, usual, texts, whole)) is not None:
            return reason
        own = _graph_drafts(texts, passes, whole) if whole else None
        is_entered = True
    except torch.OutOfMemoryError as error:
        passes.close()
        passes.context.cache = None
        return memory_ended(error)
    finally:
        passes.busy = is_entered
    if own is None:
        record_reason(texts, None, f"step by step: {shapes}")
        drafts = DraftsBesideGraphs()
        return drafts, PassGraphs(texts, passes, drafts, usual)
    record_reason(texts, None, "captured" if own.process is None else BETWEEN)
    return own, RoundGraphs(own, passes, drafts, usual)


def _copy_and_compare(
    passes: CapturedTarget, usual: TargetSide, texts: Sequence[OutputText], shapes: list[RoundShape]
) -> str | None:
    """Copy the prompts' cache to `passes`, and compare them with the target's own. Returns why they cannot be used."""
    if passes.why_not is not None:
        return passes.why_not
    setup = usual.generator.setup
    widths = {1, *(shape.nodes + 1 for shape in shapes)} if shapes else set(pass_widths(setup.most_tokens))
    further = max(text.max_length - text.length for text in texts)
    passes.expected = int(further) + 2 * width_of(max(widths)) + SPARE if isfinite(further) else 0
    passes.context.set_width(max(widths))
    try:
        passes.watch(setup.drafter.reads)
        usual.copy_prompts(passes)
        passes.why_not = passes.compare([text.ids for text in texts], widths, partial(usual.own_logits, texts))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any forward may fail with our masks and caches
        cannot = passes.graphs.cannot(error)
        reason = f"its pass cannot be captured ({cannot})"
        passes.why_not = None if cannot.is_passing else reason
        return reason
    return passes.why_not


def _graph_drafts(texts: Sequence[OutputText], passes: CapturedTarget, shapes: list[RoundShape]) -> GraphDrafts:
    """The drafts of whole captured rounds. Fitting graphs of earlier calls are reused (`CapturedTarget.rounds`)."""
    generator = texts[0].generator
    speculation, decisions = generator.setup.speculation, generator.setup.decisions
    steps = cast(RoundSteps, generator.round_steps)  # not `None` for whole rounds
    greedy, processing = generator.randomness is None, generator.processing.together()
    fits = processing.fits_graphs and all(text.processing.can_show(text.length) for text in texts)
    rules = RoundRules(
        greedy, generator.draft_processing.together().for_graphs().with_contents(),
        processing.with_contents() if fits else Processing([]),
        generator.setup.estimator if speculation.rule != "fixed" or speculation.draws_trees else None,
        speculation.threshold if speculation.rule == "threshold" else None, decisions.min_tokens,
        decisions.verification if generator.processing.answers_all else "token",
    )  # fmt: skip
    rows = width_of(len(texts))
    key = steps.key, *shapes, greedy, steps.vocab_size, rows, fits
    known = passes.rounds
    if key not in known:
        if len(known) >= MOST_KEPT:
            passes.graphs.clear()  # graphs cannot be freed one by one
            known.clear()
        spare = SPARE * (speculation.rule == "throughput") + 2 * max(shape.given for shape in shapes)
        draft = CapturedDraft(steps, shapes, rows, spare, passes.context, greedy)
        known[key] = CapturedRounds(passes, draft), FastestShapes(shapes)
    rounds, fastest = known[key]
    if speculation.rule == "throughput":
        fastest.rates = generator.learned_rates()
        return GraphDrafts(texts, rounds, rules, fastest)
    return GraphDrafts(texts, rounds, rules, RuleShapes(shapes))


def _why_not(side: TargetSide) -> str | None:
    """The reason why the target or the call does not support captured passes, or `None`. Captures nothing."""
    target, config, model_kwargs = side.model, side.config, side.forward_arguments
    if not graphs.can_capture(side.device):
        return f"there are no CUDA graphs on {side.device.type}"
    if len(devices_of(target)) > 1 or num_processes(target) > 1 or hasattr(target, "hf_device_map"):
        return "the target is spread over several devices or offloaded"
    if torch.is_autocast_enabled(side.device.type):  # its copies of weights live only within its context
        return "autocast is on"
    if (reason := why_not_in_place(target) or why_not_copied(cache := cache_among(model_kwargs))) is not None:
        return reason
    if side.carries_cache and any(map(isfinite, windows_of(target.config.get_text_config(decoder=True)) or ())):
        return "the returned cache of a batch needs tokens that have left a layer's window"
    if side.foreign is not None:
        return f"the target runs {side.foreign.name}, which a graph would not call"
    if modes := active_modes():
        return f"the call is made in a mode of PyTorch, {type(modes[0]).__name__}, which a graph would not call"
    if config.output_hidden_states or config.output_attentions:
        return "the states or attentions of all layers are requested"
    given = {name for name, value in model_kwargs.items() if value is not None and value is not cache}
    if model_kwargs.get(IMAGES) == {}:
        given.remove(IMAGES)
    if others := given - KNOWN:
        return f"its forward is given {', '.join(sorted(others))}"
    if not has_usual_inputs(target) and target.config.model_type not in SWITCHES_ROPE:
        return "it prepares its inputs in a way of its own"
    return None


def shapes_of(texts: Sequence[OutputText]) -> list[RoundShape] | str:
    """The shapes that whole captured rounds of a call may have: drafted ones, by size, then looked-up ones. Or the
    reason why the host takes part in the rounds, so that they are not captured whole."""
    generator = texts[0].generator
    setup, steps, as_plain = generator.setup, generator.round_steps, isinstance(generator.randomness, AsPlain)
    if steps is None:
        return "the steps of this draft are not captured"
    speculation, decisions, draws = setup.speculation, setup.decisions, setup.speculation.draws_trees
    uses_costs = speculation.costs is not None or (speculation.rule == "throughput" and speculation.reproducible)
    budgets = [shape.nodes for shape in TREES if shape.levels <= min(decisions.tree_depth, steps.most)]
    is_other_tree = bool(decisions.tree_threshold) or speculation.tree_budget not in budgets
    listed = " or ".join(map(str, budgets)) or "none of this depth"
    reasons = {
        f"more than {MOST_TEXTS} sequences": len(texts) > MOST_TEXTS,
        "without a draft, tokens are drawn on the host, as plain generate() draws them": as_plain,
        "the draft's logits are mixed with the target's latest choices on the host": generator.corrections is not None,
        "given or assumed costs are used on the host": uses_costs,
        "scores or logits are requested": any({"scores", "logits"} & text.records.kept.keys() for text in texts),
        "a logits processor has to be called token by token, in order": bool(generator.processing.in_order),
        "only trees of Algorithm 2 (tree='dyspec') are grown on the device": draws and speculation.tree != "dyspec",
        f"trees that are grown on the device have {listed} candidates, and no threshold": draws and is_other_tree,
    }
    given = lookups_up_to(decisions.lookup_tokens) if speculation.lookup else []
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return _drafted_shapes(setup, steps, len(texts)) + given if reason is None else reason


def _drafted_shapes(setup: DraftSetup, steps: RoundSteps, rows: int) -> list[RoundShape]:
    speculation = setup.speculation
    if speculation.draws_trees:
        trees = [shape for shape in TREES if shape.nodes <= speculation.tree_budget]
        return trees[-1:] if speculation.rule != "throughput" else [RoundShape(0), *trees]
    if speculation.rule == "fixed":
        return [RoundShape(int(min(speculation.num_tokens, steps.most)))]
    chains = chains_up_to(int(min(speculation.max_tokens, steps.most)))
    if speculation.rule == "threshold":
        return [shape for shape in chains if shape.levels or not steps.most]
    # In a batch passes are wide already, so trees do not help.
    takes_trees = speculation.tree == "auto" and "trees" not in setup.drafter.cannot and rows == 1
    return chains + [shape for shape in TREES if takes_trees and shape.levels <= chains[-1].levels]
