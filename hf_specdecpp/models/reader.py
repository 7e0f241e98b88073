"""Read text with a causal LM piece by piece: hidden states, logits and embeddings, without its `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, num_embeddings, positions_of, trying
from hf_specdecpp.models.quantised import sizes_of


class Reader(nn.Module):
    """Runs a model's inner decoder and LM head. It holds no state of a generation, so several threads may share it.
    `ValueError` if the model has no LM head, or how states become logits is not understood.

    Args:
        owns_model: whether `.to()` and friends on the reader move and cast the model, too. Never for a target.
    """

    model: CausalLM
    _decoder: CausalLM

    def __init__(self, model: CausalLM, owns_model: bool = False) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no LM head, so it cannot predict tokens. Load it with "
                "AutoModelForCausalLM."
            )
        self.owns_model = owns_model
        if owns_model:
            self.model = model
        else:
            object.__setattr__(self, "model", model)  # past nn.Module's registration, on purpose
        self.text_config = model.config.get_text_config(decoder=True)
        # What each step needs is looked up once: on small models the ways there take as long as the products.
        object.__setattr__(self, "_decoder", inner_decoder(model))
        self._cache_argument = causal_lm.cache_argument(self._decoder)
        self._scale = getattr(self.text_config, "logit_scale", None)  # Cohere
        divisors = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, Inkling
        self._divisor = next((each for name in divisors if (each := getattr(self.text_config, name, None))), None)
        self._cap = getattr(self.text_config, "final_logit_softcapping", None)  # Gemma 2 and later
        self._longest = causal_lm.longest_text(model)
        self._check_logits()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return sizes_of(self._head())[0]

    @property
    def embedding_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def max_length(self) -> float:
        return self._longest

    def embed(self, token: Tensor, are_known: bool = False) -> Tensor:
        """Input embeddings `[..., embedding_size]` of token ids `[...]`, on their device; unknown ids count as 0."""
        weight = self.model.get_input_embeddings().weight
        known = token if are_known else self.known(token)
        return nn.functional.embedding(known.to(weight.device), weight).to(token.device)

    def hidden_states(
        self, input_ids: Tensor, cache: Cache | None = None, *, are_known: bool = False, **inputs: Any
    ) -> Tensor:
        """Last hidden states (after the final norm) `[batch, n, hidden_size]` of `input_ids` `[batch, n]`.

        With a cache they are fed after what it holds, and added to it. `inputs` are further arguments of the forward.
        Unknown ids count as 0, unless they `are_known` to the embedding table.
        """
        return self._decode(cache, input_ids=input_ids if are_known else self.known(input_ids), **inputs)

    def _decode(self, cache: Cache | None, **inputs: Any) -> Tensor:
        if cache is not None:
            inputs[self._cache_argument] = cache
        output = self._decoder(use_cache=cache is not None, **inputs)
        return output.last_hidden_state

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits `[..., vocab_size]` float32 of hidden states `[..., hidden_size]`.

        Cut or padded to `vocab_size`, the width of the target's logits; ids that the model does not have get -inf.
        """
        logits = self._own_logits(hidden)
        return logits if logits.shape[-1] == vocab_size else as_wide_as(vocab_size, logits)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        return self._head_logits(self._head(), hidden)

    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def _head_logits(self, head: Any, hidden: Tensor) -> Tensor:
        """The model's own route from hidden state to logits: the head, then what some families do to its output."""
        if type(head) is nn.Linear:  # Mamba 2 in half precision keeps its residual stream in float32
            logits = head(hidden.to(head.weight.dtype))
        elif hidden.dim() == 1:  # bitsandbytes' layers take matrices only
            logits = head(hidden[None])[0]
        else:
            logits = head(hidden)
        if self._scale is not None:
            logits = logits * self._scale
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits.float()

    def known(self, token_ids: Tensor) -> Tensor:
        """Replace ids beyond the embedding table: a draft then guesses badly, but its guesses are verified."""
        return token_ids.where(token_ids < num_embeddings(self.model), 0)

    def _check_logits(self) -> None:
        """Compare the route above with the model's own forward on one token."""
        probe = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        with trying(self.model) as read:
            try:
                expected = read(probe).logits[0, -1].float()
                hidden = self._decode(None, input_ids=probe, **positions_of(self._decoder, probe))[0, -1]
            except Exception as failure:  # models whose input is more than a text fail in ways of their own
                raise ValueError(
                    f"{type(self.model).__name__} does not read a token by itself ({type(failure).__name__}: "
                    f"{failure}), so it cannot draft. Use another model."
                ) from failure
            if hidden.shape[-1] != self.hidden_size:
                raise ValueError(
                    f"The LM head of {type(self.model).__name__} reads vectors of {self.hidden_size} numbers and its "
                    f"hidden states have {hidden.shape[-1]}: it puts layers in between that hf_specdecpp does not "
                    "know. Use another model."
                )
            actual = self._head_logits(self._head(), hidden)
        # Inkling drops rows that pad its head, and a spread model returns logits to where it began.
        actual = actual[: len(expected)].to(expected.device)
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 5e-2
        error = float((actual - expected).abs().max())
        if not error <= tolerance * max(1.0, float(expected.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} turns hidden states into logits in a way that hf_specdecpp does not know "
                f"(largest difference {error:.3g}), so its probabilities would be wrong. Use another model."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Reader:
        return super()._apply(fn, recurse) if self.owns_model else self


def as_wide_as(vocab_size: int, logits: Tensor) -> Tensor:
    """Logits `[..., vocab_size]` of a draft whose own vocabulary is wider or narrower: -inf for ids that it lacks.

    A target's width may change at any time (`resize_token_embeddings`).
    """
    missing = vocab_size - logits.shape[-1]
    return nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., :vocab_size]
