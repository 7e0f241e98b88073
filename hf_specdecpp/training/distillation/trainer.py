"""The `Trainer` that knows the target, and the rollouts that it reads, in batches of similar length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer
from transformers.utils import logging

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation.students import Taught
from hf_specdecpp.training.models import answer_counts

logger = logging.get_logger("hf_specdecpp")

IGNORED = -100  # label of the positions where the target wrote nothing
SORTED_BATCHES = 50  # batches that answers of similar length are grouped within


class DistillationTrainer(Trainer):
    """A `Trainer` that computes the target's distributions on the fly. The target is never wrapped, moved or stored."""

    model: Taught

    def __init__(self, *args: Any, target: CausalLM, fusion_learning_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fusion_learning_rate = fusion_learning_rate
        # Losses of micro-batches and processes are weighted by their answer tokens.
        self.model_accepts_loss_kwargs = True
        self.target = Reader(target)
        self.num_ids = target.get_output_embeddings().weight.shape[0]
        # The loss needs the target's logits only where the draft has tokens, too.
        self.teacher = Drafter(target, self.model.drafter.draft_vocab, shares_target=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The usual one; the fusion is a group of its own."""
        optimizer = super().create_optimizer(*args, **kwargs)
        student = self.accelerator.unwrap_model(self.model)
        fusion = {id(parameter) for parameter in student.fusion.parameters()} if student.fusion is not None else set()
        for group in list(optimizer.param_groups):
            chosen = [parameter for parameter in group["params"] if id(parameter) in fusion]
            if chosen:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in fusion]
                optimizer.add_param_group({**group, "params": chosen, "lr": self.fusion_learning_rate})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002 - the signature that Trainer calls
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        answers, p_logits, states = self._teach(inputs, self.teacher.vocab_logits)
        count = answers.sum() if num_items_in_batch is None else num_items_in_batch
        # DDP averages over the processes, and `count` is over all of them.
        loss = model(inputs["input_ids"], answers, p_logits, states) / count * self.accelerator.num_processes
        if not math.isfinite(value := float(loss.detach())):
            raise ValueError(
                f"The distillation loss is {value} at step {self.state.global_step + 1} of "
                f"{self.state.max_steps}, so training stops; no adapter has been written. Usually the learning rate is "
                f"too high: run again with a lower one than distill.learning_rate={self.args.learning_rate}. If the "
                "first step fails, the models overflow in their dtype."
            )
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: ARG002 - the signature that Trainer calls
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """For each row the sums of acceptance and agreement by step, the number of positions, and the row's source."""
        inputs = self._prepare_inputs(inputs)
        answers, p_logits, states = self._teach(inputs, lambda hidden: self.target.logits(hidden, self.num_ids))
        with torch.no_grad(), self.compute_loss_context_manager():
            values = model(inputs["input_ids"], answers, p_logits, states, measure=True).flatten(1)
        rows = answers.nonzero()[:, 0]
        values = torch.cat((values, values.new_ones((len(values), 1))), dim=-1)
        sums = values.new_zeros((len(answers), values.shape[1])).index_add_(0, rows, values)
        return None, sums, inputs["source"]

    @torch.no_grad()
    def _teach(
        self, inputs: dict[str, Any], logits: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Callable[[Any], Tensor], Tensor | None]:
        """Where the answers are, the target's plain logits there (`logits` makes them of states), and its states."""
        answers = inputs["labels"][:, 1:] != IGNORED
        student = self.accelerator.unwrap_model(self.model)
        if student.fusion is not None:
            answers[:, : student.unroll] = False  # before the first of the text there is no state
        final, states = self._read(inputs, student.fusion)
        hidden = final[:, :-1][answers]

        @torch.no_grad()
        def p_logits(at: slice | Tensor) -> Tensor:
            return logits(hidden[at])

        return answers, p_logits, states

    def _read(self, inputs: dict[str, Any], reader: StateReader | None) -> tuple[Tensor, Tensor | None]:
        """The target's final states `[batch, n, hidden_size]`, which teaching needs, and all that the draft reads."""
        ids, size = inputs["input_ids"], self.target.hidden_size
        if reader is None:
            return self.target.hidden_states(ids), None
        catching = StateReader()  # the final states come first
        catching.hidden_size, catching.reads = size, reader.reads
        with TargetStates(self.target.model, catching) as caught:
            self.target.hidden_states(ids)
            found: Any = caught.take()
        found = found.to(ids.device)
        return found[..., :size], found if reader.reads_final else found[..., size:]


def summarise(prediction: EvalPrediction, sources: list[str]) -> dict[str, float]:
    """Acceptance and top-1 agreement of all positions and by source; of step i as `acceptance_i`, `agreement_i`."""
    sums, source = np.asarray(prediction.predictions, dtype=np.float64), np.asarray(prediction.label_ids)
    groups = {"all": np.full(len(source), True), **{name: source == i for i, name in enumerate(sources)}}
    report: dict[str, float] = {}
    for name, rows in groups.items():
        *totals, count = sums[rows].sum(axis=0)
        if count:
            for step, (accepted, agreed) in enumerate(zip(totals[::2], totals[1::2], strict=True), 1):
                which = "" if step == 1 else f"_{step}"
                report |= {f"{name}/acceptance{which}": accepted / count, f"{name}/agreement{which}": agreed / count}
            report[f"{name}/tokens"] = int(count)
    return report


# Texts ---------------------------------------------------------------------------------------------------------------


def useful(answers: Dataset, limit: int, target: CausalLM, config: TrainingConfig) -> Dataset:
    """The rollouts that have something to learn from within the first `limit` tokens."""
    begins, lengths = np.maximum(answers["prompt_length"], 1), np.minimum(lengths_of(answers), limit)
    kept = np.flatnonzero(begins < lengths)
    if len(kept) < len(answers):
        found = f"{len(answers) - len(kept)} of {len(answers)} rollouts in {config.work} have no answer within the "
        found += f"first {limit} tokens (prompts have {begins.min()} to {begins.max()})"
        if len(kept) == 0:
            raise ValueError(f"{found}, so there is nothing to learn from. Raise distill.max_length.")
        logger.warning(f"{found} and are left out.")
    largest = len(answer_counts(answers, 1)) - 1
    num_ids = target.get_output_embeddings().weight.shape[0]
    if largest >= num_ids:
        raise ValueError(
            f"The rollouts in {config.work} have token id {largest}, and {config.target!r} only {num_ids} ids: another "
            "model wrote them. Choose another work_dir for this target."
        )
    return answers.select(kept)


def lengths_of(answers: Dataset) -> list[int]:
    return [len(ids) for batch in answers.select_columns("input_ids").iter(1000) for ids in batch["input_ids"]]


def answer_tokens(answers: Dataset, limit: int) -> int:
    return int((np.minimum(lengths_of(answers), limit) - np.maximum(answers["prompt_length"], 1)).sum())


def by_length(lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """A random order, by its arguments alone, in which a batch has answers of about one length: little is padding."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(lengths)), []
    for block in np.array_split(order, range(batch_size * SORTED_BATCHES, len(order), batch_size * SORTED_BATCHES)):
        block = block[np.argsort(-np.asarray(lengths)[block], kind="stable")]
        batches += np.array_split(block, range(batch_size, len(block), batch_size))
    # The one batch that may be smaller stays last.
    shuffled = [batches[i] for i in random.permutation(len(batches) - 1)] + batches[-1:]
    return np.concatenate(shuffled).tolist()


def collate(rows: list[dict[str, Any]], max_length: int, sources: list[str]) -> dict[str, Tensor]:
    """Pad on the right; labels are the answers' tokens, where a draft is to predict what the target wrote."""
    ids = [torch.tensor(row["input_ids"][:max_length]) for row in rows]
    labels = [tokens.clone() for tokens in ids]
    for label, row in zip(labels, rows, strict=True):
        label[: max(row["prompt_length"], 1)] = IGNORED
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "source": torch.tensor([sources.index(row["source"]) if row["source"] in sources else -1 for row in rows]),
    }
