"""What a case is, and how one is drawn: `Case`, `draw`, `settle`."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One conversation with an assistant. Its `repr` can be pasted: `run_case(Case(...))`.

    The defaults are the simplest values; the meaning of each is in the tables of `models.py` and `arguments.py`.

    `seed`: of the prompts. `length`, `new_tokens`, `turns`: tokens in the first prompt, tokens of each answer, answers.
    `first_tokens`: tokens of every answer but the last. `chunk`: `prefill_chunk_size`, 0 for none. `records`: the
    outputs asked for; "dict" alone asks for the cache only."""

    seed: int = 0
    family: str = "llama"
    attention: str = "sdpa"
    dtype: str = "float64"
    draft: str = "close"
    draft_vocab: str = "all"
    head: str = "none"
    rule: str = "fixed"
    tree: str = "none"
    door: str = "attached"
    processors: tuple[str, ...] = ()
    sampling: bool = False
    stop: str = "max_new_tokens"
    new_tokens: int = 8
    length: int = 6
    padding: str = "no mask"
    positions: str = "none"
    cache: str = "none"
    turns: int = 1
    first_tokens: int = 3
    earlier: str = "ours"
    chunk: int = 0
    records: tuple[str, ...] = ()
    streamer: bool = False
    weights: str = "as they are"

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(changed)})"


# Families that every run draws from; the slow run adds all others that can be built.
FAMILIES = (
    "llama", "gemma3_text", "mistral", "gpt2", "opt", "gemma2", "mixtral", "gpt_oss", "gemma3n_text", "phi3", "smollm3",
    "cohere2", "gemma4_text", "llama4_text", "deepseek_v3", "qwen2", "starcoder2",
)  # fmt: skip
WITH_ADAPTERS = ("llama", "gemma3_text", "gpt2")  # to make them takes time, and families hardly matter to them
DRAFTS = ("other", "more ids", "fewer ids", "exit", "exit some", "conditioned", "eagle3")
TREES = ("dyspec", "dyspec wide", "dyspec sparse", "dyspec-exact", "static", "static ragged", "static chain")
RULES = ("fixed", "fixed one", "threshold", "throughput cheap", "throughput dear")
PROCESSORS = (
    "repetition_penalty", "no_repeat_ngram", "bad_words", "sequence_bias", "min_new_tokens", "forced_eos", "neighbours",
    "grammar", "suppress", "begin_suppress", "remove_invalid", "encoder_repetition", "encoder_no_repeat", "renormalize",
    "exponential_decay", "in place", "counting", "new tensor", "whole prefix", "nan",
)  # fmt: skip
STOPS = ("max_new_tokens", "max_length", "eos", "many eos", "stop strings", "criterion", "max_time", "min_length")
RECORDS = ("scores", "logits", "hidden_states", "attentions")
PADDINGS = ("no mask", "ones", "left", "right", "holes", "pads at the end", "pads at the start", "pads inside")


def draw(randomness: random.Random, families: tuple[str, ...] = FAMILIES) -> Case:
    """A random case that is legal: what cannot go together was settled."""
    r = randomness

    def rarely(usual: Any, others: Any, chance: float) -> Any:
        return r.choice(others) if r.random() < chance else usual

    def some(values: tuple[str, ...], counts: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(sorted(r.sample(values, r.choice(counts))))

    tree = rarely("none", TREES, 0.5)
    case = Case(
        seed=r.randrange(10**6), family=r.choice(families), attention=rarely("sdpa", ("eager",), 0.4),
        draft=r.choice(("close", "close", "close", "other", "more ids", "fewer ids", *DRAFTS[3:])),
        draft_vocab=rarely("all", ("most", "few"), 0.3), head=rarely("none", ("before", "after"), 0.3),
        rule=r.choice(RULES), tree=tree,
        door=rarely("attached", ("by a call",), 0.0 if tree != "none" else 0.35),
        processors=some(PROCESSORS, (0, 0, 0, 1, 1, 2, 3)), sampling=r.random() < 0.25,
        stop=rarely("max_new_tokens", STOPS, 0.5), new_tokens=r.choice((1, 2, 5, 9, 12, 12)),
        length=r.choice((1, 2, 3, 6, 11, 12, 13, 14, 25)), padding=rarely("no mask", PADDINGS, 0.6),
        positions=rarely("none", ("counted", "offset", "jump"), 0.25),
        cache=r.choice(("none", "none", "empty", "full ids", "new ids")), turns=r.choice((1, 2, 2, 3)),
        first_tokens=r.choice((1, 1, 3, 6)), earlier=rarely("ours", ("plain",), 0.3),
        chunk=rarely(0, (1, 3, 5, 100), 0.2), records=rarely((), (("dict",), some(RECORDS, (1, 2, 4))), 0.5),
        streamer=r.random() < 0.3,
        weights=rarely("as they are", ("copies", "scaled", "copied", "merged", "replaced"), 0.08),
    )  # fmt: skip
    return settle(case)


def settle(case: Case) -> Case:
    """The nearest case that asks for nothing contradictory. Does nothing to a case that it returned."""

    def turn(when: bool, **to: Any) -> None:
        nonlocal case
        if when:
            case = replace(case, **to)

    turn(case.weights == "merged" and case.family not in WITH_ADAPTERS, weights="copied")
    turn(case.tree.startswith("dyspec") and case.head == "after", head="before")  # "after" cannot value slots
    turn(case.cache in ("none", "empty"), turns=1)
    turn(case.cache.endswith("ids") and case.turns == 1, turns=2)
    turn(case.turns == 1, first_tokens=3, earlier="ours")
    # Without a mask transformers takes the new tokens for the whole text.
    turn(case.cache == "new ids" and case.padding in ("no mask", *PADDINGS[-3:]), padding="ones")
    turn("attentions" in case.records, attention="eager")
    turn(case.weights != "as they are", dtype="float32")
    turn(True, processors=tuple(n for n in case.processors if n not in _impossible(case)))
    return case


def _impossible(case: Case) -> set[str]:
    """Processors that leave plain generation nothing to do."""
    found = {"begin_suppress"} if {"neighbours", "grammar"} & set(case.processors) else set()
    if {"neighbours", "grammar"} <= set(case.processors):
        found |= {"grammar"}
    if case.sampling:
        found |= {"nan"}  # raises in plain, too
    return found
