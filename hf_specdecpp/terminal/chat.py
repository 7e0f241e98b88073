"""`specdecpp chat`: a loop that reads messages and streams answers."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.caches.cached_context import num_rows
from hf_specdecpp.choosing import for_command
from hf_specdecpp.cli_options import ChatConfig, DraftChoice
from hf_specdecpp.draft_kinds.known import describe
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, input_device
from hf_specdecpp.models.loading import load_model, load_tokenizer
from hf_specdecpp.terminal.listener import without_controls
from hf_specdecpp.texts.encoding import rendered, tokens_of

HELP = """A line is a message. Commands:
/reset  begin a new conversation
/stats  tokens, candidates and time of all answers, and the speed-up by the assistant
/quit   end, as Ctrl-D does
Ctrl-C stops an answer; the text that was shown by then stays in the conversation."""


def run(config: ChatConfig, console: Console) -> None:
    """Load target and assistant, and chat until the messages end. Errors as in `assist`."""
    with console.status(f"loading {config.target}"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        model, tokenizer = load_model(config.target, device=accelerator or "cpu"), load_tokenizer(config.target)
        assistant = for_command(model, config, default=True)
    chat = Chat(model, tokenizer, assistant, config, console)
    chat.say(facts(model, assistant, config))
    if tokenizer.chat_template is None:
        chat.say("This model has no chat template: it continues the messages.")
    chat.say("Type a message, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    chat.talk()
    if chat.stats is not None:
        chat.say(f"\n{chat.stats.verdict}")
        chat.say(config.next_step(assistant.kind.name))


class Chat:
    """A conversation with a model that has a default assistant. The cache is kept between answers, so that only new
    text is read; all text is read again if the chat template changes earlier text, for example drops thoughts."""

    def __init__(
        self, model: CausalLM, tokenizer: PreTrainedTokenizerBase, assistant: SpecDecPPAssistant, config: ChatConfig,
        console: Console,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.assistant, self.console = model, tokenizer, assistant, console
        self.max_new_tokens, self.how = config.max_new_tokens, copy.deepcopy(model.generation_config)
        self.how.return_dict_in_generate = True
        if config.temperature is not None:
            self.how.do_sample, self.how.temperature = config.temperature > 0, config.temperature or 1.0
        self.stats: SpeculationStats | None = None  # sum over all answers, also those before a /reset
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        self._cache: Cache | None = None
        self._cached_ids: list[int] = []  # tokens in the cache

    def talk(self) -> None:
        """Answer messages and run commands until the messages end, or `/quit`."""
        for message in self._messages():
            command = message.split()[0]
            if command == "/quit":
                return
            if command == "/reset":
                self.reset()
                self.say("A new conversation.")
            elif command == "/stats":
                self.say(str(self.stats or "There is no answer yet: type a message first."))
            elif command.startswith("/"):
                self.say(HELP if command == "/help" else f"There is no command {command}. /help shows the commands.")
            else:
                self.answer(message)

    def say(self, text: str, style: str = "") -> None:
        """Print text without the markup and control characters that names and generated text may contain."""
        self.console.print(Text(without_controls(text), style), soft_wrap=True)

    def answer(self, message: str) -> None:
        """Print the answer to a message and its speed, and add both texts to the conversation; or print the error."""
        begin, shown = time.perf_counter(), _Shown(self.tokenizer, self.console)
        messages = [*self.messages, {"role": "user", "content": message}]
        try:
            count = self._generate(encoded(self.tokenizer, messages), shown)
        except ValueError as error:
            self.say(f"Error: {' '.join(str(error).split())}", "red")
            return
        except KeyboardInterrupt:
            shown.end()
            self.say("Stopped.", "dim")
        else:
            stats, seconds = self.assistant.stats, time.perf_counter() - begin
            self.stats = stats if self.stats is None else self.stats + stats
            by = f"{stats.tokens_per_pass:.2f} tokens per target pass"
            by = by if stats.refusal is None else f"plain generate(): {stats.refusal}"
            self.say(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s, {by}", "dim")
        self.messages = [*messages, {"role": "assistant", "content": shown.text}]

    def _generate(self, ids: list[int], shown: TextStreamer) -> int:
        """Stream an answer to the tokens `ids` to `shown`, and return its number of tokens."""
        longest = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", float("inf"))
        if len(ids) >= longest:
            raise ValueError(
                f"The conversation is {len(ids)} tokens long, and the model reads {longest}. /reset begins a new one."
            )
        self.how.max_new_tokens = int(min(self.max_new_tokens, longest - len(ids)))
        cache, cached_ids, self._cache, self._cached_ids = self._cache, self._cached_ids, None, []
        fits = cache is not None and num_rows(cache) == len(cached_ids) and ids[: len(cached_ids)] == cached_ids != ids
        input_ids = torch.tensor([ids], device=input_device(self.model))
        output: Any = self.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=self.how, streamer=shown,
            **{CACHE: cache} if fits else {},
        )  # fmt: skip
        sequence = output.sequences[0].tolist()
        if self.how.cache_implementation is None:
            self._cache, self._cached_ids = cache_among(output), sequence[:-1]  # the last token is not in the cache
        return len(sequence) - len(ids)

    def _messages(self) -> Iterator[str]:
        """Yield non-empty lines from the keyboard or a pipe."""
        if is_typed := sys.stdin.isatty():
            with suppress(ImportError):  # not available on Windows
                import readline  # noqa: F401 - gives `input` line editing and history
        while True:
            self.console.print()
            try:
                line = input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.say("\nTo end the chat type /quit, or Ctrl-D.", "dim")
                continue
            if line.strip():
                if not is_typed:
                    self.say(line)
                yield line.strip()


class _Shown(TextStreamer):
    """A streamer that prints an answer and stores its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console, self.text = console, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.console.print(Text(without_controls(text)), end="\n" if stream_end else "", soft_wrap=True)
        self.console.file.flush()


def facts(model: CausalLM, assistant: SpecDecPPAssistant, config: DraftChoice) -> str:
    """Return two lines: the target with its dtype and device, and the assistant."""
    draft = config.assistant or describe(assistant.config)
    lookups = ", and lookups" if assistant.speculation.lookup and assistant.kind.rests_on != "nothing" else ""
    return f"target     {config.target} ({where(model)})\nassistant  {draft}{lookups}"


def where(model: CausalLM) -> str:
    """Dtype and device of a model, such as "bfloat16 on cpu, 1 thread"."""
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if model.device.type == "cpu" else ""
    return f"{str(model.dtype)[6:]} on {model.device.type}{threads}"


def encoded(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation up to the next answer. `ValueError` if the chat template refuses `messages`."""
    return tokens_of(tokenizer, rendered(tokenizer, messages))
