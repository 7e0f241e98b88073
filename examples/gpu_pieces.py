"""What a captured pass over one token gains from each piece, one after the other. A step of `gpu_day.py`.

    python examples/gpu_pieces.py --shapes 8b smollm2

Milliseconds of a pass of a target of `bench_gpu.py`: with the kernels of transformers as they are; with norms in one
kernel each, as captured passes have them; with compiled MLPs and rotary embeddings (`compile=True`); and, with norms in
one kernel, with SiLU and product in one kernel that NVRTC makes, without a compiler. Last, the LM head alone, in the
target's dtype; with 32,768 rows, as for a draft vocabulary (`draft_vocabulary.py` counts the candidates that it loses);
and in float8, which would serve drafts.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from bench_gpu import SHAPES, built, machine
from gpu_attention import microseconds
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.cuda_graphs import model_copy
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget

GATED = "template <typename T> T gated(T gate, T up) { float g = gate; return T(g / (1.0f + expf(-g)) * float(up)); }"
PROMPT = 200  # tokens
PASSES = 20
DRAFTED = 32_768  # tokens of a draft vocabulary


@contextmanager
def without_fast_norms() -> Iterator[None]:
    usual = model_copy._use_fast_norm
    model_copy._use_fast_norm = lambda _: None
    try:
        yield
    finally:
        model_copy._use_fast_norm = usual


def use_gated(model: Any) -> None:
    """Let the MLPs of a model run SiLU and product as one kernel."""
    gated = torch.cuda.jiterator._create_jit_fn(GATED)
    for module in model.modules():
        if type(module).__name__.endswith(model_copy.PIECE):
            module.forward = MethodType(
                lambda mlp, hidden: mlp.down_proj(gated(mlp.gate_proj(hidden), mlp.up_proj(hidden))), module
            )


def milliseconds(target: Any, device: str, fuse: bool = False, change: Callable[[Any], None] | None = None) -> float:
    """Of a captured pass over one token."""
    passes = CapturedTarget(target, fuse)
    if change is not None:
        change(passes.model)
    ids = torch.arange(PROMPT, device=device)[None] % target.config.vocab_size
    cache = DynamicCache(config=target.config)
    target(ids, past_key_values=cache)
    passes.begin_texts(cache, PROMPT, None, torch.tensor([[PROMPT]]))
    token = ids[:, -1:]
    passes.read(token)
    (graph, _function), *_ = passes.graphs._graphs.values()
    found = timed(graph.replay, device)
    passes.close()
    return found


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds of a call, the median of some."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        taken = []
        for _ in range(PASSES):
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        return sorted(taken)[len(taken) // 2]
    return microseconds(run, device) / 1000


def heads(target: Any, device: str) -> str:
    """Milliseconds of the LM head for one token, in the target's dtype, with fewer rows, and in float8."""
    weight = target.get_output_embeddings().weight
    # Products in float8 have at least 16 rows.
    hidden = torch.randn(16, weight.shape[1], dtype=weight.dtype, device=device)
    usual = microseconds(lambda: hidden[:1] @ weight.T, device) / 1000
    small = microseconds(lambda: hidden[:1] @ weight[:DRAFTED].T, device) / 1000
    one = torch.ones((), device=device)
    rows, columns = hidden.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).T

    def product() -> Tensor:
        return torch._scaled_mm(rows, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return f"{usual:.2f}, {DRAFTED} rows {small:.2f}, in float8 {microseconds(product, device) / 1000:.2f}"


def measured(target: Any, device: str) -> list[str]:
    """A row of the table; a piece that fails says why."""
    with without_fast_norms():
        found = [f"{milliseconds(target, device):.2f}"]
    ways: list[Callable[[], Any]] = [
        partial(milliseconds, target, device),
        partial(milliseconds, target, device, fuse=True),
        partial(milliseconds, target, device, change=use_gated),
        partial(heads, target, device),
    ]
    for way in ways:
        try:
            found.append(each if isinstance(each := way(), str) else f"{each:.2f}")
        except Exception as error:  # noqa: BLE001 - the others go on
            found.append(f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0][:80]}")
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "smollm2"])
    options = parser.parse_args()
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    print(f"# Pieces of a captured pass\n\n{machine(device)} Milliseconds of a pass over one token.\n", flush=True)
    print("| | as in transformers | norms | compiled pieces | norms, SiLU | LM head |\n|---|---|---|---|---|---|")
    for shape in options.shapes:
        found = measured(built(SHAPES[shape], device, dtype), device)
        print(f"| {shape} | {' | '.join(found)} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
