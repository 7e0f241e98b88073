"""Time a model of many tiny layers, where launching operations takes most of the time, as in eager mode on a GPU.

    OMP_NUM_THREADS=1 python examples/launch_bound.py --dtype float64

The target is a random Llama of 28 layers of width 64 (`--hidden_size`). The draft is its first three layers. The
outputs of the other layers are scaled down: to zero, so that every candidate is accepted, or so that some candidates
are. The contestants take turns, and the times are medians, with one thread in processor time. economize (PyPI) takes
part if installed, with the same draft and draft length. The last rows are forward passes of the target without
verification, and draft steps, compiled and uncompiled.
"""

import argparse
import copy
import importlib
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models.causal_lm import CACHE
from hf_specdecpp.models.early_exit import early_exit

LAYERS, NEW_TOKENS, WARM_UP, FORWARDS = 28, 96, 2, 10
LENGTH = 4  # candidates of a chain
SHARES = {"all accepted": 0.0, "some accepted": 0.15}  # of what layers 3 to 27 add
SPECULATION: dict[str, dict[str, Any]] = {
    "ours, fixed 4": {"rule": "fixed", "num_tokens": LENGTH},
    "ours, throughput": {"rule": "throughput"},
    "ours, not speculating": {"rule": "throughput", "costs": {"draft": 1.0, "verify": [1.0, 2.0, 3.0]}},
    "ours, dyspec tree of 8": {"tree": "dyspec", "tree_budget": 8},
}


def deep_llama(share: float, dtype: torch.dtype, hidden_size: int = 64, first: int = 3) -> LlamaForCausalLM:
    """A random target whose `first` layers agree with it the more, the smaller `share` is."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden_size, intermediate_size=11 * hidden_size // 4, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=1.6 / hidden_size**0.5, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers[first:]:
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    return model


def contestants(target: LlamaForCausalLM) -> dict[str, Any]:
    """What is given as `assistant_model`, by name."""
    stock = early_exit(target, 3)
    stock.generation_config.num_assistant_tokens = LENGTH
    stock.generation_config.num_assistant_tokens_schedule = "constant"
    stock.generation_config.assistant_confidence_threshold = 0.0
    found = {"plain generate()": None, "transformers' assisted": stock}
    if importlib.util.find_spec("economize"):
        found["economize, 4 candidates"] = Economize(target)
    for name, settings in SPECULATION.items():
        found[name] = SpecDecPPAssistant.from_early_exit(target, 3, speculation=SpeculationConfig(**settings))
    return found


class Economize:
    """Its `draft_model` technique on a copy of the target."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        economize, technique = (importlib.import_module(f"economize{name}") for name in ("", ".techniques.draft_model"))
        with tempfile.TemporaryDirectory() as folder:
            early_exit(target, 3).save_pretrained(folder)
            decoding = economize.DecodeConfig(cycle_length=LENGTH + 1)
            self.model = economize.apply(
                copy.deepcopy(target), technique.DraftModelConfig(model=folder), decoding=decoding
            )

    def __call__(self) -> torch.Tensor:
        prompt = torch.arange(1, 11)
        return torch.cat((prompt, self.model.decode(prompt, NEW_TOKENS).tokens))[None]


def answer(target: LlamaForCausalLM, assistant: Any) -> torch.Tensor:
    if isinstance(assistant, Economize):
        return assistant()
    if isinstance(assistant, SpecDecPPAssistant):
        assistant.attach(target)
    text: torch.Tensor = target.generate(
        torch.arange(1, 11)[None], assistant_model=assistant, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return text


def bare_forwards(target: LlamaForCausalLM) -> dict[str, Callable[[], object]]:
    """After a text of 60 tokens, by the number of tokens; the cache is cropped afterwards."""
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(torch.arange(60)[None], **{CACHE: cache})
    cache.activate_past_recording()

    @torch.no_grad()
    def forward(count: int) -> None:
        for _ in range(FORWARDS):
            target(torch.ones(1, count, dtype=torch.long), **{CACHE: cache})
            cache.crop(-count)

    return {f"{count} token{'s' * (count > 1)}": partial(forward, count) for count in (1, 2, LENGTH + 1)}


def milliseconds(
    actions: dict[str, Callable[[], object]], repetitions: int, *devices: torch.device
) -> dict[str, float]:
    """Median time of each action, on the CPU or on these devices; they take turns."""
    clock, times = computing_clock(*devices), {name: [] for name in actions}
    for repetition in range(WARM_UP + repetitions):
        for name, action in actions.items():
            begin = clock()
            action()
            if repetition >= WARM_UP:
                times[name].append(1000 * (clock() - begin))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--contestants", nargs="+", help="beside plain generate(); all by default")
    options = parser.parse_args()
    for kind, share in SHARES.items():
        target = deep_llama(share, getattr(torch, options.dtype), options.hidden_size)
        chosen = options.contestants and ["plain generate()", *options.contestants]
        made = {name: each for name, each in contestants(target).items() if not chosen or name in chosen}
        plain = answer(target, None)
        texts = Table(
            "",
            "ms a token",
            "times plain",
            "tokens a pass",
            "same text",
            title=f"{kind}, {options.dtype}, {options.hidden_size}",
        )
        times = milliseconds({name: partial(answer, target, each) for name, each in made.items()}, options.repetitions)
        for name, assistant in made.items():
            stats = assistant.stats if isinstance(assistant, SpecDecPPAssistant) else None
            texts.add_row(
                name,
                f"{times[name] / NEW_TOKENS:.2f}",
                f"{times['plain generate()'] / times[name]:.2f}",
                f"{stats.tokens_per_pass:.2f}" if stats else "",
                "yes" if torch.equal(answer(target, assistant), plain) else "no",
            )
        Console().print(texts)
    forwards = milliseconds(bare_forwards(target), options.repetitions)
    of_one = Table("a forward over", "ms", "times that over 1 token", title=f"the target alone, {options.dtype}")
    for name, spent in forwards.items():
        of_one.add_row(name, f"{spent / FORWARDS:.2f}", f"{spent / forwards['1 token']:.2f}")
    Console().print(of_one)


if __name__ == "__main__":
    main()
