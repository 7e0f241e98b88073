"""At which temperature of its own is a draft accepted most often? Replayed on the target's answers.

    python examples/draft_temperatures.py HuggingFaceTB/SmolLM2-135M-Instruct \
        hub_cards/specdecpp-smollm2-135m-instruct alpaca_train.jsonl "Responde en español. {}"

The target answers the last 16 prompts, greedily and at temperature 1. Printed is the mean chance over their places
that the first candidate of a round is accepted at temperature 1, which is sum min(p, q), with q at another temperature
(`SpeculationConfig.draft_temperature`).
"""

import sys

import torch
from learning_gain import MODES, Writer, of_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.benchmark.report import markdown_table
from hf_specdecpp.texts.prompts import read_prompts

PROMPTS, TOKENS = 16, 96
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


def main(name: str, repository: str, prompts: str, asked: str) -> None:
    target, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    drafter = SpecDecPPAssistant.from_pretrained(repository, target=target).ready_drafter()
    chosen = [prompt.messages[-1]["content"] for prompt in read_prompts(prompts)[-PROMPTS:]]
    writer, accepted = Writer(target, tokenizer, drafter.reads), []
    for mode in MODES:
        torch.manual_seed(0)
        for text in writer.texts([asked], chosen, mode, TOKENS):
            _, q_logits, p_logits = of_text(drafter, text)
            q = [(q_logits / temperature).softmax(-1) for temperature in TEMPERATURES]
            accepted.append(torch.stack([torch.minimum(p_logits.softmax(-1), each).sum(-1) for each in q]))
    shares = torch.cat(accepted, -1).mean(-1).tolist()
    header = [f"q at {temperature:g}" for temperature in TEMPERATURES]
    print(markdown_table(header, [[f"{share:.3f}" for share in shares]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
