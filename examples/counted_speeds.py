"""Speeds of rules on a machine of which every cost is known: counted, so that other processes do not matter.

    OMP_NUM_THREADS=1 python examples/counted_speeds.py --target ID_OR_FOLDER --assistant REPO --data FILE

The model generates real text, and a clock adds what each pass costs: a target pass by its number of tokens, draft
steps, further candidates of a step, and tokens that the draft reads at first, all in plain passes over one token. The
rule `throughput` reads that clock and learns the costs from it. "first": each answer is the first of a process, so
costs are assumed; otherwise answers come in order, with all that was learned. Work outside of passes costs nothing.
The default costs were measured with SmolLM2 and its trained layer in bfloat16 on a Xeon with AMX.
"""

import statistics
from typing import Any

from equal_texts import given_by, parser_of
from rich.console import Console
from rich.table import Table

from hf_specdecpp import assist
from hf_specdecpp.drafting.chain import ChainDrafting
from hf_specdecpp.generation import candidate_generator
from hf_specdecpp.generation.single_target import SingleTarget
from hf_specdecpp.models.cpu.products import ProductTimes
from hf_specdecpp.throughput.known_costs import forget_costs

# In plain passes: a target pass over 1, 2, ... tokens, and each further token; a draft step, a further candidate of a
# step, and a token that the draft reads at first.
VERIFY, FURTHER = [1, 1.09, 1.09, 1.09, 1.1, 1.1, 1.1, 1.11, 1.12, 1.13, 1.14, 1.15, 1.16, 1.17, 1.18, 1.19], 0.015
STEP, BRANCH, READ = 0.08, 0.004, 0.001
PLAIN_SECONDS = 0.06
PRODUCTS = (1e-10, 1.01e-10, 1.06e-10, 1.25e-10)  # seconds per weight of products of 1 to 64 rows, known beforehand
SETTINGS: dict[str, dict[str, Any]] = {
    "throughput (default)": {},
    **{f"fixed {count}": {"rule": "fixed", "num_tokens": count} for count in (1, 2, 3, 4, 6, 8)},
    **{f"threshold {most}": {"rule": "threshold", "threshold": most} for most in (0.3, 0.5, 0.7)},
    "tree of 8": {"rule": "fixed", "tree": "dyspec", "tree_budget": 8},
    "tree of 16": {"rule": "fixed", "tree": "dyspec", "tree_budget": 16},
}


class CountedClock:
    """Seconds that passes were said to take. `install` lets passes and rules use it, in the whole process."""

    def __init__(self, step: float, read: float) -> None:
        self.seconds, self.step, self.cost_of_reading = 0.0, step, read

    def __call__(self) -> float:
        return self.seconds

    def install(self) -> None:
        candidate_generator.computing_clock = lambda *_: self
        ProductTimes.of = lambda *_: ProductTimes(PRODUCTS, PRODUCTS, 1, 0)  # type: ignore[method-assign,assignment]
        self._count_drafts()
        read = SingleTarget.read

        def counted(side: Any, rounds: Any) -> None:
            tokens = len(rounds[0].tree) + 1
            self.seconds += PLAIN_SECONDS * (
                VERIFY[min(tokens, len(VERIFY)) - 1] + FURTHER * max(tokens - len(VERIFY), 0)
            )
            read(side, rounds)

        SingleTarget.read = counted  # type: ignore[method-assign]

    def _count_drafts(self) -> None:
        chains: Any = ChainDrafting
        trees: Any = candidate_generator.TreeDrafting
        chain, tree = chains.draft, trees.draft  # the first is a coroutine

        def add(drafted: Any, passes: int, unread: int) -> Any:
            if passes:
                further = max(len(drafted.scores) - passes, 0)
                work = self.step * passes + BRANCH * further + self.cost_of_reading * unread
                self.seconds += PLAIN_SECONDS * work
            return drafted

        def counted_chain(method: Any, input_ids: Any, longest: int) -> Any:
            unread = method.session.unread - 1
            drafted = yield from chain(method, input_ids, longest)
            return add(drafted, method.session.passes, unread)

        def counted_tree(method: Any, input_ids: Any, longest: int) -> Any:
            unread = method.session.unread - 1
            drafted = tree(method, input_ids, longest)
            return add(drafted, drafted.passes, unread)

        chains.draft, trees.draft = counted_chain, counted_tree


def speeds(clock: CountedClock, target: Any, given: list[Any], tokens: int, are_first: bool, make: Any) -> list[float]:
    """Plain passes by the counted ones, of each answer."""
    found = []
    forget_costs()
    assistant = make()
    for inputs in given:
        if are_first:
            forget_costs()
            assistant = make()
        clock.seconds = 0.0
        ids = target.generate(**inputs, max_new_tokens=tokens, do_sample=False, assistant_model=assistant)
        further = ids.shape[1] - inputs["input_ids"].shape[1] - 1  # the prompt's pass generates the first token
        if further:
            found.append(further * PLAIN_SECONDS / clock.seconds)
    return found


def main(words: list[str] | None = None) -> None:
    parser = parser_of(__doc__, count=12, tokens=64)
    parser.add_argument("--step", type=float, default=STEP, help="cost of a draft step")
    parser.add_argument("--read", type=float, default=READ, help="cost of a token that the draft reads at first")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--no_lookup", action="store_true", help="drafted candidates only")
    options = parser.parse_args(words)
    target, given = given_by(options)
    clock = CountedClock(options.step, options.read)
    clock.install()
    table = Table("setting", "answers", "speed over plain, mean", "median", "lowest")
    for name in options.settings:
        for are_first in (True, False) if "throughput" in name else (False,):
            found = speeds(
                clock, target, given, options.max_new_tokens, are_first,
                lambda name=name: assist(
                    target, options.assistant, default=False, lookup=not options.no_lookup, **SETTINGS[name]
                ),
            )  # fmt: skip
            mean = len(found) / sum(1.0 / each for each in found)
            row = mean, statistics.median(found), min(found)
            table.add_row(name + (", first" if are_first else ""), str(len(found)), *(f"{each:.2f}" for each in row))
    Console().print(table)


if __name__ == "__main__":
    main()
