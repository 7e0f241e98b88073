"""Compare a batch in plain `generate()`, this package and economize (PyPI), with the same draft and draft length.

    pip install economize==0.3.2
    OMP_NUM_THREADS=1 python examples/beside_economize.py TARGET DRAFT --data prompts.jsonl

Greedy, float32, rows of different lengths. The contestants take turns, and the times are medians. With one thread they
are processor times, which other processes do not count into. This package runs once with copies of the weights for
faster matrix multiplications, and once with PyTorch's own multiplications, as economize does.
"""

import argparse
import importlib
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts.encoding import Codec, padded
from hf_specdecpp.texts.prompts import read_prompts

Run = tuple[Tensor, float]  # new tokens of all rows `[rows, new_tokens]`, and tokens a row emits in a pass


def plain(target: CausalLM, batch: dict[str, Tensor], new_tokens: int, **options: Any) -> Tensor:
    """New tokens of all rows; texts go on after their ends, so that all have as many."""
    output = target.generate(**batch, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, **options)
    found: Tensor = output[:, batch["input_ids"].shape[1] :]
    return found


def ours(target: CausalLM, draft: CausalLM, settings: dict[str, Any]) -> Callable[..., Run]:
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**settings))
    if assistant.speculation.cpu_products != "off":
        assistant.warm_up(16, target)  # waits for all copies of the weights, as a server does when it starts

    def run(batch: dict[str, Tensor], new_tokens: int) -> Run:
        texts = plain(target, batch, new_tokens, assistant_model=assistant)
        return texts, assistant.stats.tokens_per_pass

    return run


def economize(target: CausalLM, draft: str, num_tokens: int) -> Callable[..., Run]:
    package, technique = (importlib.import_module(f"economize{name}") for name in ("", ".techniques.draft_model"))
    decoding = package.DecodeConfig(cycle_length=num_tokens + 1)
    model = package.apply(target, technique.DraftModelConfig(model=draft), decoding=decoding)

    def run(batch: dict[str, Tensor], new_tokens: int) -> Run:
        masks = batch["attention_mask"].bool()
        prompts = [row[mask] for row, mask in zip(batch["input_ids"], masks, strict=True)]
        results = model.decode_batch(prompts, new_tokens)
        passes = sum(1 + len(each.acceptance) for each in results)
        return torch.stack([each.tokens for each in results]), new_tokens * len(results) / passes

    return run


def contestants(target: CausalLM, draft: CausalLM, draft_name: str, num_tokens: int) -> dict[str, Callable[..., Run]]:
    fixed = {"rule": "fixed", "num_tokens": num_tokens}
    return {
        "plain generate()": lambda batch, new_tokens: (plain(target, batch, new_tokens), 1.0),
        "economize": economize(target, draft_name, num_tokens),
        f"ours, fixed {num_tokens}, PyTorch's products": ours(target, draft, {**fixed, "cpu_products": "off"}),
        f"ours, fixed {num_tokens}": ours(target, draft, fixed),
        "ours, throughput, PyTorch's products": ours(target, draft, {"rule": "throughput", "cpu_products": "off"}),
        "ours, throughput": ours(target, draft, {"rule": "throughput"}),
    }


def table(everyone: dict[str, Callable[..., Run]], batches: list[dict[str, Tensor]], new_tokens: int) -> Table:
    clock = computing_clock()
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    yields: dict[str, list[float]] = {name: [] for name in everyone}
    equal = dict.fromkeys(everyone, 0)
    for name in everyone:
        everyone[name](batches[0], 4)  # warm up
    for number, batch in enumerate(batches):
        texts = {}
        for name in [*everyone][number % len(everyone) :] + [*everyone][: number % len(everyone)]:
            begin = clock()
            texts[name], tokens = everyone[name](batch, new_tokens)
            seconds[name].append(clock() - begin)
            yields[name].append(tokens)
        for name, text in texts.items():
            equal[name] += int((text == texts["plain generate()"]).all(1).sum())
    result = Table("", "seconds a batch", "x plain (per batch)", "tokens per row and pass", "texts equal to plain's")
    rows = sum(len(batch["input_ids"]) for batch in batches)
    for name, times in seconds.items():
        ratios = [base / each for base, each in zip(seconds["plain generate()"], times, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        result.add_row(name, f"{median(times):.1f}", spread, f"{median(yields[name]):.2f}", f"{equal[name]} of {rows}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--data", required=True, help="prompts, as for specdecpp bench")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_tokens", type=int, default=4, help="candidates a round")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    args = parser.parse_args()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() for name in (args.target, args.draft)
    )
    items = Codec.from_pretrained(args.target).encode_all(read_prompts(args.data))[: args.batches * args.batch_size]
    rows = [item.input_ids for item in items]
    batches = [padded(rows[start : start + args.batch_size]) for start in range(0, len(rows), args.batch_size)]
    everyone = contestants(target, draft, args.draft, args.num_tokens)
    Console().print(table(everyone, batches, args.max_new_tokens))


if __name__ == "__main__":
    main()
