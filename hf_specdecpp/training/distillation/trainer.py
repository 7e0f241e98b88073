"""The `Trainer` that knows the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.distillation.data import IGNORED
from hf_specdecpp.training.distillation.state_cache import StateCache
from hf_specdecpp.training.distillation.student import Taught


def _num_ids(drafter: Reader) -> int:
    return drafter.model.get_output_embeddings().weight.shape[0]


class DistillationTrainer(Trainer):
    """A `Trainer` that computes the target's distributions on the fly. The target is no part of the trained model.

    Args:
        target: on the trainer's device; never wrapped, moved, trained or stored.
        fusion_learning_rate: of what mixes the target's states, in the place of `args.learning_rate`.
        cache: of the states that the draft reads, `with_final`.
    """

    model: Taught

    def __init__(
        self,
        *args: Any,
        target: CausalLM,
        fusion_learning_rate: float,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.cache = cache
        self.fusion_learning_rate = fusion_learning_rate
        # Losses of micro-batches and processes are weighted by their answer tokens.
        self.model_accepts_loss_kwargs = True
        vocab = self.model.drafter.draft_vocab
        self.target = Reader(target)
        self.num_ids = _num_ids(self.target)
        # The loss needs the target's logits only where the draft has tokens, too.
        self.teacher = Drafter(target, vocab, shares_target=True)

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
        """Where the answers are, the target's logits there, and its states for a conditioned draft.

        The logits are plain ones, which is to say at temperature 1; `logits` makes them of states.
        """
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
        """The target's final states `[batch, n, hidden_size]`, and all that the draft reads of it."""
        ids, rows = inputs["input_ids"], inputs["row"].tolist()
        if reader is None:
            return self.target.hidden_states(ids), None
        cache = self.cache if min(rows) >= 0 else None
        found: Any = None if cache is None else cache.get(rows, ids.shape[1])
        if found is None:
            with TargetStates(self.target.model, with_final(reader, self.target.hidden_size)) as caught:
                self.target.hidden_states(ids)
                found = caught.take()
            if cache is not None and found is not None:
                cache.put(rows, found)
        found = found.to(ids.device)
        final, read = found.split((self.target.hidden_size, found.shape[-1] - self.target.hidden_size), dim=-1)
        return final, found if reader.reads_final else read


def with_final(reader: StateReader, size: int) -> StateReader:
    """What catches the final state of a target first, which teaching needs, and then what a draft reads."""
    both = StateReader()
    both.hidden_size, both.reads = size, reader.reads
    return both


def summarise(prediction: EvalPrediction, sources: list[str]) -> dict[str, float]:
    """Mean acceptance and top-1 agreement over all positions, and over those of each source.

    Of the first step of a round; those of the i-th are `acceptance_i` and `agreement_i`.
    """
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
