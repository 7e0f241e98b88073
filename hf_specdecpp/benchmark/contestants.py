"""The compared methods: plain generation, transformers' speculation, and this package with every rule.

In names, `(head)` or `(q)` is the estimator of acceptance; `online`: calibrated by earlier rounds (`Decisions.adapt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from transformers import GenerationConfig

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.memory import Memory

LENGTHS, THRESHOLDS = range(1, 15), (0.1, 0.3, 0.5, 0.7, 0.9)
BUDGETS, EXACT_BUDGET = (4, 8, 16, 32, 64), 16  # nodes of dynamic trees
# Children per node at each depth; the trees have 6, 16, 14, 64 and 60 nodes.
SHAPES = ((2, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (4, 3, 2, 1), (4, 2, 2, 1, 1))
# transformers' assisted generation: maximum number of candidates, schedule, and confidence threshold.
STOCK = {
    "default": (20, "constant", 0.4),
    **{f"constant {count}": (count, "constant", 0.0) for count in (2, 3, 5, 10)},
    "heuristic": (5, "heuristic", 0.0),
}


@dataclass(eq=False)
class Contestant:
    """A method of generation that the benchmark times.

    Args:
        family: contestants of a family differ in one setting.
        speculation: settings of the assistant, except `cpu_products`; `None` for methods of transformers.
        decisions: decisions of the assistant.
        with_head: whether acceptance is estimated by the head, otherwise by the draft's own probability.
        alone: without the draft, so that all candidates are looked up.
        stock: for transformers' assisted generation, fields of the draft's generation config.
        lookup: for transformers' prompt lookup, arguments of `generate()`.
        same_passes: for plain generation, use the matrix multiplications of the assistant.
        memory: statistics that the assistant collects for this contestant, separate from those of others.
    """

    name: str
    family: str
    speculation: SpeculationConfig | None = None
    with_head: bool = True
    decisions: Decisions = field(default_factory=Decisions)
    alone: bool = False
    stock: dict[str, Any] | None = None
    lookup: dict[str, int] | None = None
    same_passes: bool = False
    memory: Memory = field(default_factory=Memory, repr=False)
    _without_draft: SpecDecPPAssistant | None = field(default=None, init=False, repr=False)

    @property
    def ours(self) -> bool:
        return self.speculation is not None

    @property
    def is_constant(self) -> bool:
        """Whether its chains have a fixed length up to 8, or end by a threshold of 0.3 to 0.7 that is not `online`."""
        config = self.speculation
        if config is None or config.draws_trees:
            return False
        if config.rule == "fixed":
            return config.num_tokens <= 8
        return config.rule == "threshold" and 0.3 <= config.threshold <= 0.7 and not self.decisions.adapt

    @contextmanager
    def arguments(self, assistant: SpecDecPPAssistant, target: CausalLM) -> Iterator[dict[str, Any]]:
        """Context that sets up target and assistant, and yields the arguments for the target's `generate()`."""
        if self.same_passes:
            with assistant.setup().products(target):
                yield {}
        elif self.stock is not None:
            draft = assistant.ready_drafter().model
            with changed(draft, generation_config=GenerationConfig(**self.stock)):
                yield {"assistant_model": draft}
        elif self.speculation is not None:
            speculation = replace(self.speculation, cpu_products=assistant.speculation.cpu_products)
            if self.alone:
                helper = self._without_draft = self._without_draft or assist(target, "lookup", default=False)
                helper.speculation, helper.copies, helper.memory = speculation, assistant.copies, self.memory
                yield {"assistant_model": helper}
                assistant.stats = helper.stats
                return
            head = assistant.head if self.with_head else None
            with changed(assistant, speculation=speculation, decisions=self.decisions, memory=self.memory, head=head):
                yield {"assistant_model": assistant}
        else:
            yield self.lookup or {}


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of `owner` have these values; earlier values are restored."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


PLAIN = Contestant("plain", "plain")
SAME_PASSES = Contestant("plain, same passes", "plain, same passes", same_passes=True)
BASELINES = (PLAIN, SAME_PASSES)


def all_contestants(has_head: bool, can_tree: bool = True, has_rates: bool = False) -> list[Contestant]:
    """Return all contestants for an assistant, given whether it has a head, trees, and rates for static trees."""
    judges = ("head", "q") if has_head else ("q",)
    fields = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    assisted = [
        Contestant(f"transformers {name}", "transformers", stock=dict(zip(fields, values, strict=True)))
        for name, values in STOCK.items()
    ]
    *baselines_and_lookups, lookup = without_draft()
    trees = _trees(judges, has_rates) if can_tree else []
    found = [*baselines_and_lookups, *assisted, *_chains(judges), *trees, lookup]
    for kind in ("draft", "trees") if can_tree else ("draft",):
        both = SpeculationConfig(rule="throughput", lookup=True, tree="dyspec" if kind == "trees" else False)
        found.append(Contestant(f"lookup + {kind} ({judges[0]})", f"lookup + {kind}", both, has_head))
    return found


def quick_contestants(has_head: bool) -> list[Contestant]:
    """Return the contestants of `--quick`."""
    judge = "head" if has_head else "q"
    names = {"transformers default", "fixed 2", "fixed 5", f"threshold 0.5 ({judge} online)", f"throughput ({judge})"}
    return [*BASELINES, *(each for each in all_contestants(has_head) if each.name in names)]


def without_draft() -> list[Contestant]:
    """Contestants that need no draft. `lookup` is a new object in each call: it keeps an assistant of a target."""
    options = ({"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": size} for size in (2, 3))
    theirs = [
        Contestant(f"prompt lookup {each['max_matching_ngram_size']}", "prompt lookup", lookup=each) for each in options
    ]
    settings = SpeculationConfig(rule="throughput", lookup=True)
    return [*BASELINES, *theirs, Contestant("lookup", "lookup", settings, with_head=False, alone=True)]


def _judged(family: str, setting: Any, judge: str, **settings: Any) -> Contestant:
    """A contestant of this package, with the estimator (`judge`) "head", "q", "head online" or "q online"."""
    name = family if setting is None else f"{family} {setting:g}"
    decisions = Decisions(adapt=judge.endswith("online") or settings["rule"] == "throughput")
    speculation = SpeculationConfig(**settings)
    return Contestant(f"{name} ({judge})", f"{family} ({judge})", speculation, judge.startswith("head"), decisions)


def _chains(judges: Sequence[str]) -> list[Contestant]:
    lengths = ((f"fixed {length}", SpeculationConfig(rule="fixed", num_tokens=length)) for length in LENGTHS)
    found = [Contestant(name, "fixed", settings, "head" in judges) for name, settings in lengths]
    for judge in judges:
        for how in (judge, f"{judge} online"):
            found += [_judged("threshold", h, how, rule="threshold", threshold=h) for h in THRESHOLDS]
        found.append(_judged("throughput", None, judge, rule="throughput"))
    return found


def _trees(judges: Sequence[str], has_rates: bool) -> list[Contestant]:
    sizes = [("dyspec", size, "") for size in BUDGETS]
    sizes += [("dyspec", max(BUDGETS), " online"), ("dyspec-exact", EXACT_BUDGET, "")]
    found = [
        _judged(tree, size, judge + online, rule="threshold", tree=tree, tree_budget=size)
        for tree, size, online in sizes
        for judge in judges
    ]
    for judge in judges:
        found.append(_judged("dyspec throughput", None, judge, rule="throughput", tree="dyspec"))
    shapes: dict[str, dict[str, Any]] = {"-".join(map(str, shape)): {"tree": list(shape)} for shape in SHAPES}
    if has_rates:
        shapes |= {f"best {budget}": {"tree": "static", "tree_budget": budget} for budget in BUDGETS}
    for name, settings in shapes.items():
        speculation = SpeculationConfig(rule="threshold", **settings)
        found.append(Contestant(f"static {name}", "static tree", speculation, "head" in judges))
    return found


def choose(contestants: Sequence[Contestant], patterns: Sequence[str]) -> list[Contestant]:
    """The baselines, and all whose name or family matches a pattern (none: all). `ValueError` if none matches one."""

    def matches(contestant: Contestant, pattern: str) -> bool:
        return fnmatch(contestant.name, pattern) or fnmatch(contestant.family, pattern)

    for pattern in patterns:
        if not any(matches(contestant, pattern) for contestant in contestants):
            known = ", ".join(repr(contestant.name) for contestant in contestants)
            undrafted = all(each in BASELINES or each.lookup or each.alone for each in contestants)
            hint = " All others need a draft: --assistant REPO." if undrafted else ""
            raise ValueError(f"No contestant matches {pattern!r}. Known contestants: {known}.{hint}")
    return [each for each in contestants if each in BASELINES or any(matches(each, one) for one in patterns or "*")]
