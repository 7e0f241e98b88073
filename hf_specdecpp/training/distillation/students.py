"""The draft as it is taught (`Taught`): an adapter (`Student`), or a layer of its own (`LayerStudent`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader

FROZEN = ("lm_head.", "embed_tokens.", "decoder.embed_tokens.")  # a draft's own parameters that are not trained
# Positions whose logits are in memory at once: 256 rows of a 152k vocabulary are 156 MB in float32.
CHUNK = 256


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of logits `[..., vocab]`."""
    return F.kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def total_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """1 - sum min(p, q), the chance that a candidate from q is rejected, of the same."""
    return (p_logits.softmax(-1) - q_logits.softmax(-1)).clamp_min(0.0).sum(-1)


def divergence_and_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL plus twice the total variation, which are of one size while a draft learns."""
    return divergence(p_logits, q_logits) + 2 * total_variation(p_logits, q_logits)


DISTANCES = {"kl": divergence, "tv": total_variation, "kl+tv": divergence_and_variation}


class Taught(nn.Module):
    """A draft that is taught, whose `unroll` steps of a round go on for themselves. All that needs its weights is in
    its forward, because DDP and FSDP act at the outermost; its drafter is not registered, since its model is already.
    """

    drafter: Any
    unroll: int
    distance: Callable[[Tensor, Tensor], Tensor]

    @property
    def fusion(self) -> StateReader | None:
        return self.drafter.reads

    def forward(
        self,
        input_ids: Tensor,
        answers: Tensor,
        p_logits: Callable[[Any], Tensor],
        states: Tensor | None = None,
        measure: bool = False,
    ) -> Tensor:
        """Teach or measure the draft at the answers' positions.

        Args:
            input_ids: `[batch, n]`, padded on the right, where nothing that is causal looks.
            answers: bool `[batch, n - 1]`: the target wrote the token after this one.
            p_logits: the target's logits at some of the answers' positions, numbered in order: `[positions, vocab]` to
                measure; to teach, those of the draft's tokens.
            states: `[batch, n, width]` of the target, for a conditioned draft.
            measure: report on the draft instead of teaching it.

        Returns:
            The sum of the distance between p and q over the positions, the mean of all steps; or
            `[positions, steps, 2]`: how likely a candidate is accepted and whether the likeliest token is the target's.
            An unconditioned draft reads real tokens alone, and has one step.
        """
        hidden = self._read(input_ids, answers, states)
        if measure:
            at_once = max(CHUNK // hidden.shape[1], 1)
            return torch.cat([self._measure(hidden[at], p_logits(at)) for at in _chunks(len(hidden), at_once)])
        return through(hidden, lambda at, states: self.distances(states, p_logits(at)).sum()) / hidden.shape[1]

    def _read(self, input_ids: Tensor, answers: Tensor, states: Tensor | None) -> Tensor:
        """What the LM head reads, `[positions, steps, hidden_size]`."""
        if states is None:
            steps = [self.drafter.hidden_states(input_ids)]
        elif self.drafter.blocks_after is None:
            steps = list(unrolled(self.drafter, input_ids, states, self.unroll))
        else:
            return self._read_blocks(input_ids, answers, states)
        return torch.stack([self.drafter.before_head(step[:, :-1][answers]) for step in steps], 1)

    def _read_blocks(self, input_ids: Tensor, answers: Tensor, states: Tensor) -> Tensor:
        """Each position as the first candidate of one block, the second of another, and so on."""
        first = max(int(answers.any(0).nonzero()[0]) - self.unroll + 1, 1)
        anchors = torch.arange(first, answers.shape[1], device=answers.device).expand(len(answers), -1)
        blocks = self.drafter.blocks_after(input_ids, states, anchors)
        rows, places = answers.nonzero().unbind(1)
        return torch.stack([blocks[rows, places - place - first, place] for place in range(self.unroll)], 1)

    def _measure(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """`[positions, steps, 2]` of hidden states and p's logits `[positions, vocab]`; q is 0 at all other ids."""
        q_logits, vocab = self.drafter.head_logits(hidden), self.drafter.draft_vocab
        if vocab is None:
            q_logits = q_logits[..., : p_logits.shape[-1]]
        kept: Any = slice(q_logits.shape[-1]) if vocab is None else vocab
        p = (p_logits - p_logits.logsumexp(-1, keepdim=True))[:, kept].exp()
        q = q_logits.softmax(-1)
        likeliest = q_logits.argmax(-1)
        agree = p_logits.argmax(-1)[:, None] == (likeliest if vocab is None else vocab[likeliest])
        return torch.stack((torch.minimum(p[:, None], q).sum(-1), agree.float()), dim=-1)

    def distances(self, hidden: Tensor, p_logits: Tensor) -> Tensor:
        """The distance `[positions, steps]` of q from p, which is renormalised on the d tokens that the draft has;
        `hidden` is what the LM head reads, `[positions, steps, hidden_size]`.

        Where q is zero by construction KL would be infinite whatever the draft says. With S the draft's tokens and p_S
        the renormalised p, a candidate is accepted with chance sum_S min(p, q) >= p(S) * sum_S min(p_S, q): p(S) is not
        in the draft's hands, and the second factor is 1 - TV(p_S, q), which this KL bounds (Pinsker).
        """
        q_logits = self.drafter.head_logits(hidden)
        both = min(p_logits.shape[-1], q_logits.shape[-1])  # without a draft vocabulary: the ids that both have
        q_logits = q_logits[..., :both]
        return self.distance(p_logits[:, None, :both].expand_as(q_logits), q_logits)


def with_own_parameters(model: CausalLM) -> CausalLM:
    """The model's structure with new, frozen `Parameter` objects over the same memory; training never reaches it."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


class Student(Taught, PeftModel):
    """The draft with a LoRA adapter, and a fusion if it is conditioned; a PEFT model's checkpoints hold no more."""

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
        PeftModel.__init__(self, own, lora)
        base: Any = self.get_base_model()
        drafter = Drafter(base, draft_vocab, shares_target=True, fusion=fusion)
        if fusion is not None:
            drafter.fusion = base.fusion.modules_to_save["default"]
        object.__setattr__(self, "drafter", drafter)
        self.unroll = unroll
        self.distance = DISTANCES[loss]


class LayerStudent(Taught):
    """A draft with layers of its own, which are trained, but for embeddings and LM head, where it has its own."""

    def __init__(self, drafter: Any, unroll: int = 1, loss: str = "kl") -> None:
        super().__init__()
        self.model: Any = drafter.model.requires_grad_(True)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN))
        object.__setattr__(self, "drafter", drafter)
        self.unroll, self.distance = unroll, DISTANCES[loss]


def _chunks(count: int, at_once: int = CHUNK) -> list[slice]:
    return [slice(start, start + at_once) for start in range(0, count, at_once)]


def through(hidden: Tensor, loss: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """The sum of `loss` over chunks of `hidden`, differentiable, with the logits of one chunk in memory at a time.

    No parameter between hidden states and loss is trained, so what is returned has that value and that gradient."""
    total, gradients = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
    for at in _chunks(len(hidden)):
        with torch.enable_grad():
            states = hidden[at].detach().requires_grad_()
            value = loss(at, states)
        (gradients[at],) = torch.autograd.grad(value, states)
        total += value.detach()
    linear = (hidden * gradients).sum(dtype=torch.float32)
    return linear + (total - linear).detach()
