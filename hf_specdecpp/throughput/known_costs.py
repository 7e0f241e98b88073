"""What rounds cost on this machine: assumed at first, then what the rounds of this process say (`KnownCosts`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.models.causal_lm import CausalLM, num_bytes
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.models.cpu.product_times import ProductTimes
from hf_specdecpp.provenance import device_name
from hf_specdecpp.throughput.round_times import RoundTimes, as_expected, corrected, in_seconds, length_class

FEW = 5  # texts that are drafted with what follows from an assumption, without trials of its details
KEPT = 0.03  # change of a cost, as a share of it, that counts
# Assumed, in passes over one token: each further token, on a CPU and elsewhere; the large layers, where their products
# were measured for several tokens, and what a further token adds beside them; a draft's step beside its share of the
# target's weights. In steps of the draft: a token that it reads among many, or a further place of its pass.
WIDER_ON_CPU, WIDER, LAYERS, BESIDE, LEAST_STEP, AMONG_MANY = 0.1, 0.03, 0.8, 0.015, 0.03, 0.1

# In this process, by what they depend on.
_known: dict[str, KnownCosts] = {}


class KnownCosts:
    """What rounds cost here.

    A length of text that has not been met costs what the nearest one that has does, until its first text is over.

    Args:
        first: before any round was timed.
        form: what a rule reckons with, made of the costs of passes by the tokens that they read: a row's share of a
            batch, widths of passes that are filled up.
        is_assumed: nothing was timed: until the first text is over `first` are shares of a pass over one token.
        follows: whether they follow the rounds.
    """

    def __init__(
        self,
        first: Costs,
        form: Callable[[Costs], Costs] = lambda costs: costs,
        is_assumed: bool = False,
        follows: bool = True,
    ) -> None:
        self.first, self.is_assumed, self.follows = first, is_assumed, follows
        self._form = form
        self._texts = 0 if is_assumed else FEW  # that have corrected them
        self._by_length: dict[int, Costs] = {}  # what rounds have made of them (`round_times.length_class`)
        self._formed: dict[int, Costs] = {}  # by class of length, too

    @classmethod
    def given(cls, costs: dict[str, Any] | None, form: Callable[[Costs], Costs] = lambda costs: costs) -> KnownCosts:
        """Those of `SpeculationConfig.costs`, which stay; `ValueError` if there are none, or they are no costs."""
        if costs is None:
            raise ValueError(
                "rule='throughput' has to know what a round costs, and there is no target here whose rounds could say. "
                "Give SpeculationConfig(costs=...)."
            )
        return cls(form(Costs.from_dict(costs)), follows=False)

    @property
    def are_new(self) -> bool:
        """Whether few texts have corrected what was assumed."""
        return self._texts < FEW

    def at(self, length: int) -> Costs:
        """What a rule reckons with at this length of the text: the same object until it changes."""
        kind = self._nearest(length_class(length))
        if kind not in self._formed:
            self._formed[kind] = self._form(self._by_length.get(kind, self.first))
        return self._formed[kind]

    def learn(self, times: RoundTimes) -> list[tuple[int, int]]:
        """Follow the rounds of a text: by class of length and width the passes that took what was known of them."""
        taken: list[tuple[int, int]] = []
        if not times.passes or not self.follows:
            return taken
        if self.is_assumed:
            seconds = in_seconds(self.first, times)
            if seconds is None:  # the clock cannot tell
                return taken
            self.first, self.is_assumed = seconds, False
        self._texts += 1
        for kind, passes in times.passes.items():
            known = self._by_length.get(self._nearest(kind), self.first)
            self._by_length[kind] = corrected(known, passes, times.drafts.get(kind, ()))
            taken += [(kind, width) for width in as_expected(known, passes)]
        for kind, formed in list(self._formed.items()):  # the same object where it has hardly changed
            if _differ(self._form(self._by_length.get(self._nearest(kind), self.first)), formed):
                del self._formed[kind]
        return taken

    def _nearest(self, kind: int) -> int:
        """The class of length that there were texts of; the same where there were none at all."""
        return min(self._by_length, key=lambda known: (abs(known - kind), known), default=kind)


def _differ(costs: Costs, kept: Costs | None) -> bool:
    if kept is None or len(costs.verify) != len(kept.verify):
        return True
    one, kept_one = costs.start + costs.draft, kept.start + kept.draft
    pairs = [(one, kept_one), (costs.draft, kept.draft), *zip(costs.verify, kept.verify, strict=True)]
    return any(abs(new - old) > KEPT * old for new, old in pairs)


@dataclass(frozen=True)
class Rounds:
    """Rounds whose costs are asked for.

    Attributes:
        most: candidates of the largest.
        trees: whether these are trees, or chains.
        rows: of a batch.
        passes: how the target's are made: `"growing"`, or with widths that are filled up, `"captured"`.
        mixes: whether the draft's logits are mixed with the target's successors (`Decisions.draft_successors`).
        products: which matrix products they may take (`DraftSetup.described_products`).
        times: what the products of the target's large layers take, if that was measured.
    """

    target: CausalLM
    drafter: Draft
    estimator: Estimator
    most: int
    trees: bool = False
    rows: int = 1
    passes: str = "growing"
    mixes: bool = False
    products: str = "own"
    times: ProductTimes | None = None

    def formed(self) -> Callable[[Costs], Costs]:
        """Makes costs of passes those that a rule reckons with: of a batch one row's share of passes over all rows."""
        # Read before: what is known of costs must not keep a target alive.
        is_recurrent, is_filled_up = keeps_recurrent_state(self.target), self.passes != "growing"
        most, rows = self.most, self.rows

        def form(costs: Costs) -> Costs:
            # What seems cheaper than a pass over one token was timed in a better moment, or gains little: drafting
            # that follows from that alone has nothing accepted in it.
            costs = replace(costs, verify=tuple(max(seconds, costs.verify[0]) for seconds in costs.verify))
            if is_recurrent:
                costs = costs.read_twice(most)
            if is_filled_up:
                costs = in_widths(costs, most)
            return costs if rows == 1 else costs.share(rows)

        return form

    def conditions(self) -> dict[str, Any]:
        """All that their costs depend on; JSON-able."""
        drafter, estimator = self.drafter, self.estimator
        head = estimator.to_config() if isinstance(estimator, AcceptanceHead) else {}
        return {
            "target": _describe(self.target),
            "draft": {} if drafter.model is None else _describe(drafter.model),
            **drafter.describe(),
            "head": {name: head[name] for name in ("inputs", "num_blocks", "hidden_size", "rank") if name in head},
            "max_tokens": self.most,
            "trees": self.trees,
            "rows": self.rows,
            "passes": self.passes,
            "mixes": self.mixes,
            "products": self.products,
            "threads": torch.get_num_threads(),
        }

    def assumed(self) -> Costs:
        """What they cost before any was timed, in passes of the target over one token.

        A measurement before the first text would take as long as many rounds, and on a busy machine be wrong.
        """
        verify = tuple(self._assumed_pass(1 + further) for further in range(self.most + 1))
        if not self.drafter.places:
            return Costs(0.0, verify)
        draft = _num_multiplied(self.drafter.parts) / max(_num_multiplied([self.target]), 1) + LEAST_STEP
        return Costs(draft, verify, read=AMONG_MANY * draft, branch=AMONG_MANY * draft, block=self.drafter.block)

    def _assumed_pass(self, tokens: int) -> float:
        """A pass over so many tokens of each row, in passes over one.

        Example: products of 1 and 4 rows of a large layer take 100 and 125 ns, so a pass over 4 tokens is assumed to
        take 1 + 0.8 * 0.25 + 3 * 0.015 = 1.245 passes over one token.
        """
        further = self.rows * (tokens - 1)
        if self.times is None:
            return 1.0 + (WIDER_ON_CPU if self.target.device.type == "cpu" else WIDER) * further
        one, many = (self.times.seconds(rows, with_copy=True) for rows in (self.rows, self.rows + further))
        return 1.0 + LAYERS * (many / one - 1.0) + BESIDE * further


def costs_of(rounds: Rounds) -> KnownCosts:
    """What is known in this process of the costs of rounds; assumed until the first text has shown it."""
    name = json.dumps(rounds.conditions(), sort_keys=True)
    if name not in _known:
        _known[name] = KnownCosts(rounds.assumed(), rounds.formed(), is_assumed=True)
    return _known[name]


def forget_costs() -> None:
    """Forget all costs: rounds say them again."""
    _known.clear()


@contextmanager
def without_known_costs() -> Iterator[None]:
    """Within, nothing is known of costs; afterwards what was known before."""
    before = dict(_known)
    _known.clear()
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def in_widths(costs: Costs, max_tokens: int) -> Costs:
    """What rounds cost where passes are filled up with dummies, as captured ones are.

    Example: passes over 1, 2, 3, 4 and 5 tokens take 10, 11, 12, 13 and 14 ms, so one over 8 is expected to take 17. A
    pass over 3 tokens then costs 13 ms, and one over 5 to 8 costs 17.
    """
    verify = costs.verify_seconds(width_of(max_tokens + 1) - 1)
    return replace(costs, verify=tuple(float(verify[width_of(n) - 1]) for n in range(1, max_tokens + 2)))


def _num_multiplied(models: Sequence[nn.Module]) -> int:
    """Numbers in the weights of linear layers."""
    layers = {layer for model in models for layer in model.modules() if isinstance(layer, nn.Linear)}
    return sum(layer.weight.numel() for layer in layers)


def _describe(model: CausalLM) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    return {
        "name": model.config.name_or_path,
        "class": type(model).__name__,
        "bytes": num_bytes(model),
        "layers": config.num_hidden_layers,
        "vocab": config.vocab_size,
        "dtype": str(model.dtype),
        "attention": getattr(config, "_attn_implementation", None),
        "device": device_name(model.device),
    }
