"""How long attention takes in captured passes over long caches, by kernel. A step of `gpu_day.py`.

    python examples/gpu_attention.py

Microseconds of a layer of Llama 8B's shape, for passes over 1, 6 and 31 tokens under a mask, by rows of the cache.
Captured passes let PyTorch choose the kernel ("chosen"), which may not split the keys of a head, so that a long cache
is read by few of the device's processors. "split" computes the same from three matrix products over pieces of the
cache, in any dtype (`split_attention`); captured passes use it from 4,096 rows on (`LONG` in
`cuda_graphs/model_copy.py`), which these times should confirm.
"""

import argparse
import time
from collections.abc import Callable

import torch
from bench_gpu import machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_specdecpp.cuda_graphs.model_copy import split_attention

HEADS, GROUP, SIZE = 8, 4, 128  # heads of keys, query heads of each, numbers of a head
CALLS, REPLAYS = 10, 5
KERNELS = {"chosen": None, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def inputs_for(width: int, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Queries of `width` tokens after a text that fills half of the cache, keys, values and mask."""
    query = torch.randn(1, HEADS, GROUP * width, SIZE, dtype=dtype, device=device)
    key, value = torch.randn(2, 1, HEADS, rows, SIZE, dtype=dtype, device=device)
    places = torch.arange(rows, device=device)
    seen = places <= rows // 2 + torch.arange(width, device=device)[:, None]
    mask = torch.zeros(width, rows, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return query, key, value, mask.repeat(GROUP, 1)[None, None]


def microseconds(run: Callable[[], object], device: str) -> float:
    """Of one call: of a captured graph of `CALLS` calls on a GPU."""
    repeated, waits = lambda: [run() for _ in range(CALLS)], torch.cuda.synchronize
    if device == "cuda":
        for _ in range(2):
            repeated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeated()
        replay: Callable[[], object] = graph.replay
    else:
        replay, waits = repeated, lambda: None
    taken = []
    for _ in range(REPLAYS):
        waits()
        begin = time.perf_counter()
        replay()
        waits()
        taken.append(time.perf_counter() - begin)
    return 1e6 * min(taken) / CALLS


def measured(width: int, rows: int, dtype: torch.dtype, device: str) -> dict[str, str]:
    """Microseconds by kernel."""
    found, given = {}, inputs_for(width, rows, dtype, device)
    for name, kernel in KERNELS.items():
        try:
            with sdpa_kernel([*SDPBackend.__members__.values()][1:] if kernel is None else kernel):
                found[name] = f"{microseconds(lambda: scaled_dot_product_attention(*given), device):.0f}"
        except RuntimeError:  # not of this device or dtype
            found[name] = "none"
    found["split"] = f"{microseconds(lambda: split_attention(*given), device):.0f}"
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 6, 31])
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 4096, 8192, 32768, 131072])
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    print(f"# Attention over long caches\n\n{machine(options.device)} Microseconds of a layer.\n", flush=True)
    print(f"| tokens | rows | {' | '.join(KERNELS)} | split |\n|---|---|{'---|' * (len(KERNELS) + 1)}", flush=True)
    for width in options.widths:
        for rows in options.rows:
            found = measured(width, rows, dtype, options.device)
            print(f"| {width} | {rows} | {' | '.join(found.values())} |", flush=True)


if __name__ == "__main__":
    main()
