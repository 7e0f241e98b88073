"""A draft in distillation (`DistilledDraft`), and the `Trainer` that minimises its distance from the target."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import FINAL, StateReader, TargetStates
from hf_specdecpp.training.configuration import DistillConfig
from hf_specdecpp.training.distillation.unrolling import unrolled

FROZEN = ("lm_head.", "embed_tokens.", "decoder.embed_tokens.")  # parameters of own layers that are not trained
CHUNK = 256  # positions whose logits are in memory at the same time: 156 MB in float32 for 152k tokens
IGNORED = -100  # label of tokens that are not in an answer
SORTED_BATCHES = 50  # number of batches within which answers are sorted by length


# The draft ------------------------------------------------------------------------------------------------------------


class DistilledDraft(nn.Module):
    """A draft in training. `forward` contains all uses of its weights, since DDP and FSDP wrap the outermost module.

    Attributes:
        drafter: the draft as it is used in generation. It is not a submodule, because its model is one already.
        settings: those of the stage, of which a draft reads `unroll` and `loss`.
    """

    drafter: Any
    settings: DistillConfig

    @property
    def fusion(self) -> StateReader | None:
        """The module that makes the draft's input from the target's states; `None` if the draft reads only tokens."""
        return self.drafter.reads

    def forward(
        self,
        input_ids: Tensor,
        answers: Tensor,
        p_logits: Callable[[Any], Tensor],
        states: Tensor | None = None,
        measure: bool = False,
    ) -> Tensor:
        """Return the loss of the draft, or with `measure` its acceptance, at the positions of answers.

        Args:
            input_ids: `[batch, n]`, padded on the right.
            answers: bool `[batch, n - 1]`: whether the next token belongs to an answer.
            p_logits: function from a slice of these positions to the target's logits `[positions, vocab]` there, where
                vocab are the draft's tokens for the loss, and all tokens with `measure`.
            states: the target's states `[batch, n, width]`, for a draft that reads them.

        Returns:
            The loss, 0-d: the distance of q from p, summed over positions and averaged over steps. With `measure`,
            `[positions, steps, 2]`: the probability that a candidate is accepted, and whether draft and target have the
            same likeliest token. A draft that reads only tokens has one step.
        """
        rounds = [] if states is None else unrolled(self.drafter, input_ids, states, self.settings.unroll)
        steps = list(rounds) or [self.drafter.hidden_states(input_ids)]
        # The inputs of the draft's LM head, `[positions, steps, hidden_size]`.
        hidden = torch.stack([self.drafter.before_head(step[:, :-1][answers]) for step in steps], 1)
        if measure:
            parts = _chunks(len(hidden), max(CHUNK // hidden.shape[1], 1))
            return torch.cat([self._measure(hidden[at], p_logits(at)) for at in parts])
        return summed(hidden, lambda at, part: self._distances(part, p_logits(at)).sum()) / hidden.shape[1]

    def _measure(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """The result of `forward` with `measure`; q is 0 at token ids that the draft does not have."""
        q_logits, vocab = self.drafter.head_logits(hidden), self.drafter.draft_vocab
        if vocab is None:
            q_logits = q_logits[..., : p_logits.shape[-1]]
            vocab = torch.arange(q_logits.shape[-1], device=q_logits.device)
        p = (p_logits - p_logits.logsumexp(-1, keepdim=True))[:, vocab].exp()
        accepted = torch.minimum(p[:, None], q_logits.softmax(-1)).sum(-1)
        agree = p_logits.argmax(-1)[:, None] == vocab[q_logits.argmax(-1)]
        return torch.stack((accepted, agree.float()), dim=-1)

    def _distances(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """The distance `[positions, steps]` (`loss`) of q from p_S: p renormalised on the draft's tokens S.

        q is zero outside S, so that KL(p || q) would be infinite. A candidate is accepted with probability sum_S min(p,
        q) >= p(S) * sum_S min(p_S, q). Training does not change p(S); the second factor is 1 - TV(p_S, q), which
        KL(p_S || q) bounds (Pinsker)."""
        q_logits = self.drafter.head_logits(hidden)
        both = min(p_logits.shape[-1], q_logits.shape[-1])  # without a draft vocabulary: the common token ids
        q_logits = q_logits[..., :both]
        return distance(self.settings.loss, p_logits[:, None, :both].expand_as(q_logits), q_logits)


class AdaptedDraft(DistilledDraft, PeftModel):
    """A draft with a LoRA adapter, and a fusion if it is conditioned; checkpoints of a `PeftModel` hold only these."""

    def __init__(
        self, draft: CausalLM, draft_vocab: Tensor | None, fusion: StateReader | None, settings: DistillConfig
    ) -> None:
        # New frozen parameters in the same memory, so that training cannot change the target's parameters.
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in draft.parameters()}
        own = copy.deepcopy(draft, memo | {id(buffer): buffer for buffer in draft.buffers()})
        if fusion is not None:
            own.fusion = fusion
        lora = LoraConfig(
            r=settings.rank,
            lora_alpha=2 * settings.rank,
            target_modules="all-linear",  # of the decoder: PEFT excludes the LM head
            exclude_modules=None if fusion is None else r"fusion\..*",
            modules_to_save=None if fusion is None else ["fusion"],
            base_model_name_or_path=draft.config.name_or_path,
        )
        PeftModel.__init__(self, own, lora)
        base: Any = self.get_base_model()
        drafter = Drafter(base, draft_vocab, shares_target=True, fusion=fusion)
        if fusion is not None:
            drafter.fusion = base.fusion.modules_to_save["default"]
        object.__setattr__(self, "drafter", drafter)
        self.settings = settings


class OwnLayersDraft(DistilledDraft):
    """A draft with own layers (EAGLE-3). All weights but those of embeddings and LM head are trained."""

    def __init__(self, drafter: Any, settings: DistillConfig) -> None:
        super().__init__()
        self.model: Any = drafter.model
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN))
        object.__setattr__(self, "drafter", drafter)
        self.settings = settings


def distance(loss: str, p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The distance `[...]` of q from p, given logits `[..., vocab]`. `"kl"`: KL(p || q). `"tv"`: the total variation 1
    - sum min(p, q), the probability of a rejection. `"kl+tv"`: KL(p || q) plus twice the total variation."""
    variation: Any = 0.0
    if "tv" in loss:
        variation = (p_logits.softmax(-1) - q_logits.softmax(-1)).clamp_min(0.0).sum(-1)
    if loss == "tv":
        return variation
    log_q, log_p = q_logits.log_softmax(-1), p_logits.log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) + 2 * variation


def _chunks(count: int, at_once: int = CHUNK) -> list[slice]:
    return [slice(start, start + at_once) for start in range(0, count, at_once)]


def summed(hidden: Tensor, loss: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """Sum `loss` over chunks of `hidden` `[positions, ...]`, with the logits of one chunk in memory at a time.

    The result is differentiable with respect to `hidden` only, so `loss` must not use trained parameters."""
    total, gradients = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
    for at in _chunks(len(hidden)):
        with torch.enable_grad():
            states = hidden[at].detach().requires_grad_()
            value = loss(at, states)
        (gradients[at],) = torch.autograd.grad(value, states)
        total += value.detach()
    linear = (hidden * gradients).sum(dtype=torch.float32)
    return linear + (total - linear).detach()


# The trainer ----------------------------------------------------------------------------------------------------------


class DistillationTrainer(Trainer):
    """A `Trainer` that computes p on the fly. The target is not wrapped, moved or saved."""

    model: DistilledDraft

    def __init__(self, *args: Any, target: CausalLM, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Trainer then passes the number of answer tokens of all micro-batches and processes.
        self.model_accepts_loss_kwargs = True
        self.target = Drafter(target, shares_target=True)
        self.num_ids = target.get_output_embeddings().weight.shape[0]
        # Computes the target's logits for the draft's tokens only.
        self.teacher = Drafter(target, self.model.drafter.draft_vocab, shares_target=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's optimizer, with `fusion_learning_rate` for the fusion."""
        optimizer = super().create_optimizer(*args, **kwargs)
        draft = self.accelerator.unwrap_model(self.model)
        own = set() if draft.fusion is None else set(map(id, draft.fusion.parameters()))
        for group in list(optimizer.param_groups):
            if chosen := [parameter for parameter in group["params"] if id(parameter) in own]:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                optimizer.add_param_group({**group, "params": chosen, "lr": draft.settings.fusion_learning_rate})
        return optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The draft's loss, averaged over all answer tokens of a step. `ValueError` if the loss is not finite."""
        answers, p_logits, states = self._read_target(inputs, self.teacher.head_logits)
        count = answers.sum() if num_items_in_batch is None else num_items_in_batch
        # DDP averages over the processes, but `count` is the sum over them.
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
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Called for each batch of `evaluate`. Returns no loss, then for each row the sums of acceptance and agreement
        by step and the number of positions, `[batch, 2 * steps + 1]`, and the row's source `[batch]`."""
        inputs = self._prepare_inputs(inputs)
        answers, p_logits, states = self._read_target(inputs, lambda hidden: self.target.logits(hidden, self.num_ids))
        with torch.no_grad(), self.compute_loss_context_manager():
            values = model(inputs["input_ids"], answers, p_logits, states, measure=True).flatten(1)
        rows = answers.nonzero()[:, 0]
        values = torch.cat((values, values.new_ones((len(values), 1))), dim=-1)
        sums = values.new_zeros((len(answers), values.shape[1])).index_add_(0, rows, values)
        return None, sums, inputs["source"]

    @torch.no_grad()
    def _read_target(
        self, inputs: dict[str, Any], logits: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Callable[[Any], Tensor], Tensor | None]:
        """Run the target: `answers`, `p_logits` and `states` for `DistilledDraft.forward`. `logits`: the LM head."""
        ids, answers = inputs["input_ids"], inputs["labels"][:, 1:] != IGNORED
        draft, size = self.accelerator.unwrap_model(self.model), self.target.hidden_size
        if (reader := draft.fusion) is None:
            final, states = self.target.hidden_states(ids), None
        else:
            answers[:, : draft.settings.unroll] = False  # their rounds would begin before the first token
            catching = StateReader()
            catching.hidden_size, catching.reads = size, [FINAL, *reader.reads]
            with TargetStates(self.target.model, catching) as caught:
                self.target.hidden_states(ids)
                found: Any = caught.states_of()
            final, states = found.to(ids.device).tensor_split((size,), dim=-1)
        hidden = final[:, :-1][answers]
        return answers, torch.no_grad()(lambda at: logits(hidden[at])), states


def summarise(prediction: EvalPrediction, sources: list[str]) -> dict[str, float]:
    """Return means of the results of `prediction_step`, for all rows and by source: `all/tokens` (positions),
    `all/acceptance` and `all/agreement` (first step), `all/acceptance_2` (second step), ..."""
    sums, source = np.asarray(prediction.predictions, dtype=np.float64), np.asarray(prediction.label_ids)
    groups = {"all": np.full(len(source), True), **{name: source == i for i, name in enumerate(sources)}}
    report: dict[str, float] = {}
    for name, rows in groups.items():
        *totals, count = sums[rows].sum(axis=0)
        if count:
            for number, total in enumerate(totals):
                step = "" if number < 2 else f"_{number // 2 + 1}"
                report[f"{name}/{('acceptance', 'agreement')[number % 2]}{step}"] = total / count
            report[f"{name}/tokens"] = int(count)
    return report


# Batches --------------------------------------------------------------------------------------------------------------


def by_length(lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """Indices of answers in an order set by `seed`, with similar `lengths` in a batch, and batches in random order."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(lengths)), []
    for block in np.array_split(order, range(batch_size * SORTED_BATCHES, len(order), batch_size * SORTED_BATCHES)):
        block = block[np.argsort(-np.asarray(lengths)[block], kind="stable")]
        batches += np.array_split(block, range(batch_size, len(block), batch_size))
    # The last batch may be smaller, and stays last.
    shuffled = [batches[i] for i in random.permutation(len(batches) - 1)] + batches[-1:]
    return np.concatenate(shuffled).tolist()


def collate(rows: list[dict[str, Any]], max_length: int, sources: list[str]) -> dict[str, Tensor]:
    """Return a batch of answers, padded on the right: `input_ids`, `labels` (the answers' tokens, -100 elsewhere), both
    `[batch, longest]`, and `source`, the index of each answer's source in `sources`, or -1."""
    ids = [torch.tensor(row["input_ids"][:max_length]) for row in rows]
    labels = [tokens.clone() for tokens in ids]
    for label, row in zip(labels, rows, strict=True):
        label[: max(row["prompt_length"], 1)] = IGNORED
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "source": torch.tensor([sources.index(row["source"]) if row["source"] in sources else -1 for row in rows]),
    }
