"""`specdecpp demo`: the same answers with and without the assistant, streamed, compared token by token and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer

from hf_specdecpp.assistant import SpecDecPPAssistant, drafts_by_itself
from hf_specdecpp.cli_options import check_mtp, parse_layers
from hf_specdecpp.drafts.known import EARLY_EXIT, describe
from hf_specdecpp.files import save_text
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model, load_tokenizer
from hf_specdecpp.showing import picture
from hf_specdecpp.showing.told import Listener, Said, told
from hf_specdecpp.texts.prompts import EXAMPLES, REPEATING
from hf_specdecpp.trees.drawing import DrawnTree

PICTURE = "tree.png"

# Without markup: prompts, names and tokens may hold brackets, such as "[/INST]".
console = Console(highlight=False, soft_wrap=True, markup=False)


@dataclass
class Answer:
    """New tokens `[length]`, the seconds they took, and who said each of them and when."""

    tokens: Tensor
    seconds: float
    said: list[Said]


def run(
    target: str,
    assistant: str | None = None,
    layers: str | None = None,
    max_new_tokens: int = 64,
    prompts: list[str] | None = None,
    sample: bool = False,
    tree: bool = False,
    lookup: bool = False,
    svg: Path | None = None,
    mtp: bool = False,
) -> None:
    """Load the target and its assistant, answer every prompt twice and print what came of it.

    Args:
        target: Hub id or folder.
        assistant: Hub id or folder of an assistant; by default the target's own multi-token layers draft, or where its
            checkpoint has none candidates are looked up in the text.
        layers: an untrained early exit drafts: "4" for the first four layers of the target, or "0,1,2,29" for these.
        max_new_tokens: per answer.
        prompts: asked in turn, three of ours by default.
        sample: draw from the target's distribution (seeded) instead of taking its likeliest tokens.
        tree: draft token trees, show the last one and save it as a picture.
        lookup: candidates also come from the text itself; without an assistant, only from there.
        svg: file for a picture of the last answer, written with and without the assistant at the measured times.
        mtp: the target's own multi-token layers draft, in the place of an assistant.

    Raises:
        OSError: there is no folder for `svg`.
        ValueError: both `mtp` and `assistant` are given, or the target has no such layers.
        typer.Exit: code 1 if a greedy answer differs with the assistant.
    """
    check_mtp(mtp, assistant)
    if svg is not None and not svg.parent.is_dir():  # before minutes of work
        raise FileNotFoundError(f"There is no folder {str(svg.parent)!r} for the picture {svg.name!r}. Make it first.")
    with console.status(f"loading {target}"):
        model, tokenizer = load_model(target), load_tokenizer(target)
    _print("target   ", f"  {target} ({str(model.dtype)[6:]} on {model.device}, {_threads()})")
    helper = _load_assistant(assistant, layers, model, lookup, mtp)
    if tree and helper.speculation.tree is None:
        helper.speculation.tree = "dyspec"

    _warm_up(model, tokenizer, helper)
    totals = SpeculationStats()
    seconds = {"plain": 0.0, "assisted": 0.0}
    differing = 0
    looks_up = lookup or helper.kind.rests_on == "nothing"
    questions = prompts or list(REPEATING if looks_up else EXAMPLES)
    if looks_up and not prompts:
        _print("prompts  ", "  answers that repeat their prompt, which suits lookups; --prompt asks others\n")
    for number, prompt in enumerate(questions, 1):
        _print(f"{number}/{len(questions)}  {prompt}", style="bold cyan")
        inputs = _encode(tokenizer, prompt).to(model.device)
        plain = _answer("plain", model, tokenizer, inputs, None, max_new_tokens, sample)
        assisted = _answer("assisted", model, tokenizer, inputs, helper, max_new_tokens, sample)
        stats = _against_measured(helper.stats, plain)
        totals = totals + stats if totals.rounds else stats
        seconds["plain"] += plain.seconds
        seconds["assisted"] += assisted.seconds
        if not sample:
            differing += _compare(plain.tokens, assisted.tokens)
        console.print()
    _report(totals, seconds, sample)
    if svg is not None:
        save_text(_picture(questions[-1], plain, assisted, stats, model), svg)
        console.print(f"Picture of the last answer: {svg}")
    if helper.last_tree is not None:
        _show_tree(helper.last_tree, tokenizer)
    elif tree:
        console.print(f"\nNo tree to show: no round of rule={helper.speculation.rule!r} was worth a candidate.")
    if not differing:
        _show_next(target, assistant, layers, helper)
    else:
        _print(f"{differing} answers differ: please report this.", style="bold red")
        raise typer.Exit(1)


def _load_assistant(
    name: str | None, layers: str | None, model: CausalLM, lookup: bool, mtp: bool
) -> SpecDecPPAssistant:
    make, note = SpecDecPPAssistant, ""
    if name is not None or mtp:
        assistant = make.from_mtp(model) if name is None else make.from_pretrained(name, target=model)
        assistant.speculation.lookup |= lookup
    elif lookup:
        assistant = make.from_lookup(model)
    elif layers is not None:
        assistant, note = make.from_early_exit(model, parse_layers(layers)), ", untrained, no head"
    else:
        assistant, note = drafts_by_itself(model), " (without --assistant or --layers)"
    _print("assistant", f"  {name or describe(assistant.config)}{note}\n")
    return assistant


def _answer(
    name: str,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    inputs: BatchEncoding,
    assistant: SpecDecPPAssistant | None,
    max_new_tokens: int,
    sample: bool,
) -> Answer:
    _print(name)
    torch.manual_seed(0)
    listener = Listener(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=sample, assistant_model=assistant, streamer=listener
    )
    seconds = time.perf_counter() - listener.begin
    tokens = output[0, inputs["input_ids"].shape[1] :]
    _print(f"{len(tokens)} tokens in {seconds:.1f} s, {len(tokens) / seconds:.1f} tokens/s", style="dim")
    return Answer(tokens, seconds, told(listener, tokenizer, None if assistant is None else assistant.stats))


def _against_measured(stats: SpeculationStats, plain: Answer) -> SpeculationStats:
    """The statistics of an answer, compared with the plain answer that was timed beside it and not with single passes.

    What faster passes alone give stays as it was measured; the pass over the prompt counts as in the assisted answer.
    """
    tokens = len(plain.tokens) - 1  # the prompt's pass gives the first one
    if stats.plain_pass_seconds is None or stats.same_pass_seconds is None or tokens < 1:
        return stats
    measured = (plain.seconds - stats.prompt_seconds) / tokens
    same = measured * stats.same_pass_seconds / stats.plain_pass_seconds
    return replace(stats, plain_pass_seconds=measured, same_pass_seconds=same)


def _compare(plain: Tensor, assisted: Tensor) -> bool:
    """Print whether the answers are the same; True if they differ."""
    if torch.equal(plain, assisted):
        _print(f"equal: all {len(plain)} tokens", style="green")
        return False
    shared = min(len(plain), len(assisted))
    agree = int((plain[:shared] == assisted[:shared]).long().cumprod(0).sum())
    _print(f"different from token {agree} on (in half precision a near-tie can do this)", style="red")
    return True


def _picture(question: str, plain: Answer, assisted: Answer, stats: SpeculationStats, model: CausalLM) -> str:
    """The SVG of an answer, with what was measured where below it."""
    name = Path(str(model.config.name_or_path)).name
    where = f"{name}, {str(model.dtype)[6:]} on {model.device.type}, {_threads()}"
    gain = f"{plain.seconds / assisted.seconds:.2f} times as fast; {stats.tokens_per_pass:.2f} tokens per target pass"
    if stats.has_products and stats.plain_pass_seconds is not None and stats.same_pass_seconds is not None:
        products = stats.plain_pass_seconds / stats.same_pass_seconds
        gain += f"; the faster CPU products alone would give {products:.2f}"
    made = f"specdecpp demo --svg, {where}; written here as fast as there"
    left, right = (picture.Answer(each.said, each.seconds) for each in (plain, assisted))
    return picture.picture(question, left, right, notes=(gain, made))


def _report(stats: SpeculationStats, seconds: dict[str, float], sample: bool) -> None:
    ratio = seconds["plain"] / seconds["assisted"]
    _print("Statistics of all answers", f"\n{stats}\n")
    _print(
        "Measured",
        f"  plain {seconds['plain']:.1f} s, assisted {seconds['assisted']:.1f} s, prompts included: {ratio:.2f} times "
        "the speed of plain generate().",
    )
    if sample:
        console.print("Sampled answers differ from run to run; their distribution is the target's in both.")


def _show_next(target: str, assistant: str | None, layers: str | None, helper: SpecDecPPAssistant) -> None:
    """What to type next: it is measured, an assistant is trained where none was given, and how this one is used."""
    if assistant is not None:
        made, ours = f"from_pretrained({assistant!r}, target=model)", f"--assistant {assistant}"
    elif layers is not None and helper.kind is EARLY_EXIT:
        made, ours = f"from_early_exit(model, layers={parse_layers(layers)})", f"--layers {layers}"
    else:
        made, ours = f"from_{helper.kind.name}(model)", f"--{helper.kind.name}"
    _print("\nmeasure it", f"  specdecpp bench --target {target} {ours} --quick")
    if assistant is None:
        _print("train one ", f"  specdecpp train --target {target} --data FILE --output DIR")
    _print("use it    ", f"  assistant = SpecDecPPAssistant.{made}; model.generate(..., assistant_model=assistant)")


def _show_tree(drawn: DrawnTree, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a tree with its tokens as text, and save it as a picture where matplotlib is installed."""

    def decode(token: int) -> str:
        return repr(tokenizer.decode([token]))

    _print("\nThe last tree", f"\n{drawn.text(decode)}")
    try:
        drawn.save(PICTURE, decode)
    except ImportError:
        console.print("No picture: it needs matplotlib. Install the extra: pip install 'hf-specdecpp[train]'.")
    else:
        console.print(f"Picture: {PICTURE}")


def _warm_up(model: CausalLM, tokenizer: PreTrainedTokenizerBase, assistant: SpecDecPPAssistant) -> None:
    inputs = _encode(tokenizer, "Hello").to(model.device)
    for helper in (None, assistant):
        model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=helper)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded


def _print(heading: str, text: str = "", style: str = "bold") -> None:
    console.print(Text.assemble((heading, style), text))


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"
