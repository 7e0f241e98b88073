"""Count greedy answers that differ from those of plain `generate()` with the matrix multiplications of the assistant.

    OMP_NUM_THREADS=1 python examples/equal_texts.py --target ID_OR_FOLDER --assistant REPO --data FILE --count 300

Contestants: chains of four candidates with lookups, token trees of eight, the same chains with attention from all
tokens of a pass at once, which in half precision rounds differently from attention over one token, and plain
`generate()` with PyTorch's own multiplications and attention. With --output each prompt's result is stored, and a later
run goes on after the last one.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.generation import single_target
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.texts.encoding import padded, rendered, tokens_of
from hf_specdecpp.texts.prompts import read_prompts

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 4, "lookup": True}
TREE: dict[str, Any] = {"tree": "dyspec", "tree_budget": 8}
TOGETHER = "chains, attention at once"
CONTESTANTS = {"chains and lookups": CHAIN, "trees": TREE, TOGETHER: CHAIN}
PLAIN, OWN = "plain", "plain, PyTorch's own"


@contextmanager
def together() -> Iterator[None]:
    """Replaces `separate_queries`: attention reads all tokens of a pass at once."""
    yield


def attached_to(target: Any, assistant: str) -> dict[str, SpecDecPPAssistant]:
    """The assistant of each contestant, with the copies of weights that all of them share."""
    made = {name: assist(target, assistant, default=False, **settings) for name, settings in CONTESTANTS.items()}
    next(iter(made.values())).setup().products(target)
    background.wait()
    return made


def compare(
    target: Any, attached: dict[str, SpecDecPPAssistant], inputs: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """For each contestant, whether its answer is that of plain `generate()`; its tokens a pass and its seconds."""
    separate = single_target.separate_queries
    found: dict[str, Any] = {}

    def answer(**given: Any) -> tuple[list[int], float]:
        begin = time.process_time()
        ids = target.generate(**inputs, max_new_tokens=tokens, do_sample=False, **given)
        return ids[0].tolist(), time.process_time() - begin

    with next(iter(attached.values())).setup().products(target):
        plain, seconds = answer()
    found[PLAIN] = [True, 1.0, seconds]
    for name, assistant in attached.items():
        single_target.separate_queries = together if name == TOGETHER else separate
        try:
            ids, seconds = answer(assistant_model=assistant)
        finally:
            single_target.separate_queries = separate
        found[name] = [ids == plain, assistant.stats.tokens_per_pass, seconds]
    own, seconds = answer()
    found[OWN] = [own == plain, 1.0, seconds]
    return found


def parser_of(description: str | None, count: int, tokens: int) -> argparse.ArgumentParser:
    """Options that say which texts are generated, `count` answers of at most `tokens` tokens by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--assistant", required=True)
    parser.add_argument("--data", action="append", required=True, help="JSON lines of prompts; several take turns")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--max_new_tokens", type=int, default=tokens)
    parser.add_argument("--dtype", default="bfloat16")
    return parser


def given_by(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """The target, and the arguments `input_ids` and `attention_mask` of its `generate()` for each prompt."""
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    turns = chain.from_iterable(zip_longest(*map(read_prompts, options.data)))
    prompts = islice((each for each in turns if each is not None), options.count)
    return target, [padded([tokens_of(tokenizer, rendered(tokenizer, each.messages))]) for each in prompts]


def main(words: list[str] | None = None) -> None:
    parser = parser_of(__doc__, count=300, tokens=48)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    target, prompts = given_by(options)
    known = (
        options.output.read_text(encoding="utf-8").splitlines() if options.output and options.output.exists() else []
    )
    results = [json.loads(line) for line in known]
    attached = attached_to(target, options.assistant)
    for inputs in prompts[len(results) :]:
        results.append(compare(target, attached, inputs, options.max_new_tokens))
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")
    table = Table("contestant", "answers", "different", "tokens a pass", "s of the processor")
    for name in (PLAIN, *CONTESTANTS, OWN):
        equal, passes, seconds = zip(*(each[name] for each in results), strict=True)
        table.add_row(
            name, str(len(equal)), str(equal.count(False)), f"{sum(passes) / len(passes):.2f}", f"{sum(seconds):.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
