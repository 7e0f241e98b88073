"""The draft with its adapter, its loss, and the `Trainer` that knows the target."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.distillation.data import IGNORED
from hf_specdecpp.training.distillation.state_cache import StateCache

# Positions whose logits are in memory at once: 256 rows of a 152k vocabulary are 156 MB in float32.
CHUNK = 256


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q), summed over positions, of logits `[..., vocab]`."""
    return F.kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="sum", log_target=True)


def total_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """1 - sum min(p, q), the chance that a candidate from q is rejected, summed over positions, of the same."""
    return (p_logits.softmax(-1) - q_logits.softmax(-1)).clamp_min(0.0).sum()


def divergence_and_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL plus twice the total variation, which are of one size while a draft learns."""
    return divergence(p_logits, q_logits) + 2 * total_variation(p_logits, q_logits)


DISTANCES = {"kl": divergence, "tv": total_variation, "kl+tv": divergence_and_variation}


def with_own_parameters(model: CausalLM) -> CausalLM:
    """The model's structure with new, frozen `Parameter` objects over the same memory.

    So an early exit can be trained although it shares its tensors with the target: whatever freezes, wraps or gathers
    gradients of the copy's parameters does not reach the target's.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


class Student(PeftModel):
    """The draft with a LoRA adapter. A PEFT model, so that checkpoints hold the adapter and nothing else.

    Its forward does all that needs the draft's weights, because DDP and FSDP act at the outermost forward.

    Args:
        draft: its weights stay as they are.
        lora: the adapter. For a conditioned draft its `modules_to_save` names `"fusion"`, which is trained, too.
        draft_vocab: token ids that the draft may propose, or `None` for all.
        fusion: of a conditioned draft.
        unroll: steps of a round that a conditioned draft is taught.
        loss: one of `DISTANCES`.
    """

    drafter: Drafter

    def __init__(
        self,
        draft: CausalLM,
        lora: LoraConfig,
        draft_vocab: Tensor | None,
        fusion: StateReader | None = None,
        unroll: int = 1,
        loss: str = "kl",
    ) -> None:
        own = with_own_parameters(draft)
        if fusion is not None:
            own.fusion = fusion
        super().__init__(own, lora)
        base: Any = self.get_base_model()
        drafter = Drafter(base, draft_vocab, shares_target=True, fusion=fusion)
        if fusion is not None:
            drafter.fusion = base.fusion.modules_to_save["default"]
        # Not registered: its model is, already, and its slice of the LM head is not to be trained, moved or stored.
        object.__setattr__(self, "drafter", drafter)
        self.unroll = unroll
        self.distance = DISTANCES[loss]

    @property
    def fusion(self) -> StateReader | None:
        return self.drafter.fusion

    def forward(
        self,
        input_ids: Tensor,
        answers: Tensor,
        p_logits: Callable[[slice], Tensor],
        states: Tensor | None = None,
        measure: bool = False,
    ) -> Tensor:
        """Teach or measure the draft at the answers' positions.

        Args:
            input_ids: `[batch, n]`, padded on the right, where nothing that is causal looks.
            answers: bool `[batch, n - 1]`: the target wrote the token after this one.
            p_logits: the target's logits at some of the answers' positions: `[positions, vocab]` to measure; to teach,
                those of the draft's tokens.
            states: `[batch, n, width]` of the target, for a conditioned draft.
            measure: report on the draft instead of teaching it.

        Returns:
            The sum of the distance between p and q over the positions, the mean of all steps; or
            `[positions, steps, 2]`: how likely a candidate is accepted and whether the likeliest token is the target's.
            An unconditioned draft reads real tokens alone, and has one step.
        """
        if states is None:
            steps = [self.drafter.hidden_states(input_ids)]
        else:
            steps = list(unrolled(self.drafter, input_ids, states, self.unroll))
        hidden = torch.stack([step[:, :-1][answers] for step in steps], 1)
        if measure:
            return torch.cat([self._measure(hidden[at], p_logits(at)) for at in _chunks(len(hidden))])
        return _through(hidden, lambda at, states: self._loss(states, p_logits(at))) / len(steps)

    def _measure(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """`[positions, steps, 2]` of `hidden` `[positions, steps, hidden_size]` and `p_logits` `[positions, vocab]`.

        q is zero outside the draft's tokens, so only these are looked at, with p as it is among all.
        """
        q_logits, vocab = self.drafter.vocab_logits(hidden), self.drafter.draft_vocab
        if vocab is None:
            q_logits = q_logits[..., : p_logits.shape[-1]]
        kept: Any = slice(q_logits.shape[-1]) if vocab is None else vocab
        p = (p_logits - p_logits.logsumexp(-1, keepdim=True))[:, kept].exp()
        q = q_logits.softmax(-1)
        likeliest = q_logits.argmax(-1)
        agree = p_logits.argmax(-1)[:, None] == (likeliest if vocab is None else vocab[likeliest])
        return torch.stack((torch.minimum(p[:, None], q).sum(-1), agree.float()), dim=-1)

    def _loss(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """The distance of q from p, which is renormalised on the tokens that the draft has: the sum over positions and
        steps.

        Args:
            hidden: `[positions, steps, hidden_size]`.
            p_logits: `[positions, d]`, of these tokens.

        Where q is zero by construction KL would be infinite whatever the draft says. With S the draft's tokens and p_S
        the renormalised p, a candidate is accepted with chance sum_S min(p, q) >= p(S) * sum_S min(p_S, q): p(S) is
        not in the draft's hands, and the second factor is 1 - TV(p_S, q), which this KL bounds (Pinsker).
        """
        q_logits = self.drafter.vocab_logits(hidden)
        both = min(p_logits.shape[-1], q_logits.shape[-1])  # without a draft vocabulary: the ids that both have
        q_logits = q_logits[..., :both]
        return self.distance(p_logits[:, None, :both].expand_as(q_logits), q_logits)


def _num_ids(drafter: Reader) -> int:
    return drafter.model.get_output_embeddings().weight.shape[0]


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


def _through(hidden: Tensor, loss: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """The sum of `loss` over chunks of `hidden`, differentiable, with the logits of one chunk in memory at a time.

    The gradient with respect to `hidden` is taken chunk by chunk here; what is returned has that gradient and that
    value. No parameter between hidden states and loss is trained (the LM head is frozen), so nothing else is lost.
    """
    total, gradients = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
    for at in _chunks(len(hidden)):
        with torch.enable_grad():
            states = hidden[at].detach().requires_grad_()
            value = loss(at, states)
        (gradients[at],) = torch.autograd.grad(value, states)
        total += value.detach()
    linear = (hidden * gradients).sum(dtype=torch.float32)
    return linear + (total - linear).detach()


class DistillationTrainer(Trainer):
    """A `Trainer` that computes the target's distributions on the fly. The target is no part of the trained model.

    Args:
        target: on the trainer's device; never wrapped, moved, trained or stored.
        fusion_learning_rate: of a conditioned draft's fusion, in the place of `args.learning_rate`.
        cache: of the states that a conditioned draft reads.
    """

    model: Student

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
    ) -> tuple[Tensor, Callable[[slice], Tensor], Tensor | None]:
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
        def p_logits(at: slice) -> Tensor:
            return logits(hidden[at])

        return answers, p_logits, states

    def _read(self, inputs: dict[str, Any], fusion: StateReader | None) -> tuple[Tensor, Tensor | None]:
        """The target's final states `[batch, n, hidden_size]`, and all that a conditioned draft reads of it."""
        ids, rows = inputs["input_ids"], inputs["row"].tolist()
        cache = self.cache if min(rows) >= 0 else None
        if fusion is not None and cache is not None and (known := cache.get(rows, ids.shape[1])) is not None:
            states = known.to(ids.device)
            return states[..., : fusion.hidden_size], states
        with TargetStates(self.target.model, fusion) as caught:
            final, found = self.target.hidden_states(ids), caught.take()
        if cache is not None and found is not None:
            cache.put(rows, found)
        return final, found


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
