"""Measure the cost of `rule="throughput"` with a useless draft, against plain `generate()`, in one run.

    OMP_NUM_THREADS=1 python examples/useless_draft.py          # sizes such as 64x28 576x8 may follow

Target and draft are random Llamas that agree by chance only, once with PyTorch's own matrix multiplications and once
with copies of the weights, which are made before the first answer. Plain and assisted answers alternate, so that other
load slows both. Prints medians of milliseconds per token, and of the ratio of each pair, with one thread in processor
time. The first answers, during which costs are measured, do not count.
"""

import statistics
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.stats import SpeculationStats

SIZES = ("64x28", "128x12", "256x8", "576x8", "1536x4")  # hidden size x layers
NEW_TOKENS, REPETITIONS, WARM_UP = 96, 9, 3


def random_llama(hidden: int, layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 4), num_key_value_heads=max(hidden // 192, 1), initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().float().eval()  # as checkpoints are published, so float16 holds them


def answers(
    hidden: int, layers: int, copies: bool, repetitions: int = REPETITIONS
) -> list[tuple[float, float, SpeculationStats]]:
    """Seconds a token of plain `generate()` and of ours, pair by pair, with the statistics of ours."""
    target, draft = random_llama(hidden, layers, 0), random_llama(hidden, max(layers // 7, 1), 1)
    speculation = SpeculationConfig(rule="throughput", cpu_products="auto" if copies else "off")
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
    if copies:
        assistant.warm_up(NEW_TOKENS)
    prompt = torch.arange(10)[None]
    clock, found = computing_clock(), []
    for repetition in range(WARM_UP + repetitions):
        seconds = []
        for assistant_model in (None, assistant):
            begin = clock()
            target.generate(prompt, assistant_model=assistant_model, max_new_tokens=NEW_TOKENS, do_sample=False)
            seconds.append((clock() - begin) / NEW_TOKENS)
        if repetition >= WARM_UP:
            found.append((seconds[0], seconds[1], assistant.stats))
    return found


def main(*sizes: str) -> None:
    sys.stdout.write(f"{'':14}{'plain':>10}{'ours':>10}   ms a token{'ratio':>10}{'quartiles':>14}\n")
    for size in sizes or SIZES:
        hidden, layers = map(int, size.split("x"))
        for copies in (False, True):
            found = answers(hidden, layers, copies)
            plain, ours = (1000 * statistics.median(each[side] for each in found) for side in (0, 1))
            low, ratio, high = statistics.quantiles([a / b for a, b, _ in found])
            name = f"{size}{', copies' if copies else ''}"
            sys.stdout.write(f"{name:14}{plain:10.2f}{ours:10.2f}{'':13}{ratio:10.3f}   {low:.3f}-{high:.3f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
