"""What a user of a GPU gains, as a report in Markdown that can be pasted into an issue.

    python examples/bench_gpu.py > report.md          # or: make bench-gpu

The published pairs, SmolLM2-135M-Instruct and Qwen2.5-Coder-1.5B-Instruct with the assistants of `hub_cards/`, greedy,
on prompts of six kinds: plain `generate()` and ours, each as it is and compiled (`cache_implementation="static"`, and
for ours `compile=True` after `warm_up`), and economize (PyPI) with its CUDA graphs, where that is installed and the
draft is a model of its own. Batches of 4 and 8 have no compiled form of ours. Then the launch-bound table of
`launch_bound_compiled.py`. All take turns, and speeds are medians of ratios within a prompt or batch. Without a GPU
nothing is run unless `--device cpu` asks for it, and the report says so.
"""

import argparse
import importlib.util
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from beside_economize import Run, economize
from launch_bound_compiled import KINDS, SPECULATION, Contest, results, warmed
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts.encoding import Codec, padded
from hf_specdecpp.texts.prompts import read_prompts
from hf_specdecpp.version import __version__

ROOT = Path(__file__).parents[1]
PAIRS = [
    ["HuggingFaceTB/SmolLM2-135M-Instruct", str(ROOT / "hub_cards" / "specdecpp-smollm2-135m-instruct")],
    ["Qwen/Qwen2.5-Coder-1.5B-Instruct", str(ROOT / "hub_cards" / "specdecpp-qwen2.5-coder-1.5b-instruct")],
]
PROMPTS = sorted((ROOT / "tests" / "data" / "six_kinds").glob("*.jsonl"))
OURS: dict[str, dict[str, Any]] = {
    "ours": {"rule": "throughput"},
    "ours, tree of 16": {"rule": "throughput", "tree": "dyspec", "tree_budget": 15},
}
STATIC = {"cache_implementation": "static"}
PLAIN, PLAIN_COMPILED = "plain generate()", "plain generate(), compiled"


class Pair:
    """A target with an assistant, and who takes part."""

    def __init__(self, target: str, assistant: str, device: str, dtype: torch.dtype, longest: int) -> None:
        self.target: CausalLM = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
        # Two, since one that is no longer to be compiled forgets what was.
        self.eager, self.compiled = (
            SpecDecPPAssistant.from_pretrained(assistant, target=self.target) for _ in range(2)
        )
        self.codec, self.longest = Codec.from_pretrained(target), longest
        draft = self.eager.config.draft_id
        has_rival = draft is not None and importlib.util.find_spec("economize") is not None
        self.rival = economize(self.target, draft, 4) if has_rival else None

    def batches(self, size: int, each: int) -> list[dict[str, Tensor]]:
        """Prompts of every kind, `each` of them, put together."""
        prompts = [prompt for file in PROMPTS for prompt in read_prompts(str(file))[:each]]
        rows = [item.input_ids for item in self.codec.encode_all(prompts)]
        batches = [padded(rows[start : start + size]) for start in range(0, len(rows) - size + 1, size)]
        return [{name: part.to(self.target.device) for name, part in batch.items()} for batch in batches]

    def contestants(self, size: int, compiles: bool) -> dict[str, Callable[[dict[str, Tensor], int], Run]]:
        found = {PLAIN: self._run({})}
        if compiles:
            found[PLAIN_COMPILED] = self._run(STATIC)
        for name, settings in OURS.items():
            if size == 1 or "tree" not in settings:
                found[name] = self._run({}, SpeculationConfig(**settings))
            if size == 1 and compiles:
                self.compiled.speculation = SpeculationConfig(**settings, compile=True)
                found[f"{name}, compiled"] = self._run(STATIC, self.compiled.speculation)
                seconds = self.compiled.warm_up(self.longest, do_sample=False)
                print(f"{name}: compiled in {seconds:.0f} s.\n", flush=True)
        if self.rival is not None:
            found["economize, 4 candidates"] = self.rival
        return found

    def _run(
        self, how: dict[str, Any], speculation: SpeculationConfig | None = None
    ) -> Callable[[dict[str, Tensor], int], Run]:
        assistant = None
        if speculation is not None:
            assistant = self.compiled if speculation.compile else self.eager

        def run(batch: dict[str, Tensor], new_tokens: int) -> Run:
            if assistant is not None:
                assistant.speculation = speculation
            texts = self.target.generate(
                **batch, **how, assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
            )
            passes = 1.0 if assistant is None else assistant.stats.tokens_per_pass
            return texts[:, batch["input_ids"].shape[1] :], passes

        return run


def measured(pair: Pair, size: int, each: int, new_tokens: int, compiles: bool) -> Table:
    """All contestants on all batches of a size."""
    batches, everyone = pair.batches(size, each), pair.contestants(size, compiles)
    bases = [name for name in (PLAIN, PLAIN_COMPILED) if name in everyone]
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    passes: dict[str, list[float]] = {name: [] for name in everyone}
    equal = dict.fromkeys(everyone, 0)
    for name in everyone:
        everyone[name](batches[0], new_tokens)  # compiles what is not compiled, and measures costs
    for number, batch in enumerate(batches):
        texts: dict[str, Tensor] = {}
        turn = number % len(everyone)
        for name in [*everyone][turn:] + [*everyone][:turn]:
            begin = time.perf_counter()
            texts[name], tokens = everyone[name](batch, new_tokens)
            texts[name] = texts[name].cpu()
            seconds[name].append(time.perf_counter() - begin)
            passes[name].append(tokens)
        for name, text in texts.items():
            equal[name] += int((text == texts[PLAIN]).all(1).sum())
    ratio_heads = [name.replace(PLAIN, "x plain") for name in bases]
    table = Table("", "tokens a second", *ratio_heads, "tokens a pass", "texts equal to plain's")
    for name, times in seconds.items():
        ratios = [f"{median(base / own for base, own in zip(seconds[of], times, strict=True)):.2f}" for of in bases]
        speed, count = size * new_tokens * len(times) / sum(times), size * len(batches)
        table.add_row(name, f"{speed:.1f}", *ratios, f"{median(passes[name]):.2f}", f"{equal[name]} of {count}")
    return table


def markdown(table: Table) -> str:
    rows = [[str(column.header) for column in table.columns], ["---"] * len(table.columns)]
    rows += [list(map(str, cells)) for cells in zip(*(column.cells for column in table.columns), strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def machine(device: str) -> str:
    """Where, and with what."""
    if device == "cpu":
        threads = torch.get_num_threads()
        name = f"**No GPU was used**, so nothing of this tells what one does: {platform.machine()}, {threads} threads"
    else:
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if device == "cuda" else device
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, hf_specdecpp {__version__}"
    return f"{name}.\n\n{versions}, Python {platform.python_version()}, {platform.platform()}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="by default the GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--pair", nargs=2, action="append", metavar=("TARGET", "ASSISTANT"), help="the published ones")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--max_length", type=int, default=2048, help="of the texts that everything is compiled for")
    parser.add_argument("--uncompiled", action="store_true", help="nothing that is compiled, which takes minutes")
    parser.add_argument("--repetitions", type=int, default=7, help="of the launch-bound table")
    options = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if options.device is None and accelerator is None:
        sys.exit(
            "There is no GPU here that torch sees, so there is nothing to report. --device cpu runs all of it anyway."
        )
    device = options.device or accelerator.type
    dtype = getattr(torch, options.dtype)
    print(f"# On a GPU\n\n{machine(device)}\n```console\n{' '.join(['python', *sys.argv])}\n```\n", flush=True)
    for target, assistant in options.pair or PAIRS:
        pair = Pair(target, assistant, device, dtype, options.max_length)
        for size in options.batch_sizes:
            print(f"## {Path(target).name}, {options.dtype}, batch of {size}\n", flush=True)
            table = measured(pair, size, options.prompts, options.max_new_tokens, not options.uncompiled)
            print(markdown(table), flush=True)  # the report is piped to a file, and the next table takes minutes
    if not options.uncompiled:
        print(launch_bound(dtype, device, options.repetitions))


def launch_bound(dtype: torch.dtype, device: str, repetitions: int) -> str:
    contest = Contest(dtype, 64, list(SPECULATION), device)
    parts = ["## Launch-bound, 28 layers of 64 numbers\n", markdown(warmed(contest))]
    for kind in KINDS:
        parts += [f"### {kind}\n", markdown(results(contest, kind, repetitions))]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
