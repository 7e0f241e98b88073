"""PARD drafts (arXiv 2504.18583): a causal LM that proposes a block of candidates with one pass over the last token and
mask tokens (`ParallelDrafter`). One draft serves all models with its tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.config.value_checks import check_values
from hf_specdecpp.cuda_graphs.draft_steps import Unrolled, Window
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.draft_kinds.draft_kind import Config
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.drafter import Drafter, DraftSession
from hf_specdecpp.drafting.model_steps import ModelSteps, read_chain
from hf_specdecpp.models.causal_lm import CausalLM, num_embeddings
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.trees.tree import DraftTree

BLOCK = 12  # candidates per pass: configs name no number, and the authors' results are with 12


def mask_token_of(raw: Config) -> int | None:
    """Return the id of the mask token in a model's `config.json`; `None` for models that are no PARD drafts.
    `ValueError` for PARD-2, or if the id is invalid."""
    if raw.get("pard2") or raw.get("spd_type") == "pard2" or "pard2_target_layers" in raw:
        raise ValueError(
            "This is a PARD-2 draft, which reads the target's states with weights from a pickle (warp_model.bin), and "
            "pickles could run code. Use a PARD draft (amd/PARD-Qwen3-0.6B) or another one: specdecpp drafts MODEL."
        )
    found = {"pard_token": raw.get("pard_token")}
    check_values(found, {"pard_token": int if raw.get("spd_type") == "pard" else int | None})
    return found["pard_token"]


class MaskSession(DraftSession):
    """Session for one sequence. A round has one draft pass, over the unread tokens and the mask tokens."""

    drafter: ParallelDrafter

    def propose_next(self, candidates: list[Tensor]) -> Any:
        logits, hidden = self._block()
        return next(zip(logits[len(candidates) :], hidden[len(candidates) :], strict=True), None)

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """As in `DraftSession`: a node at depth k gets the logits of candidate k (from 0), behind the block -inf."""
        logits, hidden = self._block()
        depths = torch.tensor([tree.depths[node] for node in nodes], device=logits.device)
        rows = depths.clamp_max(len(logits) - 1)
        return logits[rows].masked_fill((depths > rows)[:, None], float("-inf")), hidden[rows]

    def _block(self) -> tuple[Tensor, Tensor]:
        """Logits `[n, vocab_size]` and hidden states `[n, hidden_size]` of the round's only block, for n candidates."""
        if not self.passes:
            drafter = self.drafter
            count = int(max(min(drafter.block, drafter.max_length - self.length + 1), 1))  # positions may end
            tokens, _ = self.next_tokens([])
            self.cache.activate_past_recording()
            self.context.begin_round()
            read = functional.pad(tokens, (0, count - 1), value=drafter.mask_token)
            hidden = drafter.hidden_states(read, self.cache, are_known=True)[0, -count:]
            self.context.commit(tokens.shape[1], of=read.shape[1])
            self.found = drafter.logits(hidden, self.vocab_size), hidden
        return self.found


class MaskSteps(ModelSteps):
    """`MaskSession` for captured rounds: the mask tokens follow the last token and overwrite dummies of the window."""

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.most, self.behind = drafter.places, drafter.block - 1

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        drafter = self.drafter
        rows = window.last[:, None] + torch.arange(drafter.block, device=window.last.device)
        tokens = functional.pad(drafter.known(window.tokens), (0, self.behind))
        tokens = tokens.scatter(1, rows[:, 1:], drafter.mask_token)
        hidden = read_chain(drafter, cache, tokens, None)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[2]))
        cache.length.add_(window.last + 1)
        logits, width = drafter.logits(hidden, self.vocab_size), 1
        for row, state in zip(logits.split(1, 1), hidden.split(1, 1), strict=True):
            level = yield row.expand(-1, width, -1), state.expand(-1, width, -1)
            width = level.tokens.shape[1]


class ParallelDrafter(Drafter):
    """A causal LM that proposes `block` candidates with one pass. `ValueError` if the mask token M has no embedding, or
    the model has recurrent states.

    Example: with `block=3` the pass after a b c reads a b c M M. Logits at c, M, M are those of three candidates."""

    session_class, steps_class = MaskSession, MaskSteps
    row_session: Any = Draft.row_session
    batch = Draft.batch
    tree_reader = None  # candidates are read as verified tokens only

    def __init__(self, model: CausalLM, draft_vocab: Tensor | None, mask_token: int, block: int = BLOCK) -> None:
        known = num_embeddings(model)
        if not 0 <= mask_token < known or keeps_recurrent_state(model):
            raise ValueError(
                f"{type(model).__name__} cannot be a PARD draft: its mask token (pard_token={mask_token}) needs one of "
                f"its {known} embeddings, and recurrent states cannot drop mask tokens. Use another draft."
            )
        super().__init__(model, draft_vocab)
        self.mask_token, self.block, self.places = mask_token, block, block
