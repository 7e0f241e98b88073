"""What a target pass over a few tokens costs on this CPU in float32: plain PyTorch, oneDNN, oneDNN with packed weights.

    OMP_NUM_THREADS=1 python examples/cpu_passes.py HuggingFaceTB/SmolLM2-135M-Instruct

hf_specdecpp verifies with oneDNN; the last column is `SpeculationConfig(pack_weights=True)`. Milliseconds, the least of
several passes taken in turns.
"""

import sys
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_specdecpp.models.cpu_products import fast_linear, pack

COUNTS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
CONTEXT, TURNS = 64, 7


def least_times(model, contexts):
    """Milliseconds of passes over each number of tokens, within each context."""
    cache = DynamicCache(config=model.config)
    model(torch.arange(CONTEXT)[None], past_key_values=cache)
    cache.activate_past_recording()  # so that it can be rolled back
    best = {}
    for _ in range(TURNS):
        for count in COUNTS:
            for name, context in contexts.items():
                begin = time.perf_counter()
                with context():
                    model(torch.arange(count)[None], past_key_values=cache)
                best[name, count] = min(best.get((name, count), 1e9), 1000 * (time.perf_counter() - begin))
                cache.crop(-count)
    return best


@torch.no_grad()  # not inference_mode: its tensors tell nobody when they change
def main(name):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    best = least_times(model, {"plain": nullcontext, "oneDNN": lambda: fast_linear(model)})
    megabytes = pack(model) / 2**20
    best |= least_times(model, {"packed": lambda: fast_linear(model)})
    print(f"{name}, {torch.get_num_threads()} thread(s), ms a pass; packed copies take {megabytes:.0f} MiB")
    print("tokens " + "".join(f"{count:>7}" for count in COUNTS))
    for kind in ("plain", "oneDNN", "packed"):
        print(f"{kind:<7}" + "".join(f"{best[kind, count]:7.1f}" for count in COUNTS))


if __name__ == "__main__":
    main(*sys.argv[1:])
