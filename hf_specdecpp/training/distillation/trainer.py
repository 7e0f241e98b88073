"""A draft that is distilled (`DistilledDraft`), and the `Trainer` that teaches it the target's distributions."""

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

from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import FINAL, StateReader, TargetStates

FROZEN = ("lm_head.", "embed_tokens.", "decoder.embed_tokens.")  # a draft's own parameters that are not trained
CHUNK = 256  # positions whose logits are in memory together: of a vocabulary of 152k they take 156 MB in float32
IGNORED = -100  # label of the positions where the target wrote nothing
SORTED_BATCHES = 50  # batches that answers of similar length are grouped within


# The draft ------------------------------------------------------------------------------------------------------------


class DistilledDraft(nn.Module):
    """A draft in training. All that needs its weights is in `forward`, since DDP and FSDP wrap the outermost module.

    Attributes:
        drafter: the draft as generation runs it; not registered as a submodule, because its model already is one.
        unroll: number of steps of a round that are trained. After the first step the draft reads its own states.
        loss: as in `DistillConfig`.
    """

    drafter: Any
    unroll: int
    loss: str

    @property
    def fusion(self) -> StateReader | None:
        """What makes the draft's inputs of the target's states; `None` if the draft reads tokens alone."""
        return self.drafter.reads

    def forward(
        self,
        input_ids: Tensor,
        answers: Tensor,
        p_logits: Callable[[Any], Tensor],
        states: Tensor | None = None,
        measure: bool = False,
    ) -> Tensor:
        """The loss, or with `measure` the acceptance, of the draft at the positions of answers.

        Args:
            input_ids: `[batch, n]`, padded on the right.
            answers: bool `[batch, n - 1]`: whether the target wrote the token after this one.
            p_logits: given a slice of the positions of answers, the target's logits there, `[positions, vocab]`: of the
                draft's tokens for the loss, of all tokens to measure.
            states: `[batch, n, width]` of the target, for a draft that reads them.

        Returns:
            The loss, 0-d: the distance of q from p, summed over positions, averaged over steps. Or `[positions, steps,
            2]`: the chance that a candidate is accepted, and whether the likeliest token is the target's. A draft that
            reads tokens alone has one step.
        """
        hidden = self._read(input_ids, answers, states)
        if measure:
            parts = _chunks(len(hidden), max(CHUNK // hidden.shape[1], 1))
            return torch.cat([self._measure(hidden[at], p_logits(at)) for at in parts])
        return summed(hidden, lambda at, part: self._distances(part, p_logits(at)).sum()) / hidden.shape[1]

    def _read(self, input_ids: Tensor, answers: Tensor, states: Tensor | None) -> Tensor:
        """The inputs of the LM head, `[positions, steps, hidden_size]`."""
        if states is None:
            steps = [self.drafter.hidden_states(input_ids)]
        elif self.drafter.blocks_after is None:
            steps = list(unrolled(self.drafter, input_ids, states, self.unroll))
        else:
            return self._read_blocks(input_ids, answers, states)
        return torch.stack([self.drafter.before_head(step[:, :-1][answers]) for step in steps], 1)

    def _read_blocks(self, input_ids: Tensor, answers: Tensor, states: Tensor) -> Tensor:
        """As `_read`: each position is the first candidate of one block, the second of another, and so on."""
        first = max(int(answers.any(0).nonzero()[0]) - self.unroll + 1, 1)
        anchors = torch.arange(first, answers.shape[1], device=answers.device).expand(len(answers), -1)
        blocks = self.drafter.blocks_after(input_ids, states, anchors)
        rows, places = answers.nonzero().unbind(1)
        return torch.stack([blocks[rows, places - place - first, place] for place in range(self.unroll)], 1)

    def _measure(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """As `forward` with `measure`; q is 0 at token ids that the draft does not have."""
        q_logits, vocab = self.drafter.head_logits(hidden), self.drafter.draft_vocab
        if vocab is None:
            q_logits = q_logits[..., : p_logits.shape[-1]]
            vocab = torch.arange(q_logits.shape[-1], device=q_logits.device)
        p = (p_logits - p_logits.logsumexp(-1, keepdim=True))[:, vocab].exp()
        accepted = torch.minimum(p[:, None], q_logits.softmax(-1)).sum(-1)
        agree = p_logits.argmax(-1)[:, None] == vocab[q_logits.argmax(-1)]
        return torch.stack((accepted, agree.float()), dim=-1)

    def _distances(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """The distance `[positions, steps]` of q from p, which is renormalised on the draft's tokens.

        Elsewhere q is zero, so that the KL divergence would be infinite. With S the draft's tokens and p_S the
        renormalised p, a candidate is accepted with chance sum_S min(p, q) >= p(S) * sum_S min(p_S, q). Training cannot
        change p(S); the second factor is 1 - TV(p_S, q), which this KL divergence bounds (Pinsker).
        """
        q_logits = self.drafter.head_logits(hidden)
        both = min(p_logits.shape[-1], q_logits.shape[-1])  # without a draft vocabulary: the ids that both have
        q_logits = q_logits[..., :both]
        return distance(self.loss, p_logits[:, None, :both].expand_as(q_logits), q_logits)


class AdaptedDraft(DistilledDraft, PeftModel):
    """A draft with a LoRA adapter, and a fusion if it is conditioned. As a `PeftModel` its checkpoints hold no more."""

    def __init__(
        self,
        draft: CausalLM,
        lora: LoraConfig,
        draft_vocab: Tensor | None,
        fusion: StateReader | None = None,
        unroll: int = 1,
        loss: str = "kl",
    ) -> None:
        # The same memory with parameters of its own, which are frozen: training never reaches the target's.
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in draft.parameters()}
        own = copy.deepcopy(draft, memo | {id(buffer): buffer for buffer in draft.buffers()})
        if fusion is not None:
            own.fusion = fusion
        PeftModel.__init__(self, own, lora)
        base: Any = self.get_base_model()
        drafter = Drafter(base, draft_vocab, shares_target=True, fusion=fusion)
        if fusion is not None:
            drafter.fusion = base.fusion.modules_to_save["default"]
        object.__setattr__(self, "drafter", drafter)
        self.unroll, self.loss = unroll, loss


class OwnLayersDraft(DistilledDraft):
    """A draft with layers of its own. All its weights are trained but those of embeddings and LM head."""

    def __init__(self, drafter: Any, unroll: int = 1, loss: str = "kl") -> None:
        super().__init__()
        self.model: Any = drafter.model
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN))
        object.__setattr__(self, "drafter", drafter)
        self.unroll, self.loss = unroll, loss


def distance(loss: str, p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The distance of q from p by their logits `[..., vocab]`. `"kl"`: KL(p || q). `"tv"`: their total variation
    1 - sum min(p, q), the chance that a candidate is rejected. `"kl+tv"`: KL(p || q) and twice the variation."""
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
    """The sum of `loss` over chunks of `hidden`, differentiable, with the logits of one chunk in memory at a time.

    No parameter between hidden states and loss is trained, so the result has that value and that gradient."""
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
    """A `Trainer` that computes the target's distributions on the fly. The target is never wrapped, moved or stored."""

    model: DistilledDraft

    def __init__(self, *args: Any, target: CausalLM, fusion_learning_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fusion_learning_rate = fusion_learning_rate
        # Losses of micro-batches and processes are weighted by their answer tokens.
        self.model_accepts_loss_kwargs = True
        self.target = DraftModel(target, shares_target=True)
        self.num_ids = target.get_output_embeddings().weight.shape[0]
        # The loss needs the target's logits only where the draft has tokens, too.
        self.teacher = Drafter(target, self.model.drafter.draft_vocab, shares_target=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's optimizer, in which the fusion has a learning rate of its own."""
        optimizer = super().create_optimizer(*args, **kwargs)
        fusion = self.accelerator.unwrap_model(self.model).fusion
        own = set() if fusion is None else set(map(id, fusion.parameters()))
        for group in list(optimizer.param_groups):
            if chosen := [parameter for parameter in group["params"] if id(parameter) in own]:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                optimizer.add_param_group({**group, "params": chosen, "lr": self.fusion_learning_rate})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002 - the signature that Trainer calls
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The draft's loss, averaged over all answer tokens of a step; `ValueError` where the loss is not finite."""
        answers, p_logits, states = self._read_target(inputs, self.teacher.vocab_logits)
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
        """Called for each batch of `evaluate`: for each row the sums of acceptance and agreement by step and the number
        of positions, `[batch, 2 * steps + 1]`, and the row's source `[batch]`. No loss is computed."""
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
        """`answers`, `p_logits` and `states` of `DistilledDraft.forward`; `logits` makes p's logits of final states."""
        ids, answers = inputs["input_ids"], inputs["labels"][:, 1:] != IGNORED
        draft, size = self.accelerator.unwrap_model(self.model), self.target.hidden_size
        if (reader := draft.fusion) is None:
            final, states = self.target.hidden_states(ids), None
        else:
            answers[:, : draft.unroll] = False  # rounds that would begin before the text
            catching = StateReader()
            catching.hidden_size, catching.reads = size, [FINAL, *reader.reads]
            with TargetStates(self.target.model, catching) as caught:
                self.target.hidden_states(ids)
                found: Any = caught.states_of()
            final, states = found.to(ids.device).tensor_split((size,), dim=-1)
        hidden = final[:, :-1][answers]
        return answers, torch.no_grad()(lambda at: logits(hidden[at])), states


def summarise(prediction: EvalPrediction, sources: list[str]) -> dict[str, float]:
    """The metrics of an evaluation, of all positions and by source, from what `prediction_step` returned: number of
    positions, acceptance and top-1 agreement in the first step, and in step i as `acceptance_i`, `agreement_i`."""
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
    """A random order of answers, the same for the same arguments. The answers of a batch are of about one length, so
    that little is padding."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(lengths)), []
    for block in np.array_split(order, range(batch_size * SORTED_BATCHES, len(order), batch_size * SORTED_BATCHES)):
        block = block[np.argsort(-np.asarray(lengths)[block], kind="stable")]
        batches += np.array_split(block, range(batch_size, len(block), batch_size))
    # The one batch that may be smaller stays last.
    shuffled = [batches[i] for i in random.permutation(len(batches) - 1)] + batches[-1:]
    return np.concatenate(shuffled).tolist()


def collate(rows: list[dict[str, Any]], max_length: int, sources: list[str]) -> dict[str, Tensor]:
    """A batch of answers, padded on the right. Labels are the tokens that the target wrote, `IGNORED` elsewhere;
    `source` is the number of each answer's source, -1 for sources that are not among `sources`."""
    ids = [torch.tensor(row["input_ids"][:max_length]) for row in rows]
    labels = [tokens.clone() for tokens in ids]
    for label, row in zip(labels, rows, strict=True):
        label[: max(row["prompt_length"], 1)] = IGNORED
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "source": torch.tensor([sources.index(row["source"]) if row["source"] in sources else -1 for row in rows]),
    }
