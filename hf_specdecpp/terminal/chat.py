"""`specdecpp chat`: reads messages, shows answers as they come, and what the assistant did for them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hf_specdecpp.choosing import as_told
from hf_specdecpp.cli_options import ChatConfig
from hf_specdecpp.drafts.known import describe
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.loading import load_model, load_tokenizer
from hf_specdecpp.terminal.conversation import Answer, Conversation, Stop
from hf_specdecpp.terminal.listener import without_controls

HELP = """A line is a message. Commands:
/reset  begin a new conversation
/tree   how the last answer came about: its most branched token tree, or its chains
/stats  tokens, candidates and time of the answers so far, and whether the assistant pays
/quit   end, as Ctrl-D does
Ctrl-C stops an answer; what was said by then stays in the conversation."""


def run(config: ChatConfig, console: Console) -> None:
    """Load the target and its assistant, and talk until the messages end; errors as of `assist`."""
    with console.status(f"loading {config.target}"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        model = load_model(config.target, device=config.device or accelerator or "cpu")
        tokenizer = load_tokenizer(config.target)
        helper = as_told(model, config, default=True, tree=config.tree)
        limits = config.max_new_tokens, config.temperature, config.system
        conversation = Conversation(model, tokenizer, helper, *limits)
        conversation.warm_up()
    chat = Chat(conversation, console)
    chat.say("target   ", f"  {config.target} ({str(model.dtype)[6:]} on {model.device})")
    chat.say("assistant", f"  {config.assistant or describe(helper.config)}")
    if helper.stats.refusal is not None:
        chat.say("note     ", f"  Answers are plain ones, without the assistant: {helper.stats.refusal}")
    if tokenizer.chat_template is None:
        chat.say("note     ", "  This model has no chat template: it continues what is typed.")
    chat.say("", "Type a message, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    chat.talk()
    chat.close(f"specdecpp bench --target {config.target} {config.flags(helper.kind.name)} --quick")


class Chat:
    """The terminal's side of a conversation."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self.conversation, self.console = conversation, console
        self.stats: list[SpeculationStats] = []  # of all answers, those before a /reset, too

    def talk(self) -> None:
        """Until the messages end, or /quit."""
        for message in self._messages():
            first = message.split()[0]
            if first == "/quit":
                return
            if first.startswith("/"):
                self._obey(first)
            else:
                self._answer(message)

    def say(self, heading: str, text: str = "", style: str = "bold") -> None:
        """A line, without markup: names, texts and tokens may hold brackets."""
        self.console.print(Text.assemble((heading, style), without_controls(text)), soft_wrap=True)

    def close(self, measure: str) -> None:
        """The verdict, and what to do next."""
        if self.stats:
            self.say("\nverdict   ", f"  {self._total().verdict}")
            self.say("measure it", f"  {measure}")

    def _messages(self) -> Iterator[str]:
        """Lines that are not empty, from the keyboard or a pipe."""
        if is_typed := sys.stdin.isatty():
            with suppress(ImportError):  # there is none on Windows
                import readline  # noqa: F401 - with it `input` edits lines, and remembers them
        while True:
            self.console.print()
            try:
                line = input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.say("\nTo end the chat type /quit, or Ctrl-D.", style="dim")
                continue
            if line.strip():
                if not is_typed:
                    self.say("", line)
                yield line.strip()

    def _answer(self, message: str) -> None:
        stop = Stop()
        try:
            with first_interrupt(stop.ask):
                answer = self.conversation.answer(message, stop, self._stream)
        except KeyboardInterrupt:
            self.say("\nStopped, and left out of the conversation. Say it again, or something else.", style="dim")
            return
        except ValueError as error:
            self.say("Error: ", " ".join(str(error).split()), style="red")
            return
        self.stats.append(answer.stats)
        self.say(f"\n{summary(answer)}{', stopped' if stop.is_asked else ''}", style="dim")

    def _stream(self, text: str) -> None:
        self.console.print(Text(without_controls(text)), end="", soft_wrap=True)
        self.console.file.flush()

    def _obey(self, command: str) -> None:
        answers = self.conversation.answers
        if command == "/help":
            self.say("", HELP)
        elif command == "/reset":
            self.conversation.reset()
            self.say("", "A new conversation.")
        elif command not in ("/tree", "/stats"):
            self.say("", f"There is no command {command}. /help shows those that there are.")
        elif not (answers if command == "/tree" else self.stats):
            self.say("", "There is no answer yet: type a message first.")
        elif command == "/stats":
            self.say("", str(self._total()))
        else:
            self.console.print(drawing(answers[-1], self._decode), soft_wrap=True)

    def _total(self) -> SpeculationStats:
        return sum(self.stats[1:], self.stats[0])

    def _decode(self, tokens: list[int]) -> str:
        return str(self.conversation.tokenizer.decode(tokens))


@contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within, the first Ctrl-C only calls `stop`, so that what runs can end in order; a second one interrupts it."""

    def note(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def summary(answer: Answer) -> str:
    """Such as "64 tokens in 1.2 s, 53.3 tokens/s, 2.40 tokens per target pass"."""
    count, passes = len(answer.tokens), len(answer.passes)
    carried = f", {answer.carried} tokens carried over" if answer.carried else ""
    return (
        f"{count} token{'s' * (count != 1)} in {answer.seconds:.1f} s, {count / answer.seconds:.1f} tokens/s, "
        f"{count / max(passes, 1):.2f} tokens per target pass{carried}"
    )


def drawing(answer: Answer, decode: Callable[[list[int]], str]) -> Text:
    """The most branched token tree of an answer; of chains the whole answer, in brackets what each target pass gave."""
    if (tree := answer.stats.branched_tree) is not None:
        return Text(tree.text(lambda token: repr(decode([token]))))
    text = Text("In brackets what each pass of the target gave: candidates that it accepted, and a token of its own.\n")
    for tokens in answer.passes:
        text.append(f"[{without_controls(decode(tokens))}]", style="green" if len(tokens) > 1 else "")
    return text
