"""What a pass over a few tokens costs on this CPU in float32, with each choice of products.

    OMP_NUM_THREADS=1 python examples/cpu_passes.py HuggingFaceTB/SmolLM2-135M-Instruct

Four rows: plain PyTorch, oneDNN with the weights as they are, oneDNN with packed weights, and
int8, which is for drafts only. Milliseconds, the least of several passes taken in turns.
"""

import sys
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_specdecpp.models.causal_lm import CACHE
from hf_specdecpp.models.cpu_products import FasterProducts, Part
from hf_specdecpp.models.products import Always, PackedWeights, quantise

COUNTS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
CONTEXT, TURNS = 64, 7


def least_times(model, contexts):
    """Milliseconds of passes over each number of tokens, within each context."""
    cache = DynamicCache(config=model.config)
    model(torch.arange(CONTEXT)[None], **{CACHE: cache})
    cache.activate_past_recording()  # so that it can be rolled back
    best = {}
    for _ in range(TURNS):
        for count in COUNTS:
            for name, context in contexts.items():
                with context:
                    begin = time.perf_counter()
                    model(torch.arange(count)[None], **{CACHE: cache})
                    seconds = time.perf_counter() - begin
                best[name, count] = min(best.get((name, count), 1e9), 1000 * seconds)
                cache.crop(-count)
    return best


@torch.no_grad()
def main(name):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    packed = PackedWeights()
    contexts = {
        "own": nullcontext(),
        "onednn": FasterProducts(Part([model], Always("onednn"))),
        "packed": FasterProducts(Part([model], Always("packed")), packed=packed),
        "int8": FasterProducts(draft=[model], int8=PackedWeights(quantise)),
    }
    best = least_times(model, contexts)
    print(f"{name}, {torch.get_num_threads()} thread(s), ms a pass")
    print(f"packed copies take {packed.bytes / 2**20:.0f} MiB")
    print("tokens " + "".join(f"{count:>7}" for count in COUNTS))
    for kind in contexts:
        print(f"{kind:<7}" + "".join(f"{best[kind, count]:7.1f}" for count in COUNTS))


if __name__ == "__main__":
    main(*sys.argv[1:])
