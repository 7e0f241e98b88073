"""A target whose passes are compiled, by itself and with compiled drafts, where launching operations takes the time.

    OMP_NUM_THREADS=1 python examples/launch_bound_compiled.py --dtype float32

The model of many tiny layers of `launch_bound.py`, in a static cache, as `generate(cache_implementation="static")` runs
it on a GPU; here torch.compile makes C++ of it, which needs a compiler. The draft is one layer that reads the target's
states: the target's first, whose attention adds nothing, since such a draft does not see the first token. What the
other layers add is scaled, to nothing where all candidates are accepted; where none is, the draft reads the tokens'
embeddings turned around. Contestants take turns; medians of the repetitions. With one thread the times are the
processor's, without the time that other processes have it. What is compiled is made before (`warm_up`), and its seconds
are printed.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from launch_bound import NEW_TOKENS, deep_llama, milliseconds
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CompileConfig

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.kinds.conditioned import Fusion

KINDS = {"all accepted": (0.0, 1.0), "some accepted": (0.05, 1.0), "none accepted": (0.0, -1.0)}
TREE: dict[str, Any] = {"tree": "dyspec", "tree_budget": 15, "tree_depth": 8}  # 16 nodes with the root
SPECULATION: dict[str, dict[str, Any]] = {
    "chain, fixed 4": {"rule": "fixed", "num_tokens": 4},
    "chain, throughput": {"rule": "throughput"},
    "tree of 16": TREE,
    "tree, throughput": {**TREE, "rule": "throughput"},
}
EAGER, PLAIN = "plain generate(), uncompiled", "plain generate()"


class Contest:
    """One target for all, so that it is compiled once: what its layers add changes in place."""

    def __init__(self, dtype: torch.dtype, hidden_size: int, names: Sequence[str], device: str = "cpu") -> None:
        self.target = deep_llama(1.0, dtype, hidden_size, first=1).to(device)
        with torch.no_grad():
            self.target.model.layers[0].self_attn.o_proj.weight.zero_()
        later = self.target.model.layers[1:]
        outputs = [each for layer in later for each in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)]
        self.outputs = [(weight, weight.detach().clone()) for weight in outputs]
        self.fusion: Any = Fusion.untrained(self.target, [1, len(later) // 2])
        self.embedded = self.fusion.fuse.weight.detach().clone()
        self.compiled = CompileConfig(dynamic=False, mode="default" if device == "cpu" else "reduce-overhead")
        self.compiled._compile_all_devices = True  # type: ignore[assignment]
        self.assistants = {
            name: SpecDecPPAssistant.from_conditioned(
                self.target, 1, fusion=self.fusion, speculation=SpeculationConfig(**settings, compile=True)
            )
            for name, settings in SPECULATION.items()
            if name in names
        }

    @torch.no_grad()
    def be(self, share: float, sign: float) -> None:
        """Let the later layers add so much, and the draft read the embeddings with this sign."""
        for weight, original in self.outputs:
            weight.copy_(share * original)
        for assistant in self.assistants.values():
            fusion: Any = assistant.ready_drafter().fusion
            fusion.fuse.weight.copy_(sign * self.embedded)
            assistant.memory.clear()

    def text(self, name: str) -> Tensor:
        cache = {} if name == EAGER else {"cache_implementation": "static", "compile_config": self.compiled}
        found: Tensor = self.target.generate(
            torch.arange(1, 11, device=self.target.device)[None], assistant_model=self.assistants.get(name),
            max_new_tokens=NEW_TOKENS, do_sample=False, **cache,
        )  # fmt: skip
        return found


def warmed(contest: Contest) -> Table:
    """Seconds of compilation."""
    table = Table("", "seconds", title="compiled before the first text")
    begin = time.perf_counter()
    contest.text(PLAIN)
    table.add_row(PLAIN, f"{time.perf_counter() - begin:.0f}")
    for name, assistant in contest.assistants.items():
        seconds = assistant.warm_up(10 + NEW_TOKENS, compile_config=contest.compiled, do_sample=False)
        table.add_row(f"{name}, what is not compiled yet", f"{seconds:.0f}")
    return table


def results(contest: Contest, kind: str, repetitions: int) -> Table:
    contest.be(*KINDS[kind])
    names = [EAGER, PLAIN, *contest.assistants]
    actions: dict[str, Callable[[], object]] = {name: partial(contest.text, name) for name in names}
    times = milliseconds(actions, repetitions, contest.target.device)
    plain = contest.text(PLAIN)
    table = Table(
        "", "ms a token", "x plain", "tokens a pass", "draft / target / rest, ms a round", "same text", title=kind
    )
    for name in names:
        assistant = contest.assistants.get(name)
        same, tokens, shares = torch.equal(contest.text(name), plain), "", ""
        if assistant is not None and (stats := assistant.stats).rounds:
            parts = (stats.draft_seconds, stats.target_seconds, stats.overhead_seconds)
            tokens = f"{stats.tokens_per_pass:.2f}"
            shares = " / ".join(f"{1000 * seconds / stats.rounds:.1f}" for seconds in parts)
        speed = f"{times[PLAIN] / times[name]:.2f}"
        table.add_row(name, f"{times[name] / NEW_TOKENS:.2f}", speed, tokens, shares, "yes" if same else "no")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float32")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--contestants", nargs="+", choices=SPECULATION, default=list(SPECULATION))
    options = parser.parse_args()
    contest = Contest(getattr(torch, options.dtype), options.hidden_size, options.contestants)
    console = Console(width=140)
    console.print(warmed(contest))
    for kind in options.kinds:
        console.print(results(contest, kind, options.repetitions))


if __name__ == "__main__":
    main()
