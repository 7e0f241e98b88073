"""What can go wrong with CUDA graphs, each tried once on a GPU: expected beside found. The first step of `gpu_day.py`.

    python examples/gpu_hazards.py               # all hazards, in about four minutes
    python examples/gpu_hazards.py autocast      # one by name

Tests pretend these situations (tests/cuda_graphs); only a device shows whether the pretence is right. The target is a
Llama of three small layers in float64, so every text has to equal plain `generate()`'s exactly.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from bench_gpu import SHAPES, built, machine
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.cuda_graphs.captured_target import captured_target
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs

NEW_TOKENS = 24
PAIR = "text equals plain's: True"


class Pair:
    """A target on the device and its assistant."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        self.target: Any = on_device(built(SHAPES["tiny"], "cpu", dtype))
        speculation = SpeculationConfig(rule="fixed", num_tokens=3)
        self.assistant = SpecDecPPAssistant.from_early_exit(self.target, 1, speculation=speculation)

    def generate(self, ours: bool = True, rows: int = 1, length: int = 9, **how: Any) -> Tensor:
        ids = on_device(1 + torch.arange(length).repeat(rows, 1) % (self.target.config.vocab_size - 1))
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **how}
        text: Tensor = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=self.assistant if ours else None, **options
        )
        return text.cpu()

    def check(self, **how: Any) -> str:
        """Whether a text equals that of plain `generate()`, and why it was not captured, if so."""
        equal = torch.equal(self.generate(**how), self.generate(ours=False, **how))
        why_not = self.assistant.stats.uncaptured
        return f"text equals plain's: {equal}" + (f"; uncaptured: {why_not}" if why_not else "")


def on_device(part: Any) -> Any:
    return part.to(DEVICE)


def streams() -> str:
    """A function that waits for its device cannot be captured; later launches must not be on the capture's stream."""
    length = on_device(torch.zeros((), dtype=torch.long))
    before, made = torch.cuda.current_stream(length.device), Graphs(length.device)
    try:
        made.run("waits", lambda: length.add_(len(length.nonzero())), [length])  # type: ignore[arg-type, return-value]
        found = "captured"
    except CannotCaptureError:
        found = "refused"
    torch.cuda.empty_cache()
    made.run("adds", lambda: length.add_(1), [length])  # type: ignore[arg-type, return-value]
    return f"{found}; same stream: {torch.cuda.current_stream(length.device) == before}; then 0 + 1 = {int(length)}"


def neighbours() -> str:
    """A target that goes takes its stream's workspace along, and no other target's."""
    first, second = Pair(0), Pair(1)
    first.generate(), second.generate()
    del first
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # as PyTorch 2.12 does when a graph goes
    if clear is not None and torch.cuda.is_initialized():
        clear()
    torch.cuda.empty_cache()
    return second.check()


def autocast() -> str:
    """Graphs captured without autocast are not replayed within it."""
    pair = Pair(dtype=torch.float32)
    pair.generate()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pair.generate()
        within = pair.assistant.stats.uncaptured
    pair.generate()
    return f"within: {within}; after: {pair.assistant.stats.uncaptured}"


def threads() -> str:
    """Two targets are captured in two threads at a time."""
    pairs, found = [Pair(seed) for seed in range(2)], ["", ""]
    plain = [pair.generate(ours=False) for pair in pairs]

    def run(place: int) -> None:
        pair = pairs[place]
        equal = [torch.equal(pair.generate(), plain[place]) for _ in range(3)]
        found[place] = f"{sum(equal)} of 3, uncaptured: {pair.assistant.stats.uncaptured}"

    workers = [Thread(target=run, args=(place,)) for place in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    return "; ".join(found)


def exhaust(*_: Any) -> Any:
    """Run out of the device's memory."""
    return torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)


def memory() -> str:
    """A text for which there is no larger cache goes on without graphs."""
    pair = Pair()
    pair.generate()
    caches = captured_target(pair.target).context
    caches.empty = exhaust  # type: ignore[method-assign]
    try:
        return pair.check(length=300).partition(" (")[0]
    finally:
        del caches.empty


def batches() -> str:
    """Batches of one to eight rows share the graphs of four sizes, and their memory is bounded."""
    pair, equal = Pair(), []
    for rows in range(1, 9):
        equal.append(torch.equal(pair.generate(rows=rows), pair.generate(ours=False, rows=rows)))
    passes = captured_target(pair.target)
    share = pair.assistant.stats.graph_bytes / passes.budget.most
    return f"{sum(equal)} of 8 texts equal; {len(passes.rounds)} sizes; {share:.1%} of the budget"


def sliders() -> str:
    """Another temperature or top-p captures nothing."""
    pair, graphs = Pair(), []
    for place in range(10):
        pair.generate(do_sample=True, temperature=0.5 + 0.1 * place, top_p=0.5 + 0.05 * place)
        graphs.append(pair.assistant.stats.graphs)
    return f"graphs after the first and the last text: {graphs[0]} and {graphs[-1]}"


def deleted() -> str:
    """A deleted target frees its memory without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        pair = Pair()
        pair.generate()
        pair.assistant.detach()
        del pair
        return f"bytes left: {torch.cuda.memory_allocated() - before}"
    finally:
        gc.enable()


HAZARDS: dict[Callable[[], str], str] = {
    streams: "refused; same stream: True; then 0 + 1 = 1",
    neighbours: PAIR,
    autocast: "within: autocast is on; after: None",
    threads: "3 of 3, uncaptured: None; 3 of 3, uncaptured: None",
    memory: f"{PAIR}; uncaptured: memory ended",
    batches: "8 of 8 texts equal; 4 sizes; below 100 %",
    sliders: "graphs after the first and the last text: two equal numbers",
    deleted: "bytes left: 0 (or the workspace of the stream, at most 32 MiB)",
}


def main() -> None:
    names = {each.__name__: each for each in HAZARDS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=names, help="hazards; default: all")
    options = parser.parse_args()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no GPU here that torch sees, so no hazard can be tried.")
    print(f"# Hazards of CUDA graphs\n\n{machine(DEVICE)}\n\n| | expected | found |\n|---|---|---|", flush=True)
    for name in options.names or names:
        try:
            found = names[name]()
        except Exception as error:  # noqa: BLE001 - the others go on
            found = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"| {name} | {HAZARDS[names[name]]} | {found} |", flush=True)


DEVICE = "cuda"


if __name__ == "__main__":
    main()
