"""Measure the gain of corrections: mixing q with the target's latest choices after the same tokens.

    OMP_NUM_THREADS=1 python examples/draft_successors.py HuggingFaceTB/SmolLM2-135M-Instruct \
        hub_cards/specdecpp-smollm2-135m-instruct alpaca_train.jsonl --ask "Responde en español. {}"

Prints the time that `Decisions(draft_successors=True)` adds to a draft step and to a round. For answers to the last
prompts of a file, greedy and at temperature 1, prints tokens per target pass and tokens per second with and without
corrections. Both contestants answer each prompt in turn, and the first prompt is a warm-up. The stored choices are kept
from answer to answer. With a single thread, times are processor times of this thread.
"""

import argparse
from dataclasses import replace
from functools import partial
from itertools import islice
from timeit import repeat

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.figures import median_of_ratios
from hf_specdecpp.sampling.ngram_corrections import Mixing, NgramCorrections, contexts_of
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.texts.prompts import read_prompts

MODES = {"greedy": {"do_sample": False}, "T = 1": {"do_sample": True, "temperature": 1.0, "top_k": 0}}
CANDIDATES = 4  # of the timed round


def price(target, assistant) -> None:
    """Microseconds of mixing and of learning, beside those of a draft step and of a round without it."""
    vocab = target.config.get_text_config().vocab_size
    table, clock = NgramCorrections(vocab), computing_clock()
    logits = torch.randn(CANDIDATES + 1, vocab, generator=torch.Generator().manual_seed(0))
    text = torch.arange(8)[None]
    contexts = contexts_of(text, [list(range(place)) for place in range(CANDIDATES + 1)])
    table.record(contexts, logits)
    actions = {
        1: partial(Processing([Mixing(table, greedy=True)]).one, text, [], logits[0]),
        2: partial(table.record, contexts, logits),
    }
    seconds = {name: min(repeat(action, timer=clock, number=1, repeat=200)) for name, action in actions.items()}
    stats = rounds_without(target, assistant)
    step = stats.draft_seconds / stats.draft_passes
    whole = (stats.draft_seconds + stats.target_seconds + stats.overhead_seconds) / stats.rounds
    more = CANDIDATES * seconds[1] + seconds[2]
    print("| | without, microseconds | with it, more |")
    print("|---|---|---|")
    print(f"| a draft step | {1e6 * step:.0f} | {1e6 * seconds[1]:.0f} |")
    row = f"| a round of {CANDIDATES} candidates | {1e6 * whole:.0f} | {1e6 * more:.0f} ({more / whole:.1%}) |"
    print(f"{row}\n", flush=True)


def rounds_without(target, assistant):
    """Statistics of rounds of as many candidates, without the table."""
    settings, decisions = assistant.speculation, assistant.decisions
    assistant.speculation = replace(settings, rule="fixed", num_tokens=CANDIDATES)
    assistant.decisions = Decisions(draft_successors=False)
    prompt = torch.arange(8, device=target.device)[None]
    target.generate(prompt, assistant_model=assistant, max_new_tokens=64, do_sample=False)
    assistant.speculation, assistant.decisions = settings, decisions
    return assistant.stats


def answer(target, tokenizer, assistant, prompt: str, seed: int, tokens: int, mode: str) -> tuple[float, float, float]:
    """Tokens, passes of the target, and seconds."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(seed)
    clock = computing_clock()
    begin = clock()
    target.generate(**inputs, assistant_model=assistant, max_new_tokens=tokens, **MODES[mode])
    return assistant.stats.generated, assistant.stats.target_passes, clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("assistant")
    parser.add_argument("prompts")
    parser.add_argument("--ask", default="{}")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--fixed", type=int, help="candidates in every round, in the place of the assistant's own rule")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    args = parser.parse_args()
    target, tokenizer = AutoModelForCausalLM.from_pretrained(args.target), AutoTokenizer.from_pretrained(args.target)
    arms = [SpecDecPPAssistant.from_pretrained(args.assistant, target=target) for _ in range(2)]
    for mixes, arm in enumerate(arms):
        arm.decisions = Decisions(draft_successors=bool(mixes))
    if args.fixed:
        for arm in arms:
            arm.speculation.rule, arm.speculation.num_tokens = "fixed", args.fixed
    price(target, arms[0])
    prompts = iter(read_prompts(args.prompts)[::-1])
    print("| | tokens a pass, without | with it | tokens a second, without | with it | median ratio of the prompts |")
    print("|---|---|---|---|---|---|")
    for mode in args.modes:
        found: tuple[list, list] = [], []
        for place, prompt in enumerate(islice(prompts, args.count + 1)):
            for arm in (0, 1) if place % 2 else (1, 0):
                asked = args.ask.format(prompt.messages[-1]["content"])
                told = answer(target, tokenizer, arms[arm], asked, place, args.tokens, mode)
                if place:
                    found[arm].append(told)
        sums = [[sum(column) for column in zip(*each, strict=True)] for each in found]
        passes, tokens_a_second = ([each[0] / each[by] for each in sums] for by in (1, 2))
        speeds = [[tokens / seconds for tokens, _, seconds in each] for each in found]
        ratio, low, high = median_of_ratios([mixed / own for own, mixed in zip(*speeds, strict=True)])
        print(
            f"| {mode} | {passes[0]:.2f} | {passes[1]:.2f} | {tokens_a_second[0]:.1f} | {tokens_a_second[1]:.1f} "
            f"| {ratio:.2f} ({low:.2f} to {high:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
