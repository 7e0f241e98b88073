"""A causal LM that drafts token by token (`Drafter`), and its steps in captured rounds (`ModelSteps`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_specdecpp.caches.masks import Nodes, chain_nodes, kept_chain_nodes, span, why_not_in_place
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window, last_rows
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache, pass_inputs, windows_of
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.drafting.draft import Draft, by_id
from hf_specdecpp.drafting.draft_checks import check_can_draft, check_draft_vocab, check_logits, check_sizes
from hf_specdecpp.drafting.sessions import BatchSession, DraftSession, RowSession
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, num_embeddings
from hf_specdecpp.models.quantised import is_quantised, rows_of, sizes_of
from hf_specdecpp.models.target_states import StateReader

MOST_KEPT = 64  # masks of passes over at most this many tokens are kept for further rounds


class ModelSteps(RoundSteps):
    """Steps in captured rounds of a `Drafter`: a draft model or an early exit, which may read the target's states."""

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.num_layers = len(windows_of(drafter.text_config) or [])

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        drafter, begin = self.drafter, 0
        window = window._replace(tokens=drafter.known(window.tokens))
        logits, hidden = (each[:, None] for each in read(drafter, cache, window, self.vocab_size))
        num_prefix = cache.length.clone()
        knows_all = num_embeddings(drafter.model) >= self.vocab_size
        while True:
            level = yield logits, hidden
            end = begin + level.tokens.shape[1]
            own = None if self.size is None else level.of_parents(hidden)
            if level.seen is None:
                nodes = kept_chain_nodes(1, self.device, begin, len(depths))
            else:
                nodes = Nodes(level.seen, depths, depths[begin:end])
            tokens = level.tokens if knows_all else drafter.known(level.tokens)
            hidden = hidden_states(drafter, cache, tokens, own, nodes, num_prefix)
            logits = drafter.logits(hidden, self.vocab_size)
            cache.length.add_(end - begin)
            begin = end


def read(drafter: Drafter, cache: FixedCache, window: Window, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Read and commit a captured round's window: logits `[rows, vocab_size]` and hidden states at each last token."""
    hidden = last_rows(read_chain(drafter, cache, window.tokens, window.states), window.last)
    cache.length.add_(window.last + 1)
    return drafter.logits(hidden, vocab_size), hidden


def read_chain(drafter: Drafter, cache: FixedCache, tokens: Tensor, states: Tensor | None) -> Tensor:
    """Hidden states `[rows, n, hidden_size]` of a captured pass over `tokens` `[rows, n]`, which follow the tokens in
    `cache`. The pass writes keys and values; `cache.length` does not change."""
    count, device = tokens.shape[1], tokens.device
    nodes = (chain_nodes if count > MOST_KEPT else kept_chain_nodes)(count, device)
    if cache.prompt is not None:  # padding is seen by itself only
        places = span(count, device)
        own = cache.prompt.shown.gather(1, (cache.length[:, None] + places).clamp_max(cache.capacity - 1))
        nodes = Nodes(nodes.seen & (own[:, None] | (places == places[:, None])), places, places)
    return hidden_states(drafter, cache, tokens, states, nodes, cache.length)


def hidden_states(
    drafter: Drafter, cache: FixedCache, tokens: Tensor, states: Tensor | None, nodes: Nodes, num_prefix: Tensor
) -> Tensor:
    """Hidden states `[rows, n, hidden_size]` of a captured pass over `tokens` `[rows, n]` with the attention masks and
    depths in `nodes`, after the first `num_prefix` `[rows]` tokens in `cache`. `states` as in `Drafter`."""
    inputs = pass_inputs(drafter.model, cache, nodes, num_prefix, drafter.max_length)
    return drafter.hidden_states(tokens, cache, states, are_known=True, **inputs)


class Drafter(nn.Module, Draft):
    """The `Draft` of a causal LM, which proposes one candidate per pass. Inner decoder and LM head are called
    separately. Without state of a generation, so several threads may share one. `ValueError` if the model cannot draft,
    `draft_vocab` has invalid or equal ids, the fusion has other sizes, or the model computes logits from hidden states
    in an unknown way.

    Args:
        model: an independent draft, or an early exit of the target (`early_exit.early_exit`).
        draft_vocab: optional int64 token ids; the LM head computes only these, and q is zero elsewhere.
        shares_target: whether the model's tensors are the target's. If so, the model is not registered as a submodule:
            `.to()` and similar calls on the drafter never move or cast the target or the small head.
        fusion: converts the target's hidden states and the tokens' embeddings to the decoder's inputs, for a draft
            that reads such states."""

    session_class, steps_class = DraftSession, ModelSteps
    _decoder: CausalLM
    draft_vocab: Tensor | None
    small_head: nn.Module | None  # computes only the logits of `draft_vocab`

    def __init__(
        self,
        model: CausalLM,
        draft_vocab: Tensor | None = None,
        shares_target: bool = False,
        fusion: StateReader | None = None,
    ) -> None:
        check_can_draft(model)
        super().__init__()
        self.shares_target = shares_target
        if shares_target:
            object.__setattr__(self, "model", model)  # not registered as a submodule
        else:
            self.model = model
        self.text_config = model.config.get_text_config(decoder=True)
        # Looked up once: on small models these look-ups take as long as the matrix multiplications of a step.
        object.__setattr__(self, "_decoder", inner_decoder(model))
        self._cache_argument = causal_lm.cache_argument(self._decoder)
        self._scale = getattr(self.text_config, "logit_scale", None)  # Cohere
        divisors = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, Inkling
        self._divisor = next((each for name in divisors if (each := getattr(self.text_config, name, None))), None)
        self._cap = getattr(self.text_config, "final_logit_softcapping", None)  # Gemma 2 and later
        self.max_length = causal_lm.longest_text(model)
        self.small_head = None
        self._check_logits()
        if draft_vocab is not None:
            draft_vocab = torch.as_tensor(draft_vocab, device=self.device)
            check_draft_vocab(draft_vocab, self.num_ids)
            draft_vocab = draft_vocab.long()
        self.register_buffer("draft_vocab", draft_vocab, persistent=False)
        self.small_head = self._head_of_draft_vocab()
        if fusion is not None:
            check_sizes(fusion, self, type(model).__name__)
        self.fusion = fusion

    @property
    def hidden_size(self) -> int:
        return sizes_of(self.model.get_output_embeddings())[0]

    @property
    def embedding_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    def embed(self, token: Tensor, are_known: bool = False) -> Tensor:
        """Embeddings `[..., embedding_size]` of ids `[...]`, on the device of the ids; ids beyond the embedding table
        count as 0. `are_known`: there are none."""
        weight = self.model.get_input_embeddings().weight
        known = token if are_known else self.known(token)
        return nn.functional.embedding(known.to(weight.device), weight).to(token.device)

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits `[..., vocab_size]` float32, by token id, of final hidden states `[..., hidden_size]`. `vocab_size`:
        the width of the target's logits. Wider logits are cut; ids that the model or `draft_vocab` lacks get -inf."""
        logits, ids = self.head_logits(self.before_head(hidden)), self.draft_vocab
        if ids is None and logits.shape[-1] == vocab_size:
            return logits
        return by_id(logits, vocab_size, ids, 0 if ids is None else self.num_ids)

    def before_head(self, hidden: Tensor) -> Tensor:
        """The LM head's inputs, from the result of `hidden_states`: unchanged, except that EAGLE-3 drafts norm it."""
        return hidden

    def head_logits(self, inputs: Tensor) -> Tensor:
        """Logits `[..., d]` float32 of the LM head's inputs (`before_head`), as the model computes them: some families
        scale and cap them. They are those of the d tokens in `draft_vocab`, in that order, or of all tokens."""
        head: Any = self.small_head or self.model.get_output_embeddings()
        if type(head) is nn.Linear:  # Mamba 2 in half precision keeps its residual stream in float32
            logits = head(inputs.to(head.weight.dtype))
        elif inputs.dim() == 1:  # bitsandbytes' layers take matrices only
            logits = head(inputs[None])[0]
        else:
            logits = head(inputs)
        if self._scale is not None:
            logits = logits * self._scale
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits.float()

    def known(self, token_ids: Tensor) -> Tensor:
        """Return `token_ids` with 0 for ids beyond the embedding table. The output stays exact, as candidates are
        verified; but fewer may be accepted."""
        return token_ids.where(token_ids < num_embeddings(self.model), 0)

    @property
    def num_ids(self) -> int:
        """Number of rows of the LM head."""
        return sizes_of(self.model.get_output_embeddings())[1]

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that a draft step runs. With `draft_vocab` the LM head is the small one (`small_head`)."""
        head = self.small_head or self.model.get_output_embeddings()
        return [inner_decoder(self.model), head, *([] if self.fusion is None else [self.fusion])]

    @property
    def reads(self) -> StateReader | None:
        return self.fusion

    def hidden_states(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        states: Tensor | None = None,
        *,
        are_known: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """Run the decoder on `input_ids` `[batch, n]`: last hidden states (after the final norm) `[batch, n,
        hidden_size]`. A draft with a fusion also gets `states` `[batch, n, size]`, the target's or its own hidden
        states at the token before each. The tokens follow the tokens in `cache`, and are added to the cache. `inputs`:
        further arguments of the decoder. Ids beyond the embedding table count as 0; `are_known`: there are none."""
        if states is None:
            inputs["input_ids"] = input_ids if are_known else self.known(input_ids)
        else:
            fusion, embeddings = cast(StateReader, self.fusion), self.embed(input_ids, are_known)
            inputs["inputs_embeds"] = fusion(states.to(embeddings), embeddings)
        if cache is not None:
            inputs[self._cache_argument] = cache
        output = self._decoder(use_cache=cache is not None, **inputs)
        return output.last_hidden_state

    def _head_of_draft_vocab(self) -> nn.Module | None:
        """A module that computes only the logits of `draft_vocab`; `None` without `draft_vocab`."""
        return None if self.draft_vocab is None else _slice_head(self.model.get_output_embeddings(), self.draft_vocab)

    @torch.inference_mode()
    def renew(self) -> None:
        """Called before each generation: copy the LM head's rows of `draft_vocab` to the small head again if they have
        changed, as after each training step of a target that shares its head with the draft.

        The copy is in place, so that compiled and captured code stays valid. Changes are found by one number of each
        row, since an optimiser changes all; autograd's version counter would miss those of fused optimisers."""
        head, small, ids = self.model.get_output_embeddings(), self.small_head, self.draft_vocab
        if ids is None or not isinstance(small, nn.Linear) or is_quantised(head):
            return
        if not torch.equal(small.weight[:, 0], head.weight[ids, 0]):
            for own, now in zip(small.parameters(), _slice_head(head, ids).parameters(), strict=True):
                own.copy_(now)

    def _check_logits(self) -> None:
        check_logits(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        return super()._apply(fn, recurse) if not self.shares_target else self

    def row_session(self, vocab_size: int) -> RowSession:
        return RowSession(self, vocab_size)

    def batch(self, rows: Sequence[Any]) -> BatchSession:
        return BatchSession(rows)

    @property
    def tree_reader(self) -> CausalLM | None:
        return self.model

    def for_capture(self, fuse: bool) -> Any:
        return for_capture(self, self.model, fuse=fuse)

    def why_not_captured(self) -> str | None:
        if windows_of(self.text_config) is None:
            return "not all of its layers are attention"
        if not causal_lm.takes_positions(causal_lm.inner_decoder(self.model)):
            return f"it {causal_lm.why_no_positions(causal_lm.inner_decoder(self.model))}"
        return why_not_in_place(self.model)


def _slice_head(head: Any, token_ids: Tensor) -> nn.Linear:
    """Make an LM head from copies of the rows `token_ids` of `head`, which may be quantised: the copy is not."""
    with torch.no_grad():
        weight = rows_of(head, token_ids) if is_quantised(head) else head.weight[token_ids]
        bias = getattr(head, "bias", None)  # an adapter around a quantised head has none
        small = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        small.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            small.bias = nn.Parameter(bias[token_ids], requires_grad=False)
    return small
