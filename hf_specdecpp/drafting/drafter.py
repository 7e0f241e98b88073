"""The draft model: `Drafter` runs its inner decoder and LM head itself and never calls `generate()`.

It holds no state of a generation, so one drafter can serve several threads; each generation owns a `DraftSession`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM

# Decoders whose positions come from a table cannot run past its end; rotary ones merely get worse.
LEARNED_POSITIONS = frozenset({"gpt2", "opt", "gpt_neo", "gpt_bigcode", "biogpt", "xglm", "openai-gpt"})


class Drafter(nn.Module):
    """A causal LM that drafts for a target.

    Args:
        model: an independent draft, or an early exit of the target (`early_exit.early_exit`).
        draft_vocab: optional int64 token ids; the LM head computes only these, and q is zero elsewhere.
        shares_target: the model's tensors are the target's. Then it is not registered as a submodule: `.to()` and
            friends on the drafter must never move or cast the target.

    Raises:
        ValueError: the model cannot draft, `draft_vocab` is not a set of token ids, or the model turns hidden states
            into logits in a way that is not understood.
    """

    draft_vocab: Tensor | None
    model: CausalLM

    def __init__(self, model: CausalLM, draft_vocab: Tensor | None = None, shares_target: bool = False) -> None:
        super().__init__()
        check_can_draft(model)
        self.shares_target = shares_target
        if shares_target:
            object.__setattr__(self, "model", model)  # past nn.Module's registration, on purpose
        else:
            self.model = model
        self.text_config = model.config.get_text_config(decoder=True)
        self.register_buffer("draft_vocab", _check_draft_vocab(draft_vocab, model), persistent=False)
        self.small_head = _slice_head(self._head(), self.draft_vocab) if self.draft_vocab is not None else None
        self._check_logits()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self._head().weight.shape[1]

    @property
    def embedding_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def max_length(self) -> float:
        """Longest sequence that the draft can read."""
        if self.text_config.model_type in LEARNED_POSITIONS:
            return self.text_config.max_position_embeddings
        return float("inf")

    def embed(self, token: Tensor) -> Tensor:
        """Input embedding `[embedding_size]` of a 0-d token id (tokens that the draft does not know count as 0)."""
        weight = self.model.get_input_embeddings().weight
        return weight[self._known(token)]

    def hidden_states(self, input_ids: Tensor, cache: DynamicCache | None = None, **inputs: Any) -> Tensor:
        """Last hidden states (after the final norm) `[batch, n, hidden_size]` of `input_ids` `[batch, n]`.

        With a cache they are fed after what it holds, and added to it. `inputs` are further arguments of the forward,
        such as those of `tree_attention.tree_inputs`.
        """
        decoder = self.model.get_decoder()
        use_cache = cache is not None
        output = decoder(input_ids=self._known(input_ids), past_key_values=cache, use_cache=use_cache, **inputs)
        return output.last_hidden_state

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits `[..., vocab_size]` float32 of hidden states `[..., hidden_size]`.

        `vocab_size` is the width of the target's logits. The draft's are cut or padded to it; ids that the draft does
        not have, or that are not in its `draft_vocab`, get -inf, so that q is zero there.
        """
        if self.small_head is None:
            logits = self._head_logits(self._head(), hidden)
        else:
            shape = (*hidden.shape[:-1], self._head().weight.shape[0])
            logits = hidden.new_full(shape, float("-inf"), dtype=torch.float32)
            logits[..., self.draft_vocab] = self._head_logits(self.small_head, hidden)
        missing = vocab_size - logits.shape[-1]
        if missing > 0:
            return nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., :vocab_size]

    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def _head_logits(self, head: Any, hidden: Tensor) -> Tensor:
        """The model's own route from hidden state to logits: the head, then what some families do to its output."""
        logits = head(hidden)
        config = self.text_config
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2 and later
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def _known(self, token_ids: Tensor) -> Tensor:
        """Replace ids beyond the draft's embedding table: the draft then guesses badly, but guesses are verified."""
        return token_ids.where(token_ids < self.model.get_input_embeddings().weight.shape[0], 0)

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Compare the route above with the model's own forward on one token."""
        probe = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        expected = self.model(probe).logits[0, -1].float()
        actual = self._head_logits(self._head(), self.hidden_states(probe)[0, -1])
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 5e-2
        error = float((actual - expected).abs().max())
        if not error <= tolerance * max(1.0, float(expected.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} turns hidden states into logits in a way that hf_specdecpp does not know "
                f"(largest difference {error:.3g}), so it would draft from wrong probabilities. Use another draft."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        # An early-exit draft lives where its target lives; not even its small head may go elsewhere.
        return self if self.shares_target else super()._apply(fn, recurse)


def check_can_draft(model: CausalLM) -> None:
    """Raise `ValueError` if `model` is of a kind that cannot draft."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; a draft must be a decoder-only causal LM.")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back to the accepted tokens, so it cannot draft. "
            "Use a draft whose layers all use attention."
        )
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{name} has no LM head, so it cannot predict tokens. Load it with AutoModelForCausalLM.")


def _check_draft_vocab(token_ids: Tensor | None, model: CausalLM) -> Tensor | None:
    if token_ids is None:
        return None
    rows = model.get_output_embeddings().weight.shape[0]
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).flatten()
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= rows or ids.unique().numel() != ids.numel():
        span = f"{int(ids.min())} to {int(ids.max())}" if ids.numel() else "none"
        raise ValueError(
            f"draft_vocab must list distinct token ids from 0 to {rows - 1}; got {ids.numel()} ids, {span}. It was "
            "probably made for another draft."
        )
    return ids


def _slice_head(head: Any, token_ids: Tensor) -> nn.Linear:
    """The rows of an LM head that belong to `token_ids`."""
    with torch.no_grad():
        weight = head.weight[token_ids]
        small = nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
        small.weight = nn.Parameter(weight, requires_grad=False)
        if head.bias is not None:
            small.bias = nn.Parameter(head.bias[token_ids], requires_grad=False)
    return small


def check_head(head: AcceptanceHead, drafter: Drafter, draft_name: str) -> None:
    """Raise `ValueError` unless the head was trained for states and embeddings of the draft's sizes."""
    ours = {"hidden_size": head.hidden_size}
    theirs = {"hidden_size": drafter.hidden_size}
    if head.inputs == "before":
        ours["embedding_size"], theirs["embedding_size"] = head.embedding_size, drafter.embedding_size
    if ours != theirs:
        raise ValueError(
            f"The acceptance head was trained for {ours} but draft {draft_name} has {theirs}, so it cannot "
            "read the draft's states. Load the draft that it was trained with, or train a head for this one."
        )
