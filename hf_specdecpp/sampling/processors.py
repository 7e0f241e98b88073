"""Logits processors on several positions of one sequence: each position sees its own prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor
from transformers.generation import logits_process, stopping_criteria

# Candidates: token ids on the host, or 0-d or `[k]` tensors of them, which need no upload.
Tokens: TypeAlias = Sequence[int] | Sequence[Tensor] | Tensor

# Never look at the tokens: all positions can go through them as one batch.
PREFIX_FREE = frozenset(
    {
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
# Ask which tokens there were, and not how often or in which order: further ones of the text may follow it.
ASKS_WHICH = frozenset({logits_process.RepetitionPenaltyLogitsProcessor})
# Leave at least one token that was allowed before, and of `PREFIX_FREE` only this one does not.
KEEPS_SOME = (PREFIX_FREE | ASKS_WHICH) - {logits_process.SuppressTokensLogitsProcessor}
# All processors and criteria of transformers that depend on their arguments alone and have an answer to any text.
# Others call a function or a model, or remember earlier calls; what a new release adds may do so, too.
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
    """A processor's or a criterion's class, with its module: several libraries have a `LogitsProcessor`."""
    return f"{type(processor).__module__}.{type(processor).__name__}"


def class_of(each: object) -> type | None:
    """The class of a processor or a criterion of transformers; `None` where another's code is called."""
    known = getattr(type(each).__call__, "__globals__", {})  # names do not tell: `functools.wraps` copies them
    return type(each) if known.get("__name__", "").partition(".")[0] in OWNERS else None


def reads_prefix_only(processor: Any) -> bool:
    """Whether a processor or a criterion depends on its arguments alone.

    True of those `KNOWN`, and of others with an attribute `reads_prefix_only = True`, or whose
    `prefix_allowed_tokens_fn` has it. All others may count their calls or follow a grammar token by token, as those of
    xgrammar and outlines do, or note which rows have ended, as lm-eval's criterion does.
    """
    if class_of(processor) in KNOWN or getattr(processor, "reads_prefix_only", False):
        return True
    is_constraint = class_of(processor) is PrefixConstrainedLogitsProcessor
    return is_constraint and getattr(processor._prefix_allowed_tokens_fn, "reads_prefix_only", False)


def remembers(processor: object) -> bool:
    """Whether a processor or a criterion may remember what it was asked, a `prefix_allowed_tokens_fn` left out: of a
    batch that is told the row's number and text, and nothing that only a row that has ended would know."""
    return not reads_prefix_only(processor) and class_of(processor) is not PrefixConstrainedLogitsProcessor


class InOrder(LogitsProcessor):
    """A processor that is asked what plain `generate()` would ask, in that order, whatever it says of itself."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processor(input_ids, scores)


def in_order(processors: Sequence[LogitsProcessor], criteria: Sequence[Any] = ()) -> list[LogitsProcessor]:
    """The same, of which only those `KNOWN` are asked about candidates; and none beside criteria that may do more than
    read the text, such as change a processor's penalty from token to token."""
    asked = KNOWN if all(map(reads_prefix_only, criteria)) else frozenset()
    return [each if class_of(each) in asked else InOrder(each) for each in processors]


class OfRow(LogitsProcessor):
    """A processor of a batch, of those `KNOWN`, asked about one of its sequences.

    Some have a number for each row, such as where the padding of `repetition_penalty` ends. So it gets the sequence in
    every row, and its own row of the answer counts.
    """

    reads_prefix_only = True

    def __init__(self, processor: LogitsProcessor, row: int, rows: int) -> None:
        self.processor, self.row, self.rows = processor, row, rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = self.processor(input_ids.repeat(self.rows, 1), scores.repeat(self.rows, 1))
        return answer[self.row : self.row + 1]


def for_row(processors: Sequence[LogitsProcessor], row: int, rows: int) -> list[LogitsProcessor]:
    """The processors of a batch for one of its sequences; those that are not `KNOWN` are asked about all at once."""
    as_they_are = (*PREFIX_FREE, InOrder)
    return [each if isinstance(each, as_they_are) else OfRow(each, row, rows) for each in in_order(processors)]


def _of_all_rows(processor: Any) -> Any:
    """What `for_row` was given."""
    return processor.processor if isinstance(processor, OfRow) else processor


def _ignored(processor: Any) -> Any:
    """How many of its first tokens a penalty leaves out of a text: a number, or `[texts]`, as `generate()` says where
    prompts are padded. `None`: it leaves out none."""
    processor, row = (processor.processor, processor.row) if isinstance(processor, OfRow) else (processor, 0)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if class_of(processor) not in ASKS_WHICH or not isinstance(ignored, int | Tensor):
        return None
    return ignored[row] if isinstance(ignored, Tensor) else ignored


class Processing:
    """The logits processors of one generation.

    Attributes:
        does_nothing: whether scores stay as they are.
        prefix_free: whether none looks at the tokens.
        fits_graphs: whether graphs can run all: at most one looks at the tokens, and asks only which there were.
        may_forbid_all: whether one may forbid every token that a draft with a vocabulary of its own can propose.
        in_order: those that must be called once for each emitted token, in the order of the text, and never otherwise.
        answers_all: whether all have an answer to any text. Others may know none to one that they forbid, or that has
            ended, such as a function that follows a trie: they are asked about the text and what was accepted alone.
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
        """Those of them that `fits_graphs`."""
        found = Processing([each for each in self.processors if class_of(each) in KEEPS_SOME])
        if found.fits_graphs:
            return found
        return Processing([each for each in found.processors if class_of(each) in PREFIX_FREE])

    def for_draft(self) -> Processing:
        """Without the processors that must not see candidates: the draft guesses without them. Those `KNOWN` may."""
        inner = [each.processor if isinstance(each, InOrder) else each for each in self.processors]
        pairs = zip(self.processors, inner, strict=True)
        return Processing([own for each, own in pairs if class_of(own) in KNOWN or reads_prefix_only(each)])

    def cooled(self, temperature: float) -> Processing:
        """With a temperature before all others."""
        return Processing([logits_process.TemperatureLogitsWarper(temperature), *self.processors])

    def together(self) -> Processing:
        """For all texts of a call at once, as `shown` leaves them: with nothing of one call, so that it fits others."""
        processors = [(_of_all_rows(each), _ignored(each)) for each in self.processors]
        return Processing([each if left is None else type(each)(each.penalty) for each, left in processors])

    def can_show(self, length: int) -> bool:
        """Whether a text of so many tokens can be `shown`: no penalty leaves out its last token, or what follows."""
        return all(int(ignored) < length for ignored in map(_ignored, self.processors) if ignored is not None)

    def shown(self, text: Tensor) -> Tensor:
        """A text `[1, length]` of these processors, with its last token in the place of the tokens that a penalty
        leaves out: `[[0, 0, 5, 6]]` with two tokens of padding is `[[6, 6, 5, 6]]`."""
        places = torch.arange(text.shape[1], device=text.device)
        for ignored in map(_ignored, self.processors):
            if ignored is not None:
                text = torch.where(places < int(ignored), text[:, -1:], text)
        return text

    def one(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        """Process `scores` (`[vocab]`) of the position after `input_ids` (`[1, length]`) and `candidates`."""
        if not self.processors:
            return scores
        prefix = input_ids if self.prefix_free or not len(candidates) else extend(input_ids, candidates)
        return self._apply(prefix, scores[None])[0]

    def of_nodes(self, scores: Tensor, texts: Tensor | None) -> Tensor:
        """Process `scores` `[texts, n, vocab]`, without a number of the host. `texts`: `[texts, n, length]`, the tokens
        before each; `None` where no processor looks at them."""
        rows = scores.flatten(0, 1)
        before = rows.new_zeros((len(rows), 1), dtype=torch.long) if texts is None else texts.flatten(0, 1)
        return self._apply(before, rows).view_as(scores)

    def forbids_all(self, scores: Tensor) -> bool:
        """Whether processed `scores` (`[vocab]`) leave no token. Waits for the device only where that may happen."""
        return self.may_forbid_all and not bool(scores.amax() > float("-inf"))

    def along(self, input_ids: Tensor, candidates: Tokens, scores: Tensor) -> Tensor:
        """Process `scores` (`[k + 1, vocab]`): row i follows `input_ids` (`[1, length]`) and i of the k candidates."""
        if not self.processors:
            return scores
        if self.prefix_free:
            return self._apply(input_ids, scores)
        tokens = extend(input_ids, candidates)
        length = input_ids.shape[1]
        rows = [self._apply(tokens[:, : length + i], scores[i : i + 1]) for i in range(len(candidates) + 1)]
        return torch.cat(rows)

    def after_each(self, input_ids: Tensor, paths: Sequence[list[int]], scores: Tensor) -> Tensor:
        """Process `scores` (`[n, vocab]`): row i follows `input_ids` (`[1, length]`) and the candidates `paths[i]`."""
        if not self.processors:
            return scores
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
    """`input_ids` `[1, length]` and k candidates after them, `[1, length + k]`."""
    if not isinstance(candidates, Tensor) and len(candidates) and isinstance(candidates[0], Tensor):
        candidates = torch.stack(list(candidates))  # type: ignore[arg-type]  # all are
    return torch.cat((input_ids, torch.as_tensor(candidates).to(input_ids)[None]), dim=1)
