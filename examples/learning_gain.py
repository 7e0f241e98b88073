"""What a draft gains by learning from the text it drafts for, on kinds of text that its training lacked, as a table.

    python examples/learning_gain.py HuggingFaceTB/SmolLM2-135M-Instruct hub_cards/specdecpp-smollm2-135m-instruct \
        --prompts alpaca_train.jsonl --code code_train.jsonl --published gsm8k_test.jsonl --published alpaca_test.jsonl

Each kind asks for something else about the same prompts, those at the end of the files. Answers are written in order,
greedily and at temperature 1 in turn, with a fixed number of candidates, so that nothing depends on the machine. The
draft learns from those to the first prompts and is measured on those to the last. Acceptance is that of the first and
the second candidate of a round at temperature 1, by what was kept of the target; tokens a pass are of generating the
test answers again. Steps are counted, and what they took is shown: seconds depend on the machine.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.learning.kept import KeptTexts
from hf_specdecpp.texts.prompts import read_prompts

KINDS = {  # what is asked, turn by turn
    "Spanish": ["Responde en español. {}"],
    "tables": ["Make a Markdown table with three columns and six rows about this: {}"],
    "chat": ["{}", "Explain that again in a letter to a child of six."],
    "JavaScript": ["{} Write it in JavaScript, with comments."],
}
OF_CODE = ("JavaScript",)
CHAIN = SpeculationConfig("fixed", num_tokens=4, keep_texts=1_000_000)
MODES = {"greedy": {"do_sample": False}, "T = 1": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


def answer(target, tokenizer, assistant, turns: list[str], prompt: str, mode: str, tokens: int) -> tuple[int, int]:
    """Answer each turn; tokens and passes of the target."""
    messages, counts = [], [0, 0]
    for turn in turns:
        messages.append({"role": "user", "content": turn.format(prompt)})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = target.generate(**inputs, assistant_model=assistant, max_new_tokens=tokens, **MODES[mode])
        reply = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
        counts[0] += assistant.stats.generated
        counts[1] += assistant.stats.rounds
    return counts[0], counts[1]


def write(target, tokenizer, assistant, turns, prompts, tokens, modes) -> tuple[KeptTexts, dict[str, float]]:
    """The kept texts of answers to prompts, and tokens a pass by mode."""
    kept = assistant.memory.texts = KeptTexts()
    counts = {mode: [0, 0] for mode in MODES}
    for place, prompt in enumerate(prompts):
        for mode in modes(place):
            torch.manual_seed(place)
            found = answer(target, tokenizer, assistant, turns, prompt, mode, tokens)
            counts[mode] = [a + b for a, b in zip(counts[mode], found, strict=True)]
    return kept, {mode: made / max(passes, 1) for mode, (made, passes) in counts.items()}


def in_turn(place: int) -> list[str]:
    return [list(MODES)[place % 2]]


def both(_place: int) -> list[str]:
    return list(MODES)


def row(name: str, steps: int, seconds: float, accepted, published, passes) -> str:
    cells = [name, f"{steps}", f"{seconds:.0f}", *(f"{value:.3f}" for value in (*accepted[:2], published[0]))]
    return "| " + " | ".join([*cells, *(f"{passes[mode]:.2f}" if passes else "" for mode in MODES)]) + " |"


def measure(target, tokenizer, assistant, name: str, prompts: list[str], args, published: KeptTexts) -> None:
    """The rows of one kind of text."""
    turns, before = KINDS[name], args.steps
    test, passes = write(target, tokenizer, assistant, turns, prompts[-args.test :], args.tokens, both)
    begin = time.perf_counter()
    learn, _ = write(target, tokenizer, assistant, turns, prompts[: args.learn], args.tokens, in_turn)
    print(f"<!-- {name}: {len(learn)} tokens kept, {learn.nbytes / len(learn):.0f} bytes each, "
          f"{time.perf_counter() - begin:.0f} s; test: {len(test)} tokens -->", flush=True)  # fmt: skip
    learner, _ = assistant._learning()
    shown = learner.acceptance(test.texts), learner.acceptance(published.texts)
    print(row(name, 0, 0.0, *shown, passes), flush=True)
    assistant.memory.texts, done, seconds = learn, 0, 0.0
    for steps in before:
        lesson = assistant.learn(steps=steps - done)
        done, seconds = steps, seconds + lesson.seconds
        print(f"<!-- {lesson} -->", flush=True)
        after = {}
        if steps == before[-1]:
            _, after = write(target, tokenizer, assistant, turns, prompts[-args.test :], args.tokens, both)
            assistant.memory.texts = learn
        shown = learner.acceptance(test.texts), learner.acceptance(published.texts)
        print(row("", done, seconds, *shown, after), flush=True)
    assistant.unlearn()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("assistant")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--code", required=True)
    parser.add_argument("--published", action="append", required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--learn", type=int, default=150)
    parser.add_argument("--test", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300, 600])
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    assistant = SpecDecPPAssistant.from_pretrained(args.assistant, target=target, speculation=CHAIN)

    def prompts_of(source: str) -> list[str]:
        return [prompt.messages[-1]["content"] for prompt in read_prompts(source)][-args.learn - args.test :]

    asked = [text for source in args.published for text in prompts_of(source)[-10:]]
    published, _ = write(target, tokenizer, assistant, ["{}"], asked, args.tokens, in_turn)
    print(f"| kind | steps | seconds | accepted, first | second | published sets, first | {' | '.join(MODES)} |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.kinds:
        prompts = prompts_of(args.code if name in OF_CODE else args.prompts)
        measure(target, tokenizer, assistant, name, prompts, args, published)


if __name__ == "__main__":
    main()
