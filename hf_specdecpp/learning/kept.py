"""Texts that are kept of generations, for a draft to learn from (`KeptTexts`): in memory only, and bounded.

Each verification says what the target would have said at every place of the text: of its distribution the likeliest
tokens are kept, beside the states that the draft reads. A token takes 4 bytes; in an answer its `MOST_LIKELY` ids and
probabilities take 6 bytes each; a state takes a byte a number, and 4 for each `PART` of them. SmolLM2-135M's published
draft reads 2,304 numbers, so a token of an answer takes 2,536 bytes there, and one of a prompt 2,344. Where the draft
reads nothing they take 196 and 4.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.target_states import StateReader, TargetStates

MOST_LIKELY = 32  # tokens whose probability is kept
HELD_OUT = 5  # of so many texts one is never learned from: the second of them, so that two texts are enough
BYTE = torch.float8_e4m3fn
LARGEST = torch.finfo(BYTE).max
PART = 256  # numbers with a scale of their own
LEAST = 1e-12  # rest of a probability


@dataclass(frozen=True)
class States:
    """States `[n, width]` in a byte a number, with three bits of precision relative to each of them.

    Attributes:
        numbers: `[n, width]`, float8 as bytes, which more operations know.
        scales: `[n, parts]`, float32: by which each `PART` numbers are multiplied.
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def of(cls, states: Tensor) -> States:
        parts = states.detach().to("cpu", torch.float32).split(PART, dim=-1)
        scales = torch.stack([part.abs().amax(-1) / LARGEST for part in parts], dim=-1).clamp_min(1e-30)
        scaled = torch.cat([part / scales[:, place, None] for place, part in enumerate(parts)], dim=-1)
        return cls(scaled.clamp(-LARGEST, LARGEST).to(BYTE).view(torch.uint8), scales)

    def read(self) -> Tensor:
        """They, in float32."""
        parts = self.numbers.view(BYTE).to(torch.float32).split(PART, dim=-1)
        return torch.cat([part * self.scales[:, place, None] for place, part in enumerate(parts)], dim=-1)

    def __getitem__(self, rows: slice) -> States:
        return States(self.numbers[rows].clone(), self.scales[rows].clone())

    @staticmethod
    def together(pieces: list[States]) -> States:
        return States(torch.cat([each.numbers for each in pieces]), torch.cat([each.scales for each in pieces]))


@dataclass(frozen=True)
class KeptText:
    """A text, and what the target would have said along its answer.

    Attributes:
        tokens: `[n]` int32.
        begin: where the answer begins, at least 1.
        likely: `[n - begin, MOST_LIKELY]` int32: the target's likeliest tokens at each place of the answer.
        probs: their probabilities at temperature 1, before processors, in half precision.
        states: at all tokens but the last, if the draft reads them.
        num_ids: width of the target's logits.
        number: of the texts kept so far; -1 until it is one of them.
    """

    tokens: Tensor
    begin: int
    likely: Tensor
    probs: Tensor
    states: States | None
    num_ids: int
    number: int = -1

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT == 1

    @property
    def nbytes(self) -> int:
        states = () if self.states is None else (self.states.numbers, self.states.scales)
        return sum(each.nbytes for each in (self.tokens, self.likely, self.probs, *states))

    def piece(self, first: int, last: int) -> KeptText:
        """The tokens from `first` to before `last`, as a text whose answer may begin later."""
        begin = max(self.begin, first + 1)
        own = slice(begin - self.begin, max(last - self.begin, begin - self.begin))
        states = None if self.states is None else self.states[first : last - 1]
        return KeptText(
            self.tokens[first:last].clone(), begin - first, self.likely[own].clone(), self.probs[own].clone(), states,
            self.num_ids, self.number,
        )  # fmt: skip


class KeptTexts:
    """The latest texts, the oldest of which go when there are more tokens than `most`.

    Attributes:
        most (tokens): `SpeculationConfig.keep_texts`.
    """

    def __init__(self, most: int = 0) -> None:
        self.most, self.count = most, 0
        self.texts: deque[KeptText] = deque()

    def __len__(self) -> int:
        """Tokens."""
        return sum(map(len, self.texts))

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self.texts)

    def clear(self) -> None:
        """Forget them."""
        self.texts.clear()

    def add(self, text: KeptText) -> None:
        """Keep a text, of one that is longer than `most` its end."""
        text = text.piece(max(len(text) - self.most, 0), len(text))
        if not len(text.likely):
            return
        self.texts.append(replace(text, number=self.count))
        self.count += 1
        while len(self) > self.most:
            self.texts.popleft()


class Keeper:
    """Keeps what one generation reads and says.

    Args:
        reads_states: whether the draft reads states of the target.
    """

    def __init__(self, reads_states: bool) -> None:
        self.reads_states = reads_states
        self.num_ids = 0
        self._tokens: list[Tensor] = []
        self._states: list[States] = []
        self._likely: list[Tensor] = []
        self._probs: list[Tensor] = []

    def read(self, tokens: Tensor, states: Tensor | None) -> None:
        """What is new in the text: `[1, n]`, and the states `[1, m, width]` before the last m of these.

        Of a text that carries a cache on, the states of the turns before are not known: they are left out.
        """
        if self.reads_states:
            if states is None:
                return
            if not self._states:
                tokens = tokens[:, -states.shape[1] - 1 :]
            self._states.append(States.of(states[0]))
        self._tokens.append(tokens[0].to("cpu", torch.int32))

    def say(self, logits: Tensor) -> None:
        """The target's logits `[k, vocab]`, before processors, where it said the next k tokens."""
        self.num_ids = logits.shape[-1]
        probs, likely = logits.softmax(-1).topk(min(MOST_LIKELY, logits.shape[-1]))
        self._likely.append(likely.to("cpu", torch.int32))
        self._probs.append(probs.to("cpu", torch.float16))

    def text(self) -> KeptText | None:
        """What was kept, if there is anything to learn from."""
        if not self._likely or not self._tokens:
            return None
        tokens, likely, probs = (torch.cat(each) for each in (self._tokens, self._likely, self._probs))
        states = States.together(self._states) if self.reads_states else None
        begin = len(tokens) - len(likely)
        return KeptText(tokens, begin, likely, probs, states, self.num_ids) if begin > 0 else None


def logits_of(likely: Tensor, probs: Tensor, num_ids: int) -> Tensor:
    """Logits `[n, num_ids]` of what was kept: what is left of the probability is spread evenly over all other tokens.

    Example: of 6 tokens, 0.6 and 0.2 are kept for two of them. Each of the other four gets 0.05.
    """
    known = probs.float()
    rest = (1.0 - known.sum(-1, keepdim=True)).clamp_min(LEAST)
    others = max(num_ids - likely.shape[-1], 1)
    spread = (rest / others).log().expand(-1, num_ids)
    return spread.scatter(-1, likely.long(), known.clamp_min(LEAST).log())


@torch.no_grad()
def kept_of(target: CausalLM, reader: StateReader | None, tokens: Tensor, begin: int) -> KeptText | None:
    """What would be kept of a text `[n]` that was written elsewhere, by a pass of the target over it.

    Args:
        reader: says which states the draft reads.
        begin: where its answer begins.
    """
    keeper, ids = Keeper(reader is not None), tokens[None].to(input_device(target))
    with TargetStates(target, reader) as caught:
        logits = target(ids).logits[0]
        states = caught.take()
    keeper.read(ids, None if states is None else states[:, :-1])
    keeper.say(logits[begin - 1 : -1].float())
    return keeper.text()
