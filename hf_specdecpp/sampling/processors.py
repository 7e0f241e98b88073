"""Logits processors on several positions of one sequence, each with its own prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor
from transformers.generation import logits_process, stopping_criteria

# Candidates: token ids on the host, or 0-d or `[k]` tensors of them, which need no upload.
Tokens: TypeAlias = Sequence[int] | Sequence[Tensor] | Tensor

# Processors whose numbers CUDA graphs can read from a tensor, in transformers' order.
WARPERS = (
    logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)  # fmt: skip
FORBIDDEN, MOST_TOP_K = float("-inf"), 1024  # the largest k for which scores are not sorted


class Warpers(LogitsProcessor):
    """Temperature, top-k, top-p and min-p with their numbers in a tensor: a CUDA graph can use other numbers of the
    same `kind`, for each row of a batch, without another capture. The scores equal those of transformers' processors.

    Attributes:
        numbers: `[rows, 4]` float32: temperature, k, 1 - p, min-p; row i for the i-th of `rows` equal parts of scores.
        kind: all that a graph depends on: whether all scores are sorted, for top-p or a large k, and whether there are
            a top-k and a min-p.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        given: dict[str, Any] = {}
        for each in processors:
            given |= vars(each)
        temperature, k, p, min_p = map(given.get, ("temperature", "top_k", "top_p", "min_p"), (1.0, 1 << 24, 2.0, 0.0))
        self.numbers = torch.tensor([[temperature, k, 1 - p, min_p]], dtype=torch.float32, device="cpu")
        has_top_k, sorts = "top_k" in given, "top_p" in given or "top_k" in given and k > MOST_TOP_K
        self.kind = "warpers", sorts, has_top_k, "min_p" in given

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = self.numbers[:, None].expand(-1, len(scores) // len(self.numbers), -1)
        temperature, k, rest, min_p = numbers.reshape(-1, 4).split(1, dim=-1)
        scores, (_, sorts, has_top_k, has_min_p) = scores / temperature, self.kind
        if has_top_k and not sorts:
            first = scores.topk(min(MOST_TOP_K, scores.shape[-1])).values
            least = first.gather(-1, k.clamp_max(first.shape[-1]).long() - 1)
            scores = scores.masked_fill(scores < least, FORBIDDEN)
        if sorts:
            ascending, order = scores.sort(stable=True, dim=-1)
            least = ascending.gather(-1, (scores.shape[-1] - k).clamp_min(0).long())
            removed = ascending.masked_fill(ascending < least, FORBIDDEN).softmax(-1).cumsum(-1) <= rest
            removed[:, -1] = False
            scores = scores.masked_fill((scores < least) | removed.scatter(-1, order, removed), FORBIDDEN)
        if has_min_p:
            probs = scores.softmax(-1)
            most = probs.max(-1, keepdim=True)
            removed = (probs < min_p * most.values).scatter(-1, most.indices, False)
            scores = scores.masked_fill(removed, FORBIDDEN)
        return scores


def _warps(processor: object) -> bool:
    own = getattr(processor, "__dict__", {})
    usual = own.get("min_tokens_to_keep", 1) == 1 and own.get("filter_value", FORBIDDEN) == FORBIDDEN
    return class_of(processor) in WARPERS and usual


# Processors that do not depend on the tokens: all positions can be processed as one batch.
PREFIX_FREE = frozenset(
    {
        Warpers,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.LogitNormalization,
        logits_process.MinPLogitsWarper,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
    }
)
# Those that depend on the set of tokens only, not on number or order: a sequence may be padded with its own tokens.
ASKS_WHICH = frozenset({logits_process.RepetitionPenaltyLogitsProcessor})
# Those that leave at least one allowed token if there was one. Of `PREFIX_FREE` only the subtracted class may not.
KEEPS_SOME = (PREFIX_FREE | ASKS_WHICH) - {logits_process.SuppressTokensLogitsProcessor}
# All processors and criteria of transformers that depend on their arguments only and accept any sequence. Others call a
# function or a model, or remember earlier calls, as classes of new releases may.
KNOWN = PREFIX_FREE | ASKS_WHICH | {
    logits_process.AlternatingCodebooksLogitsProcessor, logits_process.BarkEosPrioritizerLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor, logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty, logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor, logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor, logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor, logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor, logits_process.TopHLogitsWarper,
    logits_process.WatermarkLogitsProcessor, logits_process.WhisperTimeStampLogitsProcessor,
    stopping_criteria.EosTokenCriteria, stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria, stopping_criteria.StopStringCriteria,
}  # fmt: skip

OWNERS = {"transformers", __name__.partition(".")[0]}


def name_of(processor: object) -> str:
    """Module and class name of a processor or criterion: several libraries have a `LogitsProcessor`."""
    return f"{type(processor).__module__}.{type(processor).__name__}"


def class_of(each: object) -> type | None:
    """The class of a processor or criterion if calls run code of transformers or this package, else `None`."""
    known = getattr(type(each).__call__, "__globals__", {})  # names are unreliable: `functools.wraps` copies them
    return type(each) if known.get("__name__", "").partition(".")[0] in OWNERS else None


def reads_prefix_only(processor: Any) -> bool:
    """Whether a processor or a criterion depends on its arguments only.

    True for the `KNOWN` ones, and for others with an attribute `reads_prefix_only = True`, also of a
    `prefix_allowed_tokens_fn`. All others may count their calls, follow a grammar token by token, as those of xgrammar
    and outlines do, or note which rows have ended, as lm-eval's criterion does."""
    if class_of(processor) in KNOWN or getattr(processor, "reads_prefix_only", False):
        return True
    is_constraint = class_of(processor) is PrefixConstrainedLogitsProcessor
    return is_constraint and getattr(processor._prefix_allowed_tokens_fn, "reads_prefix_only", False)


def remembers(processor: object) -> bool:
    """Whether a processor or a criterion may remember earlier calls. Not so for any `prefix_allowed_tokens_fn`, which
    gets the row's number and sequence."""
    return not reads_prefix_only(processor) and class_of(processor) is not PrefixConstrainedLogitsProcessor


class InOrder(LogitsProcessor):
    """A processor that is called exactly as plain `generate()` would call it, whatever its `reads_prefix_only`."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processor(input_ids, scores)


def in_order(processors: Sequence[LogitsProcessor], criteria: Sequence[Any] = ()) -> list[LogitsProcessor]:
    """Return the processors, those not `KNOWN` wrapped in `InOrder`. All are wrapped if a criterion does not read the
    prefix only, since it could change a processor's penalty from token to token."""
    asked = KNOWN if all(map(reads_prefix_only, criteria)) else frozenset()
    return [each if class_of(each) in asked else InOrder(each) for each in processors]


class OfRow(LogitsProcessor):
    """A `KNOWN` processor of a batch, called for the sequence of one row.

    Some have a number for each row, such as where the padding of `repetition_penalty` ends. So the sequence is repeated
    in every row, and only this row of the result is used."""

    reads_prefix_only = True

    def __init__(self, processor: LogitsProcessor, row: int, rows: int) -> None:
        self.processor, self.row, self.rows = processor, row, rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = self.processor(input_ids.repeat(self.rows, 1), scores.repeat(self.rows, 1))
        return answer[self.row : self.row + 1]


def for_row(processors: Sequence[LogitsProcessor], row: int, rows: int) -> list[LogitsProcessor]:
    """A batch's processors for one row: wrapped in `OfRow` if they read tokens, in `InOrder` if not `KNOWN`."""
    as_they_are = (*PREFIX_FREE, InOrder)
    return [each if isinstance(each, as_they_are) else OfRow(each, row, rows) for each in in_order(processors)]


def _of_all_rows(processor: Any) -> Any:
    """The batch's own processor, without `OfRow`."""
    return processor.processor if isinstance(processor, OfRow) else processor


def _ignored(processor: Any) -> Any:
    """Number of the row's first tokens that a penalty ignores, as an `int` or 0-d tensor; `None` for other processors
    and penalties that ignore none."""
    processor, row = (processor.processor, processor.row) if isinstance(processor, OfRow) else (processor, 0)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if class_of(processor) not in ASKS_WHICH or not isinstance(ignored, int | Tensor):
        return None
    return ignored[row] if isinstance(ignored, Tensor) else ignored


class Processing:
    """The logits processors of one generation.

    Attributes:
        does_nothing: whether scores stay unchanged.
        prefix_free: whether no processor depends on the tokens.
        fits_graphs: whether CUDA graphs can run all: at most one depends on the tokens, and only on their set.
        may_forbid_all: whether one may forbid every token that a draft with a vocabulary of its own can propose.
        in_order: processors that must be called exactly once for each emitted token, in order.
        answers_all: whether all accept any sequence. Others, such as a function that follows a trie, may fail for a
            sequence that they forbid or that has ended: they are called for the sequence and accepted candidates only.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.processors = list(processors)
        self.does_nothing = not self.processors
        self.in_order = [processor for processor in self.processors if not reads_prefix_only(processor)]
        self.prefix_free = all(class_of(processor) in PREFIX_FREE for processor in self.processors)
        looks = [processor for processor in self.processors if class_of(processor) not in PREFIX_FREE]
        self.may_forbid_all = any(class_of(processor) not in KEEPS_SOME for processor in self.processors)
        self.fits_graphs = not self.may_forbid_all and len(looks) <= 1
        self.answers_all = all(class_of(_of_all_rows(each)) in KNOWN for each in self.processors)

    def for_graphs(self) -> Processing:
        """Return those of the processors that CUDA graphs can run. Penalties must ignore no tokens (see `together`)."""
        return Processing([each for each in self.processors if class_of(each) in KEEPS_SOME])

    def with_contents(self) -> Processing:
        """Return these processors, with a `Warpers` (numbers in a tensor) for each run of consecutive `WARPERS`."""
        found: list[Any] = []
        runs: list[Any] = []
        for each in self.processors:
            if not _warps(each):
                found.append(each)
            elif runs and found[-1] is runs and WARPERS.index(type(runs[-1])) < WARPERS.index(type(each)):
                runs.append(each)
            else:
                found.append(runs := [each])
        return Processing([Warpers(each) if isinstance(each, list) else each for each in found])

    def for_draft(self) -> Processing:
        """Return the processors that drafts may call: with `reads_prefix_only`, or of `KNOWN` classes in `InOrder`."""
        inner = [each.processor if isinstance(each, InOrder) else each for each in self.processors]
        pairs = zip(self.processors, inner, strict=True)
        return Processing([own for each, own in pairs if class_of(own) in KNOWN or reads_prefix_only(each)])

    def cooled(self, temperature: float) -> Processing:
        """Return these processors after a division of the scores by `temperature`."""
        return Processing([logits_process.TemperatureLogitsWarper(temperature), *self.processors])

    def together(self) -> Processing:
        """Return processors for all rows of a batch at once. They ignore no tokens, so pass the tokens of `shown`."""
        processors = [(_of_all_rows(each), _ignored(each)) for each in self.processors]
        return Processing([each if left is None else type(each)(each.penalty) for each, left in processors])

    def can_show(self, length: int) -> bool:
        """Whether `shown` works for a sequence of this length: no penalty may ignore its last token."""
        return all(int(ignored) < length for ignored in map(_ignored, self.processors) if ignored is not None)

    def shown(self, text: Tensor) -> Tensor:
        """Return the sequence `[1, length]`, in which its last token replaces tokens that a penalty ignores, so that
        the penalty need not ignore any: `[[0, 0, 5, 6]]` with two ignored tokens becomes `[[6, 6, 5, 6]]`."""
        places = torch.arange(text.shape[1], device=text.device)
        for ignored in map(_ignored, self.processors):
            if ignored is not None:
                text = torch.where(places < int(ignored), text[:, -1:], text)
        return text

    def one(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        """Process scores `[vocab]` for the token after `input_ids` `[1, length]` and `candidates`."""
        prefix = input_ids if self.prefix_free or not len(candidates) else extend(input_ids, candidates)
        return self._apply(prefix, scores[None])[0]

    def of_nodes(self, scores: Tensor, texts: Tensor | None) -> Tensor:
        """Process scores `[rows, n, vocab]` without reads by the host. `texts`: `[rows, n, length]`, the tokens before
        each position; `None` if no processor depends on them."""
        rows = scores.flatten(0, 1)
        before = rows.new_zeros((len(rows), 1), dtype=torch.long) if texts is None else texts.flatten(0, 1)
        return self._apply(before, rows).view_as(scores)

    def after_each(self, input_ids: Tensor, paths: Sequence[list[int]], scores: Tensor) -> Tensor:
        """Process scores `[n, vocab]`; row i follows `input_ids` `[1, length]` and the candidates `paths[i]`."""
        if self.prefix_free:
            return self._apply(input_ids, scores)
        lengths = [len(path) for path in paths]
        together = torch.tensor([token for path in paths for token in path], dtype=torch.long)
        tokens = (together.to(input_ids) if len(together) else together).split(lengths)  # one upload for all
        prefixes = [extend(input_ids, path) if len(path) else input_ids for path in tokens]
        return torch.cat([self._apply(text, row[None]) for text, row in zip(prefixes, scores, strict=True)])

    def _apply(self, prefix: Tensor, scores: Tensor) -> Tensor:
        for processor in self.processors:
            scores = processor(prefix, scores)
        return scores


def extend(input_ids: Tensor, candidates: Tokens) -> Tensor:
    """Return `input_ids` `[1, length]` followed by k candidates, `[1, length + k]`."""
    if not isinstance(candidates, Tensor) and len(candidates) and isinstance(candidates[0], Tensor):
        candidates = torch.stack(list(candidates))  # type: ignore[arg-type]  # all are
    return torch.cat((input_ids, torch.as_tensor(candidates).to(input_ids)[None]), dim=1)
