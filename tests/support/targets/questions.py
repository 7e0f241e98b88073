"""What `generate()` asks processors, functions and criteria: recorders, toys that raise when they are asked what plain
generation would not ask, and random calls whose questions are compared."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import VOCAB_SIZE, assistant_of, quiet_later_layers, tiny
from support.targets.watchers import tokenizer

PAD = 0
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.9},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.1, 1.2]}},
    "lookup": {"rule": "fixed", "num_tokens": 3, "lookup": True},
    "tree": {"tree": "dyspec", "tree_budget": 12},
    "tree, lookup": {"tree": "dyspec", "tree_budget": 8, "lookup": True},
    "token by token": {"tree": "dyspec", "tree_budget": 8, "verification": "token"},
    "exact tree": {"tree": "dyspec-exact", "tree_budget": 6},
    "static tree": {"tree": [3, 2, 1]},
}
CAPTURED: dict[str, dict[str, Any]] = {
    "captured chain": WAYS["chain"],
    "captured tree": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
    "captured, lookup": WAYS["lookup"],
}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
CHAINS = [name for name, how in {**WAYS, **CAPTURED}.items() if "tree" not in how]


@dataclass
class Question:
    """`asked`: who was; `ids`: the text, or texts; `scores`: a processor's, or how many a criterion was shown."""

    asked: str
    row: int
    ids: list[Any]
    scores: Any = None


def same(one: Question, other: Question) -> bool:
    """Whether two questions are equal, but for the scores of texts that have ended, which are 0 or forbidden here."""
    if (one.asked, one.row, one.ids) != (other.asked, other.row, other.ids):
        return False
    if not isinstance(one.scores, Tensor):
        return bool(one.scores == other.scores)
    if len(one.scores) > 1:
        ended = ~((other.scores != 0) & other.scores.isfinite()).any(-1, keepdim=True)
        return torch.allclose(one.scores.where(~ended, 0.0), other.scores.where(~ended, 0.0), atol=1e-4)
    return torch.allclose(one.scores, other.scores, atol=1e-4)


# Toys: functions of a row and its text. ------------------------------------------------------------------------------


@dataclass
class Toy:
    """A `prefix_allowed_tokens_fn`.

    Attributes:
        start: tokens of the prompts.
        ends: ids that end texts.
        padded: whether texts that have ended are asked about, with padding behind the end, as rows of a batch are.
    """

    start: int
    ends: set[int]
    padded: bool
    log: list[Question] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, row: int, sent: Tensor) -> list[int]:
        text = sent.tolist()
        self.log.append(Question("function", row, text))
        assert self.prompts.setdefault(row, text[: self.start]) == text[: self.start], "another row's text"
        said = text[self.start :]
        ended = PAD in said or any(token in self.ends for token in said)
        assert self.padded or not ended, "the text has ended"
        if PAD in said:  # which is never allowed
            said = said[: said.index(PAD)]
        return self.answer(row, text[: self.start], said)

    def answer(self, row: int, prompt: list[int], said: list[int]) -> list[int]:
        raise NotImplementedError


class Trie(Toy):
    """Knows no text that it would not have allowed."""

    def answer(self, row: int, prompt: list[int], said: list[int]) -> list[int]:
        for count, token in enumerate(said):
            assert token in self._allowed(prompt, said[:count]), "a text that is forbidden"
        return self._allowed(prompt, said)

    def _allowed(self, prompt: list[int], said: list[int]) -> list[int]:
        last, count = [*prompt, *said][-1], len(said)
        return [token for token in range(1, VOCAB_SIZE) if (token + 3 * last + count) % 6]


class Counts(Toy):
    """Allows others at each call."""

    calls = 0

    def answer(self, row: int, prompt: list[int], said: list[int]) -> list[int]:
        self.calls += 1
        return [token for token in range(1, VOCAB_SIZE) if (token + self.calls) % 5]


class Matcher(Toy):
    """An automaton of each row, which takes a token at each call."""

    def answer(self, row: int, prompt: list[int], said: list[int]) -> list[int]:
        states: dict[int, tuple[int, list[int]]] = self.__dict__.setdefault("states", {})
        state, before = states.get(row, (0, None))
        if before is not None and not (self.padded and said == before):
            assert said[:-1] == before, "not the next token"
            state = 7 * state + said[-1]
        states[row] = state % 1000, said
        return [token for token in range(1, VOCAB_SIZE) if (token + state) % 7]


class Seen(Toy):
    """A set of texts; what it allows depends on how many there are."""

    def answer(self, row: int, prompt: list[int], said: list[int]) -> list[int]:
        seen: set[Any] = self.__dict__.setdefault("seen", set())
        assert self.padded or (row, *said) not in seen, "asked twice"
        seen.add((row, *said))
        return [token for token in range(1, VOCAB_SIZE) if (token + len(seen)) % 4]


TOYS: list[type[Toy]] = [Trie, Counts, Matcher, Seen]


class Recorded(LogitsProcessor):
    """A processor that notes what it is asked, and lets a toy say what is allowed; without one, each row's scores are
    shifted by those of the call before."""

    def __init__(self, log: list[Question], toy: Toy | None) -> None:
        self.log, self.toy, self.before = log, toy, torch.zeros(())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(Question("processor", 0, input_ids.tolist(), scores.clone()))
        if self.toy is None:
            scores = scores + 0.3 * self.before
            self.before = scores
            return scores.clone()
        mask = torch.full_like(scores, float("-inf"))
        for row, sent in enumerate(input_ids):
            mask[row, self.toy(row, sent)] = 0.0
        return scores + mask


class Criterion(StoppingCriteria):
    """Notes what it is asked, and ends texts after `token`."""

    def __init__(self, log: list[Question], token: int) -> None:
        self.log, self.token = log, token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.log.append(Question("criterion", 0, input_ids.tolist(), None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


# Calls. --------------------------------------------------------------------------------------------------------------


@cache
def target(captured: bool) -> CausalLM:
    return quiet_later_layers(tiny("llama", num_hidden_layers=2))


@cache
def assistant(way: str, kind: str) -> SpecDecPPAssistant:
    return assistant_of(kind, target(way in CAPTURED), **{**WAYS, **CAPTURED}[way])


@dataclass
class Call:
    """A `generate()` call. Its arguments are made anew for each run, with what remembers."""

    way: str = "chain"
    kind: str = "independent"
    toy: type[Toy] | None = Trie
    as_function: bool = True
    is_marked: bool = False
    rows: int = 1
    criterion: bool = False
    lengths: tuple[int, ...] = (9,)
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def run(self, ours: bool) -> tuple[Tensor, list[Question], int]:
        """The texts after the prompts, what was asked, and how many candidates were accepted."""
        length, log, ends = max(self.lengths), list[Question](), set(self.options.get("eos_token_id", ()))
        toy = None if self.toy is None else self.toy(length, ends, padded=self.rows > 1, log=log)
        found: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": PAD, **self.options}
        if "stop_strings" in found:
            found["tokenizer"] = tokenizer()
        if self.as_function and toy is not None:
            found["prefix_allowed_tokens_fn"] = toy
            toy.reads_prefix_only = self.is_marked  # type: ignore[attr-defined]
        else:
            processor = Recorded(log, toy)
            processor.reads_prefix_only = self.is_marked  # type: ignore[attr-defined]
            found["logits_processor"] = LogitsProcessorList([processor])
        if self.criterion:
            ends.add(11)
            found["stopping_criteria"] = StoppingCriteriaList([Criterion(log, 11)])
        ids, mask = self.prompts()
        model = target(self.way in CAPTURED)
        made = assistant(self.way, self.kind) if ours else None
        context: AbstractContextManager[Any] = pretend_graphs() if self.way in CAPTURED and ours else nullcontext()
        torch.manual_seed(self.seed)
        with context:
            text = model.generate(ids, attention_mask=mask, assistant_model=made, **found)
        return text, log, 0 if made is None else made.stats.accepted

    def prompts(self) -> tuple[Tensor, Tensor]:
        """Tokens that repeat themselves, padded on the left."""
        draws, longest = torch.Generator().manual_seed(self.seed), max(self.lengths)
        rows = []
        for length in self.lengths:
            some = torch.randint(1, VOCAB_SIZE, (1 + length // 2,), generator=draws)
            rows.append(functional.pad(some.repeat(2)[:length], (longest - length, 0)))
        ids = torch.stack(rows)
        return ids, torch.stack([torch.arange(longest) >= longest - length for length in self.lengths]).long()


def check(call: Call) -> int:
    """Compare the questions of a call with plain generation's; how many candidates were accepted.

    Of a sampled text they are about the text before each of its tokens. A function that guides the draft is also asked
    about texts that it allows."""
    text, asked, accepted = call.run(ours=True)
    if call.options.get("do_sample"):
        start = max(call.lengths)
        texts = [each for each in asked if each.asked != "criterion"]
        questions = [each.ids if each.asked == "function" else each.ids[0] for each in texts]
        once = [text[0, :end].tolist() for end in range(start, text.shape[1])]
        per_token = 2 if call.toy and not call.as_function else 1  # the processor, and the toy in it
        expected = [each for each in once for _ in range(per_token)]
        assert is_part(expected, questions, list.__eq__) if _guides(call) else questions == expected, call
        return accepted
    plain, theirs, _ = call.run(ours=False)
    assert torch.equal(text, plain), call
    if _guides(call):
        assert is_part(theirs, asked, same), call
    else:
        assert len(asked) == len(theirs), call
        assert all(map(same, theirs, asked)), call
    return accepted


def _guides(call: Call) -> bool:
    return call.is_marked and call.rows == 1


def is_part(some: list[Any], of: list[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether `some` are among `of`, in their order."""
    further = iter(of)
    return all(any(equal(each, other) for other in further) for each in some)


OPTIONS: list[dict[str, Any]] = [
    {"eos_token_id": [3, 17, 29]}, {"eos_token_id": [5, 11, 23, 31, 40, 44]}, {"stop_strings": ["b", "q", "zA", "K"]},
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[3], [5, 7], [11, 12]]},
    {"sequence_bias": {(4,): 3.0, (8, 9): -5.0}}, {"min_new_tokens": 5, "eos_token_id": [3, 17, 29]},
    {"suppress_tokens": [1, 2, 20]}, {"return_dict_in_generate": False}, {"max_new_tokens": 1}, {"max_new_tokens": 30},
]  # fmt: skip


def drawn(seed: int, captured: bool = False) -> Call:
    """A random call."""
    r = random.Random(seed)
    rows = r.choice((1, 1, 1, 2, 3))
    ways = [name for name in (CAPTURED if captured else WAYS) if rows == 1 or name in CHAINS]
    options: dict[str, Any] = {}
    for each in r.sample(OPTIONS, r.choice((0, 1, 2, 3))):
        options |= each
    toy = r.choice((*TOYS, None)) if rows == 1 else r.choice(TOYS)
    is_marked = toy is Trie and r.random() < 0.4
    as_function = toy is not None and (r.random() < 0.6 or (rows > 1 and not is_marked))
    if rows == 1 and r.random() < 0.3:
        options |= {"do_sample": True, "top_k": r.choice((0, 9)), "temperature": r.choice((0.5, 1.0))}
    if rows > 1 and not as_function:  # by which those of texts that have ended are not 0 any more
        options.pop("sequence_bias", None)
    lengths = tuple(r.choice((1, 2, 5, 9, 14)) for _ in range(rows))
    return Call(
        r.choice(ways), r.choice(KINDS), toy, as_function, is_marked, rows,
        rows == 1 and r.random() < 0.3, lengths, options, seed,
    )  # fmt: skip
