"""The steps of a causal LM that drafts in captured rounds (`ModelSteps`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_specdecpp.caches.masks import Nodes, chain_nodes, kept_chain_nodes, span
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window, last_rows
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache, pass_inputs, windows_of
from hf_specdecpp.models.causal_lm import num_embeddings

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


def read(drafter: Any, cache: FixedCache, window: Window, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Read and commit a captured round's window: logits `[rows, vocab_size]` and hidden states at each last token."""
    hidden = last_rows(read_chain(drafter, cache, window.tokens, window.states), window.last)
    cache.length.add_(window.last + 1)
    return drafter.logits(hidden, vocab_size), hidden


def read_chain(drafter: Any, cache: FixedCache, tokens: Tensor, states: Tensor | None) -> Tensor:
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
    drafter: Any, cache: FixedCache, tokens: Tensor, states: Tensor | None, nodes: Nodes, num_prefix: Tensor
) -> Tensor:
    """Hidden states `[rows, n, hidden_size]` of a captured pass over `tokens` `[rows, n]` with the attention masks and
    depths in `nodes`, after the first `num_prefix` `[rows]` tokens in `cache`. `states` as in `Drafter`."""
    inputs = pass_inputs(drafter.model, cache, nodes, num_prefix, drafter.max_length)
    return drafter.hidden_states(tokens, cache, states, are_known=True, **inputs)
