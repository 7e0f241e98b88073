"""A model that drafts: `DraftModel`, a reader that may have a vocabulary of its own and read the target's states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_specdecpp.caches.states import no_way_back
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.quantised import is_quantised, rows_of, sizes_of
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader


class DraftModel(Reader):
    """A causal LM that drafts for a target; `ValueError` if the model cannot draft, `draft_vocab` is no set of token
    ids, the fusion has other sizes, or how states become logits is not understood.

    Args:
        model: an independent draft, or an early exit of the target (`early_exit.early_exit`).
        draft_vocab: optional int64 token ids; the LM head computes only these, and q is zero elsewhere.
        shares_target: the model's tensors are the target's. Then it is not registered as a submodule: `.to()` and
            friends on the drafter never move or cast the target, and its small head stays where the target is.
        fusion: makes inputs of the target's hidden states and embeddings, for a draft that reads them.
    """

    draft_vocab: Tensor | None

    def __init__(
        self,
        model: CausalLM,
        draft_vocab: Tensor | None = None,
        shares_target: bool = False,
        fusion: StateReader | None = None,
    ) -> None:
        check_can_draft(model)
        super().__init__(model, owns_model=not shares_target)
        self.register_buffer("draft_vocab", self._checked(draft_vocab), persistent=False)
        self.small_head = self._head_of_draft_vocab()
        if fusion is not None:
            _check_fusion(fusion, self)
        self.fusion = fusion

    @property
    def shares_target(self) -> bool:
        return not self.owns_model

    @property
    def num_ids(self) -> int:
        """Tokens that its logits are of."""
        return sizes_of(self._head())[1]

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that a draft step runs; of an LM head of which only some rows are used, these."""
        head = self._head() if self.small_head is None else self.small_head
        return [inner_decoder(self.model), head, *([] if self.fusion is None else [self.fusion])]

    def hidden_states(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        states: Tensor | None = None,
        *,
        are_known: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """As in `Reader`; one that reads the target also reads `states`, those before each token."""
        if states is None:
            return self._decode(cache, input_ids=input_ids if are_known else self.known(input_ids), **inputs)
        if self.fusion is None:
            raise ValueError(f"{type(self.model).__name__} is a draft that reads no states of the target.")
        embeddings = self.embed(input_ids, are_known)
        return self._decode(cache, inputs_embeds=self.fusion(states.to(embeddings), embeddings), **inputs)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Ids that are not in `draft_vocab` get -inf."""
        if self.small_head is None:
            return self._head_logits(self.model.get_output_embeddings(), self.before_head(hidden))
        shape = (*hidden.shape[:-1], self.num_ids)
        logits = hidden.new_full(shape, float("-inf"), dtype=torch.float32)
        logits[..., self.draft_vocab] = self.vocab_logits(hidden)
        return logits

    def vocab_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., d]` float32 of the d tokens that it may propose, in their order in `draft_vocab`."""
        return self.head_logits(self.before_head(hidden))

    def before_head(self, hidden: Tensor) -> Tensor:
        """What its LM head reads, of the states that a step returns."""
        return hidden

    def head_logits(self, inputs: Tensor) -> Tensor:
        """`vocab_logits` of what the LM head reads."""
        return self._head_logits(self._head() if self.small_head is None else self.small_head, inputs)

    def _head_of_draft_vocab(self) -> nn.Module | None:
        """What computes the logits of these tokens alone."""
        return None if self.draft_vocab is None else _slice_head(self._head(), self.draft_vocab)

    @torch.inference_mode()
    def renew(self) -> None:
        """Copy the rows of `draft_vocab` again if the LM head has changed, as with each step of a target in training.

        In place, so that what was compiled or captured with them goes on. One number of each row is compared, since an
        optimiser moves all; the fused ones leave autograd's count of writes alone.
        """
        head, small, ids = self._head(), self.small_head, self.draft_vocab
        if ids is None or not isinstance(small, nn.Linear) or small is head or is_quantised(head):
            return
        if not torch.equal(small.weight[:, 0], head.weight[ids, 0]):
            for own, now in zip(small.parameters(), _slice_head(head, ids).parameters(), strict=True):
                own.copy_(now)

    def _checked(self, token_ids: Tensor | None) -> Tensor | None:
        if token_ids is None:
            return None
        ids = torch.as_tensor(token_ids, device=self.device)
        check_draft_vocab(ids, self.num_ids)
        return ids.long()


def check_draft_vocab(ids: Tensor, num_ids: int) -> None:
    """Raise `ValueError` unless these are distinct token ids below `num_ids`."""
    is_list = ids.numel() and ids.dim() == 1 and not ids.is_floating_point()
    if not is_list or int(ids.min()) < 0 or int(ids.max()) >= num_ids or ids.unique().numel() != ids.numel():
        span = f"{ids.min():g} to {ids.max():g}" if ids.numel() else "none"
        raise ValueError(
            f"draft_vocab must list distinct token ids from 0 to {num_ids - 1}; got {ids.numel()} ids, {span}. It was "
            "probably made for another draft."
        )


def check_can_draft(model: CausalLM) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; a draft must be a decoder-only causal LM.")
    if (reason := no_way_back(model)) is not None:
        raise ValueError(f"{name} {reason}, so it cannot draft. Use a draft whose layers all use attention.")


def _slice_head(head: Any, token_ids: Tensor) -> nn.Linear:
    """The rows of an LM head that belong to `token_ids`."""
    with torch.no_grad():
        weight = rows_of(head, token_ids) if is_quantised(head) else head.weight[token_ids]
        bias = getattr(head, "bias", None)  # an adapter beside a quantised head has none of its own
        small = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        small.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            small.bias = nn.Parameter(bias[token_ids], requires_grad=False)
    return small


def _check_fusion(fusion: StateReader, model: DraftModel) -> None:
    """Raise `ValueError` unless the fusion was made for states and embeddings of the draft's sizes."""
    theirs = fusion.hidden_size, fusion.embedding_size
    if theirs != (ours := (model.hidden_size, model.embedding_size)):
        raise ValueError(
            f"The fusion reads states of {theirs[0]} and embeddings of {theirs[1]} numbers; the draft has {ours[0]} "
            f"and {ours[1]}. It was trained for another target."
        )
