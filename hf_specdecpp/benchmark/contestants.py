"""Who takes part: plain generation, transformers' own ways to speculate, and ours with every rule.

`(head)` and `(q)` say who estimates; `online` estimates are calibrated by earlier rounds (`SpeculationConfig.adapt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from transformers import GenerationConfig

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig, Tree
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.memory import Memory

LENGTHS = range(1, 15)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
BUDGETS = (4, 8, 16, 32, 64)  # nodes of the dynamic trees
EXACT_BUDGET = 16
SHAPES = (
    (2, 1, 1),
    (4, 1, 1, 1),
    (2, 2, 1, 1),
    (4, 3, 2, 1),
    (4, 2, 2, 1, 1),
)  # children by depth: 6, 16, 14, 64, 60 nodes
STOCK_LENGTHS = (2, 3, 5, 10)
PASSES = (
    "cpu_products",
    "pack_weights",
    "int8_draft",
)  # fields of `SpeculationConfig` that say how passes compute, not what is drafted
PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10}
HEURISTIC_START = 5  # candidates in the first round of transformers' "heuristic" schedule


@dataclass(frozen=True)
class Contestant:
    """A way to generate.

    Args:
        name: as it appears in reports.
        family: contestants of one family differ in one setting.
        speculation: ours: the settings of the assistant, but for its passes, which are as the assistant has them.
        with_head: ours: whether the head judges, or the draft's own probability.
        stock: transformers' assisted generation: what the draft's generation config says.
        lookup: transformers' prompt lookup: its arguments of `generate()`.
        alone: ours: without the draft, so that all candidates are looked up.
        same_passes: plain generation on the CPU products and packed weights that ours runs on.
        memory: ours: what was learned as this contestant.
    """

    name: str
    family: str
    speculation: SpeculationConfig | None = None
    with_head: bool = True
    stock: dict[str, Any] | None = None
    lookup: dict[str, int] | None = None
    alone: bool = False
    same_passes: bool = False
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)
    _without_draft: list[SpecDecPPAssistant] = field(default_factory=list, compare=False, repr=False)  # one, once made

    @property
    def ours(self) -> bool:
        return self.speculation is not None

    @property
    def is_constant(self) -> bool:
        """Whether it is a chain of fixed length, up to 8, or with a fixed threshold, 0.3 to 0.7: what rules that adapt
        themselves have to beat."""
        config = self.speculation
        if config is None or config.tree is not None:
            return False
        if config.rule == "fixed":
            return config.num_tokens <= 8
        return config.rule == "threshold" and 0.3 <= config.threshold <= 0.7 and not config.adapt

    @contextmanager
    def arguments(self, assistant: SpecDecPPAssistant, target: CausalLM) -> Iterator[dict[str, Any]]:
        """What to pass to the target's `generate()`, target and assistant being set up for it meanwhile."""
        if self.same_passes:
            with assistant.setup().products(target):
                yield {}
        elif self.stock is not None:
            draft = assistant.ready_drafter().model
            own, draft.generation_config = draft.generation_config, GenerationConfig(**self.stock)
            try:
                yield {"assistant_model": draft}
            finally:
                draft.generation_config = own
        elif self.speculation is not None:
            passes = {name: getattr(assistant.speculation, name) for name in PASSES}
            speculation = replace(self.speculation, **passes)
            if self.alone:
                with self._alone(assistant, target, speculation) as helper:
                    yield {"assistant_model": helper}
                return
            before = assistant.speculation, assistant.head, assistant.memory
            assistant.speculation, assistant.memory = speculation, self.memory
            assistant.head = assistant.head if self.with_head else None
            try:
                yield {"assistant_model": assistant}
            finally:
                assistant.speculation, assistant.head, assistant.memory = before
        else:
            yield self.lookup or {}

    @contextmanager
    def _alone(
        self, assistant: SpecDecPPAssistant, target: CausalLM, speculation: SpeculationConfig
    ) -> Iterator[SpecDecPPAssistant]:
        """An assistant without a draft that shares the packed weights of this one, which is left its statistics."""
        if not self._without_draft:
            self._without_draft.append(SpecDecPPAssistant.from_lookup(target))
        helper = self._without_draft[0]
        helper.speculation, helper.packed = replace(speculation, int8_draft=False), assistant.packed
        try:
            yield helper
        finally:
            assistant.stats = helper.stats


PLAIN = Contestant("plain", "plain")
SAME_PASSES = Contestant("plain, same passes", "plain, same passes", same_passes=True)
BASELINES = (PLAIN, SAME_PASSES)


def all_contestants(has_head: bool, can_tree: bool = True, has_rates: bool = False) -> list[Contestant]:
    """Every contestant.

    Args:
        has_head: an assistant without a head is judged by the draft's own probability alone.
        can_tree: whether target and draft can read trees.
        has_rates: whether the assistant's repository has rates of acceptance for the best static shapes.
    """
    trees = _trees(has_head, has_rates) if can_tree else []
    return [*BASELINES, *_transformers(), *_chains(has_head), *trees, *_lookups(has_head, can_tree)]


def quick_contestants(has_head: bool) -> list[Contestant]:
    """A few that answer whether it pays at all."""
    judge = "head" if has_head else "q"
    names = ["transformers default", "fixed 2", "fixed 5", f"threshold 0.5 ({judge} online)", f"throughput ({judge})"]
    by_name = {contestant.name: contestant for contestant in all_contestants(has_head)}
    return [*BASELINES, *(by_name[name] for name in names)]


def _chains(has_head: bool) -> list[Contestant]:
    """Ours, without trees."""
    fixed = [
        Contestant(f"fixed {length}", "fixed", SpeculationConfig(rule="fixed", num_tokens=length), has_head)
        for length in LENGTHS
    ]
    judged = []
    for with_head, judge in _judges(has_head):
        for adapt, how in ((False, judge), (True, f"{judge} online")):
            judged += [
                Contestant(
                    f"threshold {h:g} ({how})",
                    f"threshold ({how})",
                    SpeculationConfig(rule="threshold", threshold=h, adapt=adapt),
                    with_head,
                )
                for h in THRESHOLDS
            ]
        name = f"throughput ({judge})"
        judged.append(Contestant(name, name, SpeculationConfig(rule="throughput"), with_head))
    return [*fixed, *judged]


def without_draft() -> list[Contestant]:
    """Those that need no draft."""
    prompt_lookups = [each for each in _transformers() if each.lookup is not None]
    return [*BASELINES, *prompt_lookups, _lookup()]


def _lookups(has_head: bool, can_tree: bool) -> list[Contestant]:
    """Ours, with candidates that are looked up."""
    judge = "head" if has_head else "q"
    both = SpeculationConfig(rule="throughput", lookup=True)
    beside = [Contestant(f"lookup + draft ({judge})", "lookup + draft", both, has_head)]
    if can_tree:
        beside.append(Contestant(f"lookup + trees ({judge})", "lookup + trees", replace(both, tree="dyspec"), has_head))
    return [_lookup(), *beside]


def _lookup() -> Contestant:
    """Made anew, since it keeps an assistant of the target that it was used with."""
    settings = SpeculationConfig(rule="throughput", lookup=True)
    return Contestant("lookup", "lookup", settings, with_head=False, alone=True)


def choose(contestants: Sequence[Contestant], patterns: Sequence[str]) -> list[Contestant]:
    """Those whose name or family matches a pattern such as `fixed*`; the baselines always.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(matches(contestant, pattern) for contestant in contestants):
            known = ", ".join(contestant.name for contestant in contestants)
            raise ValueError(f"No contestant is called {pattern!r}. There are: {known}.")
    return [
        c for c in contestants if c in BASELINES or not patterns or any(matches(c, pattern) for pattern in patterns)
    ]


def matches(contestant: Contestant, pattern: str) -> bool:
    """Whether its name or family is as a pattern such as `fixed*`."""
    return fnmatch(contestant.name, pattern) or fnmatch(contestant.family, pattern)


def _judges(has_head: bool) -> list[tuple[bool, str]]:
    return [(True, "head"), (False, "q")] if has_head else [(False, "q")]


def _transformers() -> list[Contestant]:
    def contestant(name: str, count: int, schedule: str, confidence: float) -> Contestant:
        stock = {
            "num_assistant_tokens": count,
            "num_assistant_tokens_schedule": schedule,
            "assistant_confidence_threshold": confidence,
        }
        return Contestant(f"transformers {name}", "transformers", stock=stock)

    lookups = [
        Contestant(f"prompt lookup {size}", "prompt lookup", lookup={**PROMPT_LOOKUP, "max_matching_ngram_size": size})
        for size in (2, 3)
    ]
    return [
        contestant("default", 20, "constant", 0.4),
        *(contestant(f"constant {count}", count, "constant", 0.0) for count in STOCK_LENGTHS),
        contestant("heuristic", HEURISTIC_START, "heuristic", 0.0),
        *lookups,
    ]


def _trees(has_head: bool, has_rates: bool) -> list[Contestant]:
    def dynamic(tree: Tree, budgets: Sequence[int], adapt: bool = False) -> list[Contestant]:
        online = " online" if adapt else ""
        return [
            Contestant(
                f"{tree} {budget} ({judge}{online})",
                f"{tree} ({judge}{online})",
                SpeculationConfig(tree=tree, tree_budget=budget, adapt=adapt),
                with_head,
            )
            for with_head, judge in _judges(has_head)
            for budget in budgets
        ]

    as_large_as_pays = [
        Contestant(
            f"dyspec throughput ({judge})",
            f"dyspec throughput ({judge})",
            SpeculationConfig(rule="throughput", tree="dyspec"),
            with_head,
        )
        for with_head, judge in _judges(has_head)
    ]
    static = [
        Contestant(
            f"static {'-'.join(map(str, shape))}",
            "static tree",
            SpeculationConfig(tree="static", tree_shape=list(shape)),
            has_head,
        )
        for shape in SHAPES
    ]
    best = [
        Contestant(
            f"static best {budget}", "static tree", SpeculationConfig(tree="static", tree_budget=budget), has_head
        )
        for budget in (BUDGETS if has_rates else ())
    ]
    online = dynamic("dyspec", [max(BUDGETS)], adapt=True)
    exact = dynamic("dyspec-exact", [EXACT_BUDGET])
    return [*dynamic("dyspec", BUDGETS), *online, *as_large_as_pays, *exact, *static, *best]
