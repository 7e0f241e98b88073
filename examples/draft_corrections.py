"""Would a correction of the draft's logits while it generates raise acceptance? Two of them, replayed on kept texts.

    python examples/draft_corrections.py HuggingFaceTB/SmolLM2-135M-Instruct hub_cards/specdecpp-smollm2-135m-instruct \
        alpaca_train.jsonl "Responde en español. {}"

The target answers the last 16 prompts, greedily and at temperature 1. Printed is the mean chance over their places
that the first candidate of a round is accepted at temperature 1, which is sum min(p, q): with q at another temperature,
and with q mixed with what the target said lately after the same token (a decaying mean of its likeliest successors, as
in Token Recycling, arXiv 2408.08696).
"""

import sys

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.learning.kept import KeptText, kept_of, logits_of
from hf_specdecpp.texts.encoding import padded
from hf_specdecpp.texts.prompts import read_prompts

PROMPTS, TOKENS = 16, 96
MODES = ({"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0})
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
DECAYS, WEIGHTS = (0.5, 0.8, 0.95), (0.05, 0.1, 0.2, 0.3)


def answers(target, tokenizer, prompts: list[str]) -> list[tuple[Tensor, int]]:
    """Texts, and where their answers begin."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    found = []
    for mode in MODES:
        torch.manual_seed(0)
        batch = padded(ids)
        written = target.generate(**batch, max_new_tokens=TOKENS, **mode)[:, batch["input_ids"].shape[1] :].tolist()
        for own, answer in zip(ids, written, strict=True):
            end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
            found.append((torch.tensor(own + answer[:end]), len(own)))
    return found


@torch.no_grad()
def distributions(drafter, text: KeptText) -> tuple[Tensor, Tensor, Tensor]:
    """The token before each place of the answer, the draft's logits there, and p, over the draft's tokens."""
    ids, begin = text.tokens.long(), max(text.begin, 2)
    hidden = drafter.hidden_states(ids[None, 1:], None, text.states.read()[None])[0]
    rows = slice(begin - text.begin, None)
    p = logits_of(text.likely[rows], text.probs[rows], text.num_ids).softmax(-1)
    vocab = slice(None) if drafter.draft_vocab is None else drafter.draft_vocab
    return ids[begin - 1 : -1], drafter.vocab_logits(hidden[begin - 2 : -1]), p[:, vocab]


def at(texts: list[tuple[Tensor, Tensor, Tensor]], temperature: float) -> float:
    return float(torch.cat([torch.minimum(p, (q / temperature).softmax(-1)).sum(-1) for _, q, p in texts]).mean())


def with_successors(texts: list[tuple[Tensor, Tensor, Tensor]], decay: float, weight: float) -> float:
    seen: dict[int, Tensor] = {}
    accepted = []
    for tokens, q_logits, p_rows in texts:
        for token, q, p in zip(tokens.tolist(), q_logits.softmax(-1), p_rows, strict=True):
            known = seen.get(token)
            mixed = q if known is None else torch.lerp(q, known, weight)
            accepted.append(float(torch.minimum(p, mixed).sum()))
            said = p / p.sum()
            seen[token] = said if known is None else torch.lerp(said, known, decay)
    return sum(accepted) / len(accepted)


def main(name: str, repository: str, prompts: str, asked: str) -> None:
    target, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    drafter = SpecDecPPAssistant.from_pretrained(repository, target=target).ready_drafter()
    chosen = [asked.format(prompt.messages[-1]["content"]) for prompt in read_prompts(prompts)[-PROMPTS:]]
    kept = [kept_of(target, drafter.reads, *text) for text in answers(target, tokenizer, chosen)]
    texts = [distributions(drafter, text) for text in kept if text is not None]
    print("| " + " | ".join(f"q at {each:g}" for each in TEMPERATURES) + " |")
    print("|" + "---|" * len(TEMPERATURES))
    print("| " + " | ".join(f"{at(texts, each):.3f}" for each in TEMPERATURES) + " |\n")
    print("| decay | " + " | ".join(f"weight {weight:g}" for weight in WEIGHTS) + " |")
    print("|" + "---|" * (len(WEIGHTS) + 1))
    for decay in DECAYS:
        cells = [f"{with_successors(texts, decay, weight):.3f}" for weight in WEIGHTS]
        print(f"| {decay:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
