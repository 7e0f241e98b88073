"""What it would bring to launch a round before the last one is read. A step of `gpu_day.py`.

    python examples/gpu_overlap.py --shapes 8b smollm2

A round of five candidates is replayed again and again, with the read of its report and with work of the host that takes
as long as that of a round. "now": launch, read, work. "overlapped": launch the next round, then read the last one.
"""

import argparse
import gc
import time
from typing import Any

import torch
from bench_gpu import SHAPES, built, machine

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.cuda_graphs.captured_target import captured_target

ROUNDS, NEW_TOKENS = 200, 64


def work(seconds: float) -> None:
    """Keep the host busy, as the Python code of a round does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def a_round(target: Any) -> tuple[Any, Any, float]:
    """The captured rounds of a text, their graph, and seconds of the host in a round. All rows have ended, so replays
    neither need more rows of the caches nor change the text."""
    speculation = SpeculationConfig(rule="fixed", num_tokens=5)
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, speculation=speculation)
    ids = torch.arange(1, 65, device=target.device)[None]
    for _ in range(2):
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, max_new_tokens=NEW_TOKENS,
                        do_sample=False, pad_token_id=0)  # fmt: skip
    (rounds, _), *_ = captured_target(target).rounds.values()
    rounds.draft.continue_with([])
    graph = next(graph for key, (graph, _) in rounds.graphs._graphs.items() if key[0] == "round")
    stats = assistant.stats
    return rounds, graph, (stats.overhead_seconds + stats.draft_seconds) / stats.rounds


def now(rounds: Any, graph: Any, host: float) -> None:
    for _ in range(ROUNDS):
        graph.replay()
        rounds._read_rows()
        work(host)


def overlapped(rounds: Any, graph: Any, host: float) -> None:
    """With two buffers for reports, and an event for each."""
    first, events = rounds.host_report, [torch.cuda.Event() for _ in range(2)]
    buffers = [first, first.clone().pin_memory()]
    for number in range(ROUNDS + 1):
        if number < ROUNDS:
            graph.replay()
            buffers[number % 2].copy_(rounds.report, non_blocking=True)
            events[number % 2].record()
        if number:
            events[(number - 1) % 2].synchronize()
            buffers[(number - 1) % 2].tolist()
            work(host)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "smollm2"])
    options = parser.parse_args()
    print(f"# Rounds that are read late\n\n{machine('cuda')} Milliseconds of a round.\n", flush=True)
    print("| | host | now | overlapped |\n|---|---|---|---|")
    for shape in options.shapes:
        target = on_device(built(SHAPES[shape], "cpu" if shape == "tiny" else "cuda", torch.bfloat16))
        rounds, graph, host = a_round(target)
        found = []
        for way in (now, overlapped):
            begin = time.perf_counter()
            way(rounds, graph, host)
            torch.cuda.synchronize()
            found.append(1000 * (time.perf_counter() - begin) / ROUNDS)
        print(f"| {shape} | {1000 * host:.2f} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)
        del target, rounds, graph
        gc.collect()


def on_device(part: Any) -> Any:
    return part.to("cuda")


if __name__ == "__main__":
    main()
