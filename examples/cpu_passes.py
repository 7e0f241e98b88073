"""Time passes over a few tokens on this CPU, with each kind of matrix multiplication.

    OMP_NUM_THREADS=1 python examples/cpu_passes.py HuggingFaceTB/SmolLM2-135M-Instruct bfloat16 64

The last argument is the number of cached tokens. Three rows: PyTorch's own multiplications, exact copies of the weights
(in half precision attention computes in float32, too), and int8, which only drafts use. As in verification, tokens of
a pass attend one at a time in half precision. The last line shows how many layers have float16 copies or oneDNN's.
Milliseconds, the minimum of several passes taken in turns.
"""

import sys
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_specdecpp.models.causal_lm import CACHE
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.grouped_attention import computes_in_half, separate_queries
from hf_specdecpp.models.cpu.products import int8_copy, measured_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies, background

COUNTS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
TURNS = 7


def least_times(model, contexts, cached):
    """Milliseconds of passes over each number of tokens after `cached` tokens, within each context."""
    apart = separate_queries if computes_in_half(model) else nullcontext
    cache = DynamicCache(config=model.config)
    model((torch.arange(cached) % 999)[None], **{CACHE: cache})
    cache.activate_past_recording()  # so that it can be rolled back
    best = {}
    for _ in range(TURNS):
        for count in COUNTS:
            for name, context in contexts.items():
                with context, apart():
                    begin = time.perf_counter()
                    model(torch.arange(count)[None], **{CACHE: cache})
                    seconds = time.perf_counter() - begin
                best[name, count] = min(best.get((name, count), 1e9), 1000 * seconds)
                cache.crop(-count)
    return best


@torch.no_grad()
def main(name, dtype="bfloat16", cached="64"):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).eval()
    copies, begin = WeightCopies(measured_copy), time.perf_counter()
    with_copies = FasterProducts(model, copies=copies)
    background.wait()
    making = time.perf_counter() - begin
    contexts = {
        "own": nullcontext(),
        "copies": with_copies,
        "int8": FasterProducts(draft=[model], int8=WeightCopies(int8_copy)),
    }
    best = least_times(model, contexts, int(cached))
    print(f"{name}, {dtype}, {torch.get_num_threads()} thread(s), {cached} cached tokens, ms a pass")
    print("tokens " + "".join(f"{count:>7}" for count in COUNTS))
    for kind in contexts:
        print(f"{kind:<7}" + "".join(f"{best[kind, count]:7.1f}" for count in COUNTS))
    print(f"copies: {with_copies.described}, {copies.bytes / 2**20:.0f} MiB, made in {making:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
