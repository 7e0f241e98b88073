"""`specdecpp demo`: answers questions with plain `generate()` and with the assistant, and compares text and speed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import for_command
from hf_specdecpp.cli_options import DemoConfig
from hf_specdecpp.files import save_text
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model, load_tokenizer
from hf_specdecpp.terminal.chat import encoded, facts, where
from hf_specdecpp.terminal.listener import Answer, Listener, coloured, picture
from hf_specdecpp.texts.parting import explain_parting
from hf_specdecpp.texts.prompts import read_prompts

QUESTIONS = Path(__file__).with_name("questions.jsonl")  # three of the answers repeat earlier text, where lookups help
TURNS, WARM_UP_TOKENS = 2, 8
COLUMNS = "tokens", "tokens per target pass", "times as fast", "by the clock"
INTRODUCTION = """
Each question is answered four times: plain generate(), assistant, plain generate(), assistant.
Green tokens are accepted candidates of the assistant; the model verifies several of them in one pass.
Speeds are compared in CPU time, which other programs hardly change."""


@dataclass(frozen=True)
class Comparison:
    """A question, the answers of plain `generate()` and of the assistant, and the latter's latest statistics."""

    kind: str
    question: str
    plain: list[Answer]
    assisted: list[Answer]
    stats: SpeculationStats


def gain(compared: list[Comparison], clock: str = "seconds") -> float:
    """Speed of the assistant divided by that of plain `generate()`. `clock`: `"seconds"` (CPU time) or `"by_clock"`."""
    plain = sum(getattr(each, clock) for one in compared for each in one.plain)
    return plain / sum(getattr(each, clock) for one in compared for each in one.assisted)


def run(config: DemoConfig, console: Console) -> None:
    """Load target and assistant, answer all questions, print the comparison. Exit code 1 if `Demo.wrong` is not 0."""
    file = config.svg
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise PermissionError(f"The picture {str(file)!r} cannot be written. Name a file in a folder that is yours.")
    with console.status(f"loading {config.target}"):
        model, tokenizer = load_model(config.target), load_tokenizer(config.target)
        assistant = for_command(model, config, tree=config.tree)
        demo = Demo(model, tokenizer, assistant, config.max_new_tokens, console)
        demo.warm_up()
    console.print(facts(model, assistant, config), INTRODUCTION, sep="\n", soft_wrap=True)
    usual = {each.id: each.messages[0]["content"] for each in read_prompts(str(QUESTIONS))}
    asked = {f"question {number}": question for number, question in enumerate(config.prompt, 1)} or usual
    compared = [demo.ask(kind, question) for kind, question in asked.items()]
    if config.tree:
        drawn = sum((each.stats for each in compared[1:]), compared[0].stats).branched_tree
        tree = "" if drawn is None else drawn.text(lambda token: repr(tokenizer.decode([token])))
        console.print(f"\nThe most branched tree\n{tree or 'No round was worth a tree.'}", soft_wrap=True)
    if file is not None:
        last, name = compared[-1], Path(str(model.config.name_or_path)).name
        plain, assisted, per_pass = last.plain[-1], last.assisted[-1], last.stats.tokens_per_pass
        notes = (
            f"{plain.seconds / assisted.seconds:.2f} times as fast, {per_pass:.2f} tokens a target pass",
            f"specdecpp demo --svg, {name}, {where(model)}; times are CPU time",
        )
        save_text(picture(last.question, plain, assisted, notes), file)
        console.print(f"Picture of the last answer: {file}", soft_wrap=True)
    if demo.wrong:
        console.print(f"{demo.wrong} answers differ: please report this.", style="bold red")
        raise typer.Exit(1)
    table = Table(Column("answer", no_wrap=True), *(Column(name, justify="right") for name in COLUMNS), box=None)
    for each in compared:
        values = each.stats.tokens_per_pass, gain([each]), gain([each], "by_clock")
        table.add_row(each.kind, str(len(each.plain[0].ids)), *(f"{value:.2f}" for value in values))
    console.print("", table, "", sep="\n")
    console.print(config.next_step(assistant.kind.name), soft_wrap=True)
    speed = f"{gain(compared):.2f} times as fast as plain generate(), in CPU time"
    console.print(speed, style="bold", soft_wrap=True)


@dataclass
class Demo:
    """Generates and prints the answers. `wrong`: number of questions with differences that rounding cannot explain."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    assistant: SpecDecPPAssistant
    max_new_tokens: int
    console: Console
    wrong: int = 0

    def warm_up(self) -> None:
        """Wait for copies of weights, and generate a few tokens: first calls import modules and measure passes."""
        ids = encoded(self.tokenizer, [{"role": "user", "content": "Hello"}])
        with suppress(ValueError):  # copies are not supported on this processor
            self.assistant.warm_up(len(ids) + WARM_UP_TOKENS)
        for helper in (None, self.assistant):
            self._answer(ids, helper, WARM_UP_TOKENS)

    def ask(self, kind: str, question: str) -> Comparison:
        """Answer a question twice with and without the assistant. Prints an answer, the speeds, and any difference."""
        self.console.print(Text.assemble((f"\n{kind}: ", "bold cyan"), question), "", sep="\n", soft_wrap=True)
        ids = encoded(self.tokenizer, [{"role": "user", "content": question}])
        plain, assisted = list[Answer](), list[Answer]()
        with self.console.status("generating"):
            for _ in range(TURNS):
                plain.append(self._answer(ids, None, self.max_new_tokens))
                assisted.append(self._answer(ids, self.assistant, self.max_new_tokens))
        self.console.print(coloured(assisted[-1]), "", sep="\n", soft_wrap=True)
        compared = [self._comparison(ids, list(plain[0].ids), list(each.ids)) for each in assisted]
        for line, style in dict.fromkeys(compared):
            self.console.print(line, style=style, soft_wrap=True)
        self.wrong += any(style == "red" for _, style in compared)
        self.console.print(f"plain {plain[-1].rate}; assisted {assisted[-1].rate}", style="dim", soft_wrap=True)
        return Comparison(kind, question, plain, assisted, self.assistant.stats)

    def _answer(self, ids: list[int], assistant: SpecDecPPAssistant | None, length: int) -> Answer:
        self.assistant.memory.clear()  # otherwise the second answer would be looked up in the first
        input_ids = torch.tensor([ids], device=self.model.device)
        begin, listener = time.perf_counter(), Listener(clock=time.process_time)
        output = self.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=length, do_sample=False,
            assistant_model=assistant, streamer=listener,
        )  # fmt: skip
        seconds, clock = time.process_time() - listener.begin, time.perf_counter() - begin
        tokens = listener.tokens(self.tokenizer, None if assistant is None else assistant.stats)
        return Answer(tokens, seconds, clock, output[0, len(ids) :].tolist())

    def _comparison(self, prompt: list[int], plain: list[int], assisted: list[int]) -> tuple[str, str]:
        """A sentence on whether two answers are equal or rounding explains the difference, and the line's colour."""
        if plain == assisted:
            return f"equal: all {len(plain)} tokens", "green"
        found = explain_parting(self.model, prompt, plain, assisted)
        texts = ["the end" if token is None else repr(self.tokenizer.decode([token])) for token in found["tokens"]]
        message = f"different from token {found['place']} on: plain {texts[0]}, assisted {texts[1]}"
        if not found["near_tie"]:
            return message, "red"
        return f"{message}, nearly tied, and {str(self.model.dtype)[6:]} rounds either way", "yellow"
