"""What a draft learns between texts (`Learner`): steps of distillation on kept texts, kept only where they help."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.learning.kept import KeptText, KeptTexts, logits_of
from hf_specdecpp.learning.taught import Taught

STEP = 256  # tokens that a step learns from, about
LONGEST = 512  # tokens of a piece of a text, whose states and attention are in memory at once
WARM_UP = 20  # steps in which the rates rise: the first moments of an optimiser are of few texts
SHARE = 0.75  # of the way from the published weights: the last quarter gains little and costs what a draft knew before
TIMES = 8  # that a text is learned from: more gains hardly anything and costs what a draft knew before
MEASURED = 2048  # tokens of the latest held-out texts that a gain is measured on, about


@dataclass(frozen=True)
class Lesson:
    """What `learn` did. Its string is a sentence.

    Attributes:
        steps: of the optimiser.
        seconds: that they took.
        tokens, texts: that they learned from.
        measured: tokens of texts held out, on which the gain was measured.
        before, after: how likely the target accepts the first candidate of a round there, at temperature 1, on average.
        is_kept: whether the update is kept, because it helped.
    """

    steps: int
    seconds: float
    tokens: int
    texts: int
    measured: int
    before: float
    after: float
    is_kept: bool

    def __str__(self) -> str:
        if not self.steps:
            return f"Each of the kept texts was learned from {TIMES} times before, so the draft stays as it was."
        learned = f"{self.steps} steps on {self.texts} texts of {self.tokens:,} tokens took {self.seconds:.1f} s"
        gained = f"a first candidate is accepted with probability {self.after:.3f}, before it was {self.before:.3f}"
        end = "." if self.is_kept else ", so the draft stays as it was."
        return f"{learned}. On {self.measured:,} tokens that were held out {gained}{end}"


class Learner:
    """Teaches a draft from call to call; the optimiser's state goes on.

    The step is that of the stage `distill` (`Taught.forward`): the target's distributions and states come from kept
    texts in the place of a pass.

    Args:
        student: the draft, of which `requires_grad` says what may change.
        rate: of AdamW, reached after `WARM_UP` steps.
        reader_rate: of what makes the inputs of a draft that reads states, likewise.
        dtype: of the draft in use; training is in mixed precision where that is not float32.

    Attributes:
        seen: tokens of each text learned from so far, by its number.
        drawn: pieces of each text that steps were taken on, by its number.
        steps: taken so far, without those that were taken back.
    """

    def __init__(self, student: Taught, rate: float, reader_rate: float, dtype: torch.dtype) -> None:
        self.student, self.dtype = student, dtype
        own = set() if student.fusion is None else {id(each) for each in student.fusion.parameters()}
        trained = [each for each in student.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in trained if (id(each) in own) == is_own], "lr": lr, "highest": lr}
            for is_own, lr in ((False, rate), (True, reader_rate))
        ]
        self.trained, self.steps = trained, 0
        self._published = [each.detach().clone() for each in trained]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
        self.seen: dict[int, int] = {}
        self.drawn: Counter[int] = Counter()
        self._random = torch.Generator().manual_seed(0)  # a generation's numbers are no business of ours

    def learn(self, kept: KeptTexts, seconds: float | None, steps: int | None) -> Lesson:
        """Take steps, and take them back unless they helped.

        Args:
            seconds, steps: to stop after, one of them; at least one step is taken, and none once each text was learned
                from `TIMES` times.

        Raises:
            ValueError: there are too few texts, all of which would be learned from or none.
        """
        train = [text for text in kept.texts if not text.is_held_out]
        heldout = latest([text for text in kept.texts if text.is_held_out], MEASURED)
        if not train or not heldout:
            raise ValueError(
                f"{len(kept.texts)} texts are kept, of which {len(train)} are to learn from and {len(heldout)} to "
                "measure what was gained, and one of each is the least. Set SpeculationConfig(keep_texts=50000) and "
                "generate some answers with the attached target before."
            )
        before = self.acceptance(heldout)[0]
        weights = [each.detach().clone() for each in self.trained]
        state, begin, count = copy.deepcopy(self.optimizer.state_dict()), time.perf_counter(), 0
        met: set[int] = set()
        for batch in self._batches(train):
            met |= {text.number for text in batch}
            is_finite = self._step(batch)
            count += 1
            if not is_finite or count == steps or (seconds and time.perf_counter() - begin >= seconds):
                break
        spent = time.perf_counter() - begin
        after = self.acceptance(heldout)[0] if count else before
        learned = {text.number: len(text) for text in train if text.number in met}
        is_kept = after > before
        if is_kept:
            self.seen |= learned
        else:
            self._set(weights)
            self.optimizer.load_state_dict(state)
            self.steps -= count
        tokens, measured = sum(learned.values()), sum(map(len, heldout))
        return Lesson(count, spent, tokens, len(learned), measured, before, after, is_kept)

    @contextmanager
    def drafting(self) -> Iterator[Taught]:
        """The draft to draft with, which is `SHARE` of the way from the published weights to the learned ones.

        Averages of weights before and after fine-tuning keep what was known before (WiSE-FT, arXiv 2109.01903).
        """
        learned = [each.detach().clone() for each in self.trained]
        try:
            self._set([torch.lerp(*both, SHARE) for both in zip(self._published, learned, strict=True)])
            yield self.student
        finally:
            self._set(learned)

    @torch.no_grad()
    def acceptance(self, texts: Sequence[KeptText]) -> list[float]:
        """The chance that the first, second, ... candidate of a round is accepted if those before it are, on average
        over the answers of texts."""
        found = []
        with self.drafting() as student:
            for piece in pieces(texts):
                inputs = self._teaching([piece], whole=True)
                with self._precision():
                    found.append(student(*inputs, measure=True)[..., 0].float().cpu())
        mean: list[float] = torch.cat(found).mean(0).tolist()
        return mean

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.trained, weights, strict=True):
            parameter.copy_(weight)

    def _batches(self, texts: Sequence[KeptText]) -> Iterator[list[KeptText]]:
        """Pieces of about `STEP` tokens, in a new random order each time that all were there, of each text `TIMES`
        times."""
        parts, batch = list(pieces(texts)), []
        of_text = Counter(part.number for part in parts)
        while parts := [part for part in parts if self.drawn[part.number] < TIMES * of_text[part.number]]:
            for place in torch.randperm(len(parts), generator=self._random).tolist():
                batch.append(parts[place])
                self.drawn[parts[place].number] += 1
                if sum(map(len, batch)) >= STEP:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _step(self, batch: Sequence[KeptText]) -> bool:
        """One step of the optimiser; whether its loss was a number."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = self._teaching(batch)
            with self._precision():
                loss = self.student(*inputs) / inputs[1].sum().clamp_min(1)
            self.optimizer.zero_grad()
            loss.backward(inputs=self.trained)  # a target's parameters may ask for gradients, too
            nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = group["highest"] * min(self.steps / WARM_UP, 1.0)
            self.optimizer.step()
        return math.isfinite(float(loss.detach()))

    def _precision(self) -> AbstractContextManager[Any]:
        """As the stage trains: float32 weights, products in half precision where the draft computes so."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(self.student.drafter.device.type, torch.bfloat16, enabled=half)

    def _teaching(self, batch: Sequence[KeptText], whole: bool = False) -> tuple[Any, ...]:
        """The arguments of `Taught.forward` for texts.

        Args:
            whole: whether the target's logits shall be those of all tokens, not of the draft's only.
        """
        student, drafter = self.student, self.student.drafter
        device, pad = drafter.device, nn.utils.rnn.pad_sequence
        ids = pad([text.tokens.long() for text in batch], batch_first=True)
        answers = torch.zeros(len(batch), ids.shape[1] - 1, dtype=torch.bool)
        for row, text in enumerate(batch):
            answers[row, text.begin - 1 : text.begin - 1 + len(text.likely)] = True
        known = answers.clone()
        states = None
        if student.fusion is not None:
            answers[:, : student.unroll] = False  # before the first of the text there is no state
            states = pad([text.states.read() for text in batch if text.states is not None], batch_first=True)
            states = nn.functional.pad(states, (0, 0, 0, 1)).to(device)  # nothing reads that of the last token
        own = answers[known]
        likely = torch.cat([text.likely for text in batch])[own].to(device)
        probs = torch.cat([text.probs for text in batch])[own].to(device)
        num_ids, vocab = batch[0].num_ids, drafter.draft_vocab

        def p_logits(at: slice | Tensor) -> Tensor:
            found = logits_of(likely[at], probs[at], num_ids)
            return found if whole or vocab is None else found[:, vocab]

        return ids.to(device), answers.to(device), p_logits, states


def pieces(texts: Sequence[KeptText]) -> Iterator[KeptText]:
    """Texts of at most `LONGEST` tokens that have something to learn from."""
    for text in texts:
        for first in range(0, len(text), LONGEST):
            piece = text.piece(first, min(first + LONGEST, len(text)))
            if len(piece.likely):
                yield piece


def latest(texts: Sequence[KeptText], most: int) -> list[KeptText]:
    """The last texts of about so many tokens, at least one if there are any."""
    found: list[KeptText] = []
    for text in reversed(texts):
        if found and sum(map(len, found)) + len(text) > most:
            break
        found.append(text)
    return found
