"""Measure the time of a round outside of forward passes, for this package and for transformers' assisted generation.

    OMP_NUM_THREADS=1 python examples/round_overhead.py

A tiny Llama drafts for another one, so forward passes are cheap. The forward passes of both decoders and LM heads are
timed and subtracted. Every row alternates between the contestants, and prints medians of the repetitions.
"""

import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models import foreign

NEW_TOKENS, REPETITIONS = 128, 7
LENGTHS = (1, 2, 4, 8)


class ForwardClock:
    """Seconds spent in a model's decoder and LM head."""

    def __init__(self, *models: PreTrainedModel) -> None:
        self.seconds = 0.0
        self.passes = 0
        for model in models:
            for module in (model.get_decoder(), model.get_output_embeddings()):
                self._watch(module)

    def _watch(self, module: Any) -> None:
        forward = module.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            output = forward(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return output

        module.forward = timed


def tiny_llama(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def overhead(target: PreTrainedModel, assistant: Any, clock: ForwardClock, rounds: list[int], sample: bool) -> float:
    """Milliseconds a round outside forwards. `rounds` collects the number of rounds."""
    prompt = torch.arange(10)[None]
    torch.manual_seed(0)
    passes = target.get_decoder().register_forward_hook(lambda *_: rounds.append(1))
    clock.seconds, begin = 0.0, time.perf_counter()
    target.generate(prompt, assistant_model=assistant, max_new_tokens=NEW_TOKENS, do_sample=sample)
    seconds = time.perf_counter() - begin - clock.seconds
    passes.remove()
    return 1000 * seconds / len(rounds)


def main() -> None:
    # The hooks and forwards below time and count, and change no results.
    with mock.patch.object(foreign, "is_foreign", return_value=False):
        sys.stdout.write("\n".join(table()) + "\n")


def table() -> list[str]:
    """The lines of the table: one row for greedy and sampled rounds of each length."""
    target, draft = tiny_llama(0), tiny_llama(1)
    clock = ForwardClock(target, draft)
    lines = [f"{'':18}{'ours':>8}{'stock':>8}{'budget':>8}   ms a round outside forwards"]
    for sample in (False, True):
        for length in LENGTHS:
            draft.generation_config.num_assistant_tokens = length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            fixed = SpeculationConfig(rule="fixed", num_tokens=length)
            ours = SpecDecPPAssistant.from_draft(draft, target, speculation=fixed)
            times: dict[str, list[float]] = {"ours": [], "stock": []}
            for _ in range(REPETITIONS):
                times["ours"].append(overhead(target, ours, clock, [], sample))
                times["stock"].append(overhead(target, draft, clock, [], sample))
            medians = {name: statistics.median(values) for name, values in times.items()}
            name = f"{'sampled' if sample else 'greedy'}, {length} token{'s' if length > 1 else ''}"
            lines.append(f"{name:18}{medians['ours']:>8.2f}{medians['stock']:>8.2f}{1 + 0.15 * length:>8.2f}")
    return lines


if __name__ == "__main__":
    main()
