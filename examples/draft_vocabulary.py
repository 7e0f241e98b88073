"""What a draft vocabulary chosen by counting the tokens of earlier answers gains, and what it loses.

    OMP_NUM_THREADS=1 python examples/draft_vocabulary.py --target ID_OR_FOLDER --assistant DRAFT --data FILE

A draft with a small vocabulary has a small LM head, so its steps are faster, but it cannot propose other tokens. The
target answers every other prompt; the most frequent tokens of these answers and prompts, filled up with the lowest ids
(as `distill.draft_vocab_size` does), are the vocabulary with which the draft helps to answer the remaining prompts, in
chains of four candidates. "covered": the share of these answers' tokens in the vocabulary. Seconds are seconds of the
processor; the vocabularies take turns. DRAFT is a separate model, or a number of the target's first layers.
"""

from __future__ import annotations

import time
from typing import Any

from datasets import Dataset
from equal_texts import given_by, parser_of
from rich.console import Console
from rich.table import Table

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.training.models import always_kept, choose_vocab, covered_mass, most_ids

SIZES = (4_096, 8_192, 16_384, 32_768, 65_536)
SETTINGS: dict[str, Any] = {"rule": "fixed", "num_tokens": 4, "lookup": False}


def assistant_of(target: Any, draft: str, vocab: Any = None) -> SpecDecPPAssistant:
    if draft.isdigit():
        made: Any = SpecDecPPAssistant.from_early_exit(target, int(draft), draft_vocab=vocab)
        return assist(target, made, default=False, **SETTINGS)
    return assist(target, draft, default=False, draft_vocab=vocab, **SETTINGS)


def main(words: list[str] | None = None) -> None:
    options = parser_of(__doc__, count=24, tokens=64).parse_args(words)
    target, prompts = given_by(options)
    whole = assistant_of(target, options.assistant)

    def answer(inputs: dict[str, Any], assistant: SpecDecPPAssistant) -> list[int]:
        ids = target.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, assistant_model=assistant
        )
        return ids[0].tolist()

    earlier, later = prompts[::2], prompts[1::2]
    read = [inputs["input_ids"][0].tolist() for inputs in earlier]
    counted = Dataset.from_dict(
        {
            "input_ids": [answer(inputs, whole) for inputs in earlier],
            "prompt_length": [len(ids) for ids in read],
        }
    )
    num_ids, kept = most_ids(target, whole.ready_drafter().model), always_kept(target)
    vocabs = {
        str(size): choose_vocab(counted, size, kept, num_ids, read) for size in SIZES if len(kept) < size < num_ids
    }
    assistants = {"all": whole} | {
        name: assistant_of(target, options.assistant, vocab) for name, vocab in vocabs.items()
    }
    totals = {name: SpeculationStats() for name in assistants}
    seconds = dict.fromkeys(assistants, 0.0)
    answers = []
    for inputs in later:
        for name, assistant in assistants.items():
            begin = time.process_time()
            ids = answer(inputs, assistant)
            seconds[name] += time.process_time() - begin
            totals[name] += assistant.stats
        answers.append(ids)
    lengths = [inputs["input_ids"].shape[1] for inputs in later]
    tested = Dataset.from_dict({"input_ids": answers, "prompt_length": lengths})
    num_counted = sum(map(len, counted["input_ids"]))
    console = Console()
    console.print(f"{num_counted} tokens of {len(earlier)} prompts and answers were counted; {len(later)} answers")
    table = Table("vocabulary", "covered", "accepted", "tokens a pass", "ms a draft pass", "seconds")
    for name, stats in totals.items():
        covered = covered_mass(vocabs[name], tested) if name in vocabs else 1.0
        table.add_row(
            name, f"{covered:.1%}", f"{stats.acceptance_rate:.1%}", f"{stats.tokens_per_pass:.2f}",
            f"{1000 * stats.draft_seconds / max(stats.draft_passes, 1):.1f}", f"{seconds[name]:.0f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
