"""Find the draft temperature with the highest acceptance, replayed on the target's answers.

    python examples/draft_temperatures.py HuggingFaceTB/SmolLM2-135M-Instruct \
        hub_cards/specdecpp-smollm2-135m-instruct alpaca_train.jsonl "Responde en español. {}"

The target answers the last 16 prompts, greedily and at temperature 1. Prints the mean probability over all positions
that the first candidate of a round is accepted at temperature 1, sum min(p, q), for several temperatures of q
(`Decisions.draft_temperature`).
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.report import markdown_table
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts.encoding import padded
from hf_specdecpp.texts.prompts import read_prompts

PROMPTS, TOKENS = 16, 96
MODES = ({"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0})
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


def answers(target, tokenizer, prompts: list[str], mode) -> list[tuple[torch.Tensor, int]]:
    """The tokens `[1, n]` of each prompt and its answer, and where that begins."""
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
        for prompt in prompts
    ]
    batch = padded(asked)
    written = target.generate(**batch, max_new_tokens=TOKENS, **mode)[:, batch["input_ids"].shape[1] :].tolist()
    end, texts = tokenizer.eos_token_id, []
    for own, answer in zip(asked, written, strict=True):
        texts.append((torch.tensor([own + answer[: [*answer, end].index(end) + 1]]), len(own)))
    return texts


@torch.no_grad()
def along(drafter, target, ids: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, vocab]` of draft and target at the places of an answer, all but the first two of a text."""
    with TargetStates(target, drafter.reads) as caught:
        p_logits = target(ids).logits[0].float()
        states = caught.take()
    if drafter.reads is None:
        hidden = drafter.hidden_states(ids)[:, 1:]
    else:  # there is no state before the first token
        hidden = drafter.hidden_states(ids[:, 1:], None, states[:, :-1])
    begin = max(begin, 2)
    return drafter.logits(hidden[0, begin - 2 : -1], p_logits.shape[-1]), p_logits[begin - 1 : -1]


def main(name: str, repository: str, prompts: str, asked: str) -> None:
    target, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    drafter = SpecDecPPAssistant.from_pretrained(repository, target=target).ready_drafter()
    chosen = [asked.format(prompt.messages[-1]["content"]) for prompt in read_prompts(prompts)[-PROMPTS:]]
    accepted = []
    for mode in MODES:
        torch.manual_seed(0)
        for ids, begin in answers(target, tokenizer, chosen, mode):
            q_logits, p_logits = along(drafter, target, ids, begin)
            q = [(q_logits / temperature).softmax(-1) for temperature in TEMPERATURES]
            accepted.append(torch.stack([torch.minimum(p_logits.softmax(-1), each).sum(-1) for each in q]))
    shares = torch.cat(accepted, -1).mean(-1).tolist()
    header = [f"q at {temperature:g}" for temperature in TEMPERATURES]
    print(markdown_table(header, [[f"{share:.3f}" for share in shares]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
