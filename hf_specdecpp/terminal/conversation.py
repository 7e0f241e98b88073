"""A conversation with a target and its default assistant; the target's cache is carried from answer to answer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextStreamer
from transformers.cache_utils import Cache, DynamicLayer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.caches.states import is_recurrent
from hf_specdecpp.caches.text import num_rows, roll_back
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, input_device
from hf_specdecpp.terminal.listener import Listener


@dataclass
class Answer:
    """What was said to one message: the tokens of each target pass, and how many of the conversation were kept."""

    passes: list[list[int]]
    seconds: float
    stats: SpeculationStats
    carried: int

    @property
    def tokens(self) -> list[int]:
        return [token for some in self.passes for token in some]


class Stop(StoppingCriteria):
    """Ends an answer with the next token once it is asked to."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        return torch.full((len(input_ids),), self.is_asked, device=input_ids.device)


class Conversation:
    """Messages and answers, each of which reads only what is new.

    The whole conversation goes through the tokenizer's chat template each time. The cache is kept as far as this is the
    text that it was made of: a template may drop the thoughts of earlier answers.

    Args:
        model: whose answers they are. An assistant that is its default one drafts.
        tokenizer: without a chat template, the model continues the messages, a line each.
        assistant: whose statistics are kept.
        max_new_tokens: per answer.
        temperature: 0 takes the likeliest tokens; by default what the model's generation config says.
        system: what the model is told before the first message.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        assistant: SpecDecPPAssistant,
        max_new_tokens: int = 512,
        temperature: float | None = None,
        system: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.assistant = model, tokenizer, assistant
        self.max_new_tokens = max_new_tokens
        self.config = copy.deepcopy(model.generation_config)
        self.config.return_dict_in_generate = True
        if temperature is not None:
            self.config.do_sample = temperature > 0
            self.config.temperature = temperature or 1.0
        self.system = system
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.answers: list[Answer] = []
        self._cache: Cache | None = None
        self._held: list[int] = []  # the tokens that the cache holds

    def answer(self, message: str, stop: Stop, show: Callable[[str], None]) -> Answer:
        """Say something, and have the answer, whose text `show` is given piece by piece, until it ends or `stop` ends
        it; `ValueError` if the chat template refuses the conversation, or it is longer than the model can read. The
        message is not part of it then, and neither is one whose answer is ended by any other exception."""
        begin = time.perf_counter()
        self.messages.append({"role": "user", "content": message})
        listener = Listener(_Shown(self.tokenizer, show))
        try:
            ids = encoded(self.tokenizer, self.messages)
            cache, carried = self._carry_on(ids), len(self._held)
            output = self._generate(ids, cache, stop, listener)
        except BaseException:
            self.messages.pop()
            self._cache, self._held = None, []
            raise
        sequence = output.sequences[0].tolist()
        self._cache = cache_among(output)
        self._held = [] if self._cache is None else sequence[:-1]  # the last one has not been read
        passes = [tokens for _, tokens in listener.passes]
        answer = Answer(passes, time.perf_counter() - begin, self.assistant.stats, carried)
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": str(text)})
        self.answers.append(answer)
        return answer

    def warm_up(self) -> None:
        """Generate a few tokens of no conversation: before its first text an assistant measures what passes cost."""
        device = input_device(self.model)
        ids = torch.tensor([self.tokenizer("Hello").input_ids or [0]], device=device)
        self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)

    def _generate(self, ids: list[int], cache: Cache | None, stop: Stop, listener: Listener) -> Any:
        longest = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        room = (longest or len(ids) + self.max_new_tokens) - len(ids)
        if room < 1:
            raise ValueError(
                f"The conversation is {len(ids)} tokens long, and the model reads {longest}. /reset begins a new one."
            )
        self.config.max_new_tokens = min(self.max_new_tokens, room)
        input_ids = torch.tensor([ids], device=input_device(self.model))
        carried = {} if cache is None else {CACHE: cache}
        return self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=self.config,
            stopping_criteria=[stop],
            streamer=listener,
            **carried,
        )

    def _carry_on(self, ids: list[int]) -> Cache | None:
        """The cache, taken back to what it shares with all but the last of `ids`; `None` where it must be made anew."""
        pairs = list(zip(self._held, ids[:-1], strict=False))
        shared = next((place for place, (held, new) in enumerate(pairs) if held != new), len(pairs))
        is_carried = shared > 0 and self.config.cache_implementation is None
        if not is_carried or not _take_back(self._cache, len(self._held) - shared, shared):
            self._cache, self._held = None, []
        self._held = self._held[:shared]
        return self._cache


def encoded(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation, up to where the next answer begins; `ValueError` if its template refuses it."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(message["content"] for message in messages)).input_ids
    try:
        found: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise ValueError(f"The model's chat template refuses this conversation: {error}.") from None
    return found["input_ids"]


def _take_back(cache: Any, surplus: int, kept: int) -> bool:
    """Whether the cache could be brought to its first `kept` tokens; not one with states, or that has lost rows."""
    if num_rows(cache) != kept + surplus:
        return False
    if surplus == 0:
        return True
    rows = {layer.keys.shape[-2] if isinstance(layer, DynamicLayer) and layer.keys is not None else 0
            for layer in cache.layers}  # fmt: skip
    if is_recurrent(cache) or rows != {kept + surplus}:
        return False
    roll_back(cache, kept)
    return True


class _Shown(TextStreamer):
    """Hands the text of an answer on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
        self.show(text)
