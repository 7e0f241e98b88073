"""What a case passes to `generate()`: prompts, masks, positions, processors and ends."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from support.fuzz.cases import Case
from support.targets.models import VOCAB_SIZE
from support.targets.outputs import NoRepeat, only_neighbours
from support.targets.watchers import Collector, tokenizer

PAD = 0


class Counting(LogitsProcessor):
    """Favours another token at each call, as a grammar would that follows the text by its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 5 * self.calls % VOCAB_SIZE] += 3.0
        return scores


class NewTensor(LogitsProcessor):
    """Favours the tokens after the last one, in a tensor of its own."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids[:, -1:] + torch.arange(1, 4)) % VOCAB_SIZE
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 2.0))


class WholePrefix(LogitsProcessor):
    """Depends on every token so far, the number of them included."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        weights = torch.arange(1, input_ids.shape[1] + 1)
        favoured, scores = int((input_ids[0] * weights).sum()) % VOCAB_SIZE, scores.clone()
        scores[:, favoured] += 4.0
        return scores


class Nan(LogitsProcessor):
    """What `remove_invalid_values` is for: a value that is not a number, after each even token."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if int(input_ids[0, -1]) % 2:
            return scores
        scores = scores.clone()
        scores[:, 7] = float("nan")
        return scores


class Criterion(StoppingCriteria):
    """A user's criterion: the text ends after any of these tokens, once it has an even length."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids[:, -1] % 6 == 1) & (input_ids.shape[1] % 2 == 0)


def grammar(_: int, input_ids: Tensor) -> list[int]:
    """Each third token must be one that a restricted draft cannot propose."""
    return list(range(3, VOCAB_SIZE, 4)) if input_ids.shape[0] % 3 == 0 else list(range(VOCAB_SIZE))


EOS = {"eos_token_id": [2, 11, 17, 29, 35, 41], "pad_token_id": PAD}
ALLOWED = {"neighbours": only_neighbours, "grammar": grammar}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[3], [5, 7], [11, 12, 13]]},
    "sequence_bias": {"sequence_bias": {(4,): 3.0, (8, 9): -5.0}},
    "min_new_tokens": {"min_new_tokens": 5, **EOS},
    "forced_eos": {"forced_eos_token_id": 7},
    "suppress": {"suppress_tokens": [1, 2, 3, 20, 30]},
    "begin_suppress": {"begin_suppress_tokens": list(range(40))},
    "remove_invalid": {"remove_invalid_values": True},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "renormalize": {"renormalize_logits": True},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.3), **EOS},
    "nan": {"remove_invalid_values": True},
}
OWN_PROCESSORS: dict[str, Any] = {
    "in place": NoRepeat, "counting": Counting, "new tensor": NewTensor, "whole prefix": WholePrefix, "nan": Nan,
}  # fmt: skip
STOPS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": [2, 11, 17], "pad_token_id": PAD},
    "many eos": {"eos_token_id": list(range(1, VOCAB_SIZE, 4)), "pad_token_id": PAD},
    "stop strings": {"stop_strings": ["b", "q", "zA", "mn", "K"]},
    "max_time": {"max_time": 1000.0},
    "min_length": {"min_length": 10, **EOS},
}


def random_ids(seed: int, length: int) -> Tensor:
    """`[1, length]` token ids, none of them `PAD`."""
    return torch.randint(1, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def first_prompt(case: Case) -> tuple[Tensor, Tensor | None]:
    """Ids `[1, n]` and mask `[1, n]` of the first turn. Padding is added to the `case.length` tokens."""
    ids = random_ids(case.seed, case.length)
    mask, pads = torch.ones_like(ids), torch.full((1, 1 + case.seed % 4), PAD)
    if case.padding == "no mask":
        return ids, None
    if case.padding == "ones":
        return ids, mask
    if case.padding in ("left", "pads at the start"):
        ids, mask = torch.cat((pads, ids), dim=1), torch.cat((0 * pads, mask), dim=1)
    elif case.padding in ("right", "pads at the end"):
        ids, mask = torch.cat((ids, pads), dim=1), torch.cat((mask, 0 * pads), dim=1)
    else:
        at = case.seed % case.length
        ids, mask = (torch.cat((x[:, :at], y, x[:, at:]), dim=1) for x, y in ((ids, pads), (mask, 0 * pads)))
    return ids, None if case.padding.startswith("pads") else mask


def positions_of(case: Case, ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """`position_ids` for the whole text, as users compute them."""
    if case.positions == "none":
        return None
    counted = (torch.ones_like(ids) if mask is None else mask).cumsum(dim=-1).sub(1).clamp_min(0)
    if case.positions == "counted":
        return counted
    if case.positions == "offset":
        return counted + 7
    return counted + 5 * (torch.arange(ids.shape[1]) >= ids.shape[1] // 2)


def arguments(case: Case, turn: int, length: int) -> dict[str, Any]:
    """All arguments of a turn's `generate()` but ids, mask, positions, cache and assistant. New objects every time.

    `length`: tokens of the prompt, as the criteria will count them."""
    new_tokens = case.new_tokens if turn == case.turns - 1 else case.first_tokens
    found: dict[str, Any] = {"do_sample": case.sampling, "pad_token_id": PAD}
    if case.sampling:
        found |= {"top_k": 1, "temperature": 0.7, "top_p": 0.9}
    processors: list[LogitsProcessor] = []
    criteria: list[StoppingCriteria] = []
    for name in case.processors:
        found |= PROCESSORS.get(name, {})
        if name in ALLOWED:
            found["prefix_allowed_tokens_fn"] = ALLOWED[name]
        if name in OWN_PROCESSORS:
            processors.append(OWN_PROCESSORS[name]())
    found |= STOPS.get(case.stop, {})
    found |= {"max_length": length + new_tokens} if case.stop == "max_length" else {"max_new_tokens": new_tokens}
    if case.stop == "stop strings":
        found["tokenizer"] = tokenizer()
    if case.stop == "criterion":
        criteria.append(Criterion())
    if case.streamer:
        found["streamer"] = Collector()
    if case.chunk:
        found["prefill_chunk_size"] = case.chunk
    if case.records:
        found["return_dict_in_generate"] = True
        found |= {f"output_{name}": True for name in case.records if name != "dict"}
    lists = {"logits_processor": LogitsProcessorList(processors), "stopping_criteria": StoppingCriteriaList(criteria)}
    return found | lists
