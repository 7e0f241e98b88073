"""`specdecpp demo`: the same answers with and without the assistant, streamed, compared token by token and timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import as_told
from hf_specdecpp.cli_options import DemoConfig
from hf_specdecpp.drafts.known import describe
from hf_specdecpp.files import save_text
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model, load_tokenizer
from hf_specdecpp.terminal.conversation import encoded
from hf_specdecpp.terminal.listener import Answer, Listener, picture
from hf_specdecpp.texts.prompts import EXAMPLES, REPEATING
from hf_specdecpp.trees.drawing import DrawnTree

PICTURE = "tree.png"

# Without markup: prompts, names and tokens may hold brackets, such as "[/INST]".
console = Console(highlight=False, soft_wrap=True, markup=False)


@dataclass
class Pair:
    """A question, answered without and with the assistant, whose statistics are compared with the plain answer."""

    question: str
    plain: Answer
    assisted: Answer
    stats: SpeculationStats
    differs: bool = False


def run(config: DemoConfig) -> None:
    """Load target and assistant, answer every prompt twice, and print both; exit code 1 if greedy texts differ."""
    _check_writable(config.svg)  # before minutes of work
    with console.status(f"loading {config.target}"):
        model, tokenizer = load_model(config.target), load_tokenizer(config.target)
    _print("target   ", f"  {config.target} ({str(model.dtype)[6:]} on {model.device}, {_threads()})")
    helper = as_told(model, config, tree=config.tree)
    untrained = ", untrained, no head" if helper.config.draft_layers is not None and config.assistant is None else ""
    note = " (without --assistant or --layers)" if config.is_by_default else untrained
    _print("assistant", f"  {config.assistant or describe(helper.config)}{note}\n")
    demo = Demo(model, tokenizer, helper, config)
    demo.warm_up()
    pairs = demo.ask_all()
    total = sum((each.stats for each in pairs[1:]), pairs[0].stats)
    _report(total, pairs, config.sample)
    if config.svg is not None:
        save_text(_picture(pairs[-1], model), config.svg)
        console.print(f"Picture of the last answer: {config.svg}")
    if total.branched_tree is not None:
        _show_tree(total.branched_tree, tokenizer)
    elif config.tree:
        console.print(f"\nNo tree to show: no round of rule={helper.speculation.rule!r} was worth a candidate.")
    if differing := sum(each.differs for each in pairs):
        _print(f"{differing} answers differ: please report this.", style="bold red")
        raise typer.Exit(1)
    _show_next(config, helper)


@dataclass
class Demo:
    """A model with its assistant, and what to ask."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    assistant: SpecDecPPAssistant
    config: DemoConfig

    def warm_up(self) -> None:
        """Generate a few tokens: before its first text an assistant measures what passes cost."""
        for helper in (None, self.assistant):
            inputs = self._encode("Hello")
            self.model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=helper)

    def ask_all(self) -> list[Pair]:
        """Answer every question twice, and show it."""
        looks_up = not self.config.prompt and (self.config.lookup or self.assistant.kind.rests_on == "nothing")
        if looks_up:
            _print("prompts  ", "  answers that repeat their prompt, which suits lookups; --prompt asks others\n")
        questions = self.config.prompt or list(REPEATING if looks_up else EXAMPLES)
        pairs = []
        for number, question in enumerate(questions, 1):
            _print(f"{number}/{len(questions)}  {question}", style="bold cyan")
            inputs = self._encode(question)
            plain, assisted = (self._answer(inputs, helper) for helper in (None, self.assistant))
            stats = _against_measured(self.assistant.stats, plain)
            pairs.append(Pair(question, plain, assisted, stats))
            if not self.config.sample:
                pairs[-1].differs = _differ(plain.ids, assisted.ids, self.tokenizer)
            console.print()
        return pairs

    def _answer(self, inputs: dict[str, Tensor], assistant: SpecDecPPAssistant | None) -> Answer:
        _print("plain" if assistant is None else "assisted")
        torch.manual_seed(0)
        listener = Listener(TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True))
        output = self.model.generate(
            **inputs, max_new_tokens=self.config.max_new_tokens, do_sample=self.config.sample,
            assistant_model=assistant, streamer=listener,
        )  # fmt: skip
        seconds = time.perf_counter() - listener.begin
        said = listener.tokens(self.tokenizer, None if assistant is None else assistant.stats)
        answer = Answer(said, seconds, output[0, inputs["input_ids"].shape[1] :].tolist())
        _print(answer.rate, style="dim")
        return answer

    def _encode(self, prompt: str) -> dict[str, Tensor]:
        ids = torch.tensor([encoded(self.tokenizer, [{"role": "user", "content": prompt}])], device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _check_writable(file: Path | None) -> None:
    if file is None:
        return
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(file.parent)!r} for the picture {file.name!r}. Make it first."
        )
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(f"The picture {str(file)!r} cannot be written. Name another file with --svg.")


def _against_measured(stats: SpeculationStats, plain: Answer) -> SpeculationStats:
    """Statistics that are compared with the plain answer that was timed, and not with single passes."""
    tokens = len(plain.said) - 1  # the prompt's pass gives the first one
    if stats.plain_pass_seconds is None or stats.same_pass_seconds is None or tokens < 1:
        return stats
    measured = (plain.seconds - stats.prompt_seconds) / tokens
    same = measured * stats.same_pass_seconds / stats.plain_pass_seconds
    return replace(stats, plain_pass_seconds=measured, same_pass_seconds=same)


def _differ(plain: list[int], assisted: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Print whether the answers are the same; True if they differ."""
    if plain == assisted:
        _print(f"equal: all {len(plain)} tokens", style="green")
        return False
    pairs = enumerate(zip(plain, assisted, strict=False))
    agree = next((place for place, (one, other) in pairs if one != other), min(len(plain), len(assisted)))
    texts = [repr(tokenizer.decode(each[agree : agree + 1])) for each in (plain, assisted)]
    note = f"plain {texts[0]}, assisted {texts[1]} (in half precision a near-tie can do this)"
    _print(f"different from token {agree} on: {note}", style="red")
    return True


def _picture(pair: Pair, model: CausalLM) -> str:
    """The SVG of an answer, with what was measured where below it."""
    stats, name = pair.stats, Path(str(model.config.name_or_path)).name
    where = f"{name}, {str(model.dtype)[6:]} on {model.device.type}, {_threads()}"
    ratio = pair.plain.seconds / pair.assisted.seconds
    gain = f"{ratio:.2f} times as fast; {stats.tokens_per_pass:.2f} tokens per target pass"
    if stats.has_products and stats.plain_pass_seconds is not None and stats.same_pass_seconds is not None:
        products = stats.plain_pass_seconds / stats.same_pass_seconds
        gain += f"; the faster CPU products alone would give {products:.2f}"
    made = f"specdecpp demo --svg, {where}; written here as fast as there"
    return picture(pair.question, pair.plain, pair.assisted, notes=(gain, made))


def _report(stats: SpeculationStats, pairs: list[Pair], sample: bool) -> None:
    plain, assisted = (sum(getattr(each, name).seconds for each in pairs) for name in ("plain", "assisted"))
    _print("Statistics of all answers", f"\n{stats}\n")
    _print(
        "Measured",
        f"  plain {plain:.1f} s, assisted {assisted:.1f} s, prompts included: {plain / assisted:.2f} times the speed "
        "of plain generate().",
    )
    if sample:
        console.print("Sampled answers differ from run to run; their distribution is the target's in both.")


def _show_next(config: DemoConfig, helper: SpecDecPPAssistant) -> None:
    """What to type next: it is measured, an assistant is trained where none was given, and how this one is used."""
    draft = repr(config.assistant or helper.kind.name)
    if config.assistant is None and helper.config.draft_layers is not None:
        draft = f"SpecDecPPAssistant.from_early_exit(model, layers={config.layers})"
    flags = config.flags(helper.kind.name)
    _print("\nmeasure it", f"  specdecpp bench --target {config.target} {flags} --quick")
    if config.assistant is None:
        _print("train one ", f"  specdecpp train --target {config.target} --data FILE --output DIR")
    _print("use it    ", f"  assist(model, {draft}); model.generate(...)")


def _show_tree(drawn: DrawnTree, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a tree with its tokens as text, and save it as a picture where matplotlib is installed."""

    def decode(token: int) -> str:
        return repr(tokenizer.decode([token]))

    _print("\nThe most branched tree", f"\n{drawn.text(decode)}")
    try:
        drawn.save(PICTURE, decode)
    except ImportError:
        console.print("No picture: it needs matplotlib. Install the extra: pip install 'hf-specdecpp[train]'.")
    else:
        console.print(f"Picture: {PICTURE}")


def _print(heading: str, text: str = "", style: str = "bold") -> None:
    console.print(Text.assemble((heading, style), text))


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"
