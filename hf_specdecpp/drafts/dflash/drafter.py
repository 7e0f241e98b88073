"""A DFlash draft as one generation sees it (`DFlashDraft`), and its side of a text (`BlockReading`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_specdecpp.drafting.draft import Beside, Draft
from hf_specdecpp.drafting.drafter import NO_STATES
from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.drafts.dflash.model import DFlashModel, Rows
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import as_wide_as
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.trees.tree import DraftTree


class DFlashDraft(Draft):
    """Drafts blocks with a `DFlashModel` that has met its target.

    Args:
        model: on the target's device, in its dtype.
        target: whose embeddings and LM head it takes where it has none of its own.
    """

    model: DFlashModel
    draft_vocab = None  # all tokens

    def __init__(self, model: DFlashModel, target: CausalLM) -> None:
        self.model, self.settings = model, model.settings
        self.block = self.places = model.settings.places
        own, head = model.embed_tokens, model.lm_head
        self.embeddings = target.get_input_embeddings() if own is None else own
        self.head = target.get_output_embeddings() if head is None else head
        self.beside = Beside(target)

    @property
    def cannot(self) -> Mapping[str, str]:
        return {"unattached": NO_STATES}

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model, self.head]

    @property
    def reads(self) -> StateReader:
        return self.model.reader

    @property
    def hidden_size(self) -> int:
        return self.model.reader.hidden_size

    @property
    def embedding_size(self) -> int:
        return self.model.reader.embedding_size

    def chain_session(self, vocab_size: int) -> BlockReading:
        return BlockReading(self, vocab_size)

    def check_unmoved(self, has_adapter: bool) -> None:  # noqa: ARG002
        self.beside.check()

    def describe(self) -> dict[str, Any]:
        return {"reads": self.settings.to_config(), "draft_vocab": None, "compiled": False}

    def embed(self, tokens: Tensor) -> Tensor:
        """The bare embeddings `[..., hidden_size]` of token ids, on their device; unknown ids count as 0."""
        weight = self.embeddings.weight
        known = tokens.where(tokens < len(weight), 0)
        return functional.embedding(known.to(weight.device), weight).to(tokens.device)

    def block_after(self, anchor: Tensor) -> Tensor:
        """The inputs `[..., block_size, hidden_size]` of a block after the text's last token, `[..., 1]`."""
        ids = functional.pad(
            anchor.to(self.device), (0, self.settings.block_size - 1), value=self.settings.mask_token_id
        )
        embeddings = self.embed(ids)
        scale = self.settings.embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits `[..., vocab_size]` float32 of final states `[..., hidden_size]`; -inf for ids that there are not."""
        return as_wide_as(vocab_size, self.head_logits(hidden))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 of the LM head's own ids."""
        logits = self.head(hidden).to(hidden.device) * self.settings.output_multiplier
        if (cap := self.settings.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


class BlockReading(Reading):
    """What a block draft has read of one text: the target's states at verified tokens. A round takes one pass, or none.

    Args:
        vocab_size: width of the target's logits.
    """

    def __init__(self, draft: DFlashDraft, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size, self.embed = draft, vocab_size, draft.embed
        self.rows = Rows(len(draft.model.layers))
        self._length = 0
        self._pending: list[Tensor] = []  # states `[1, m, width]` that were not read yet
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self._length

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:  # noqa: ARG002
        self._length += new_tokens.shape[1]
        self._anchor, self._found, self.passes = new_tokens[:, -1:].clone(), None, 0
        if states is not None:
            # Fewer than the tokens where a cache is carried on; the text's last token never has any.
            known = min(states.shape[1], self._length - 1)
            self._pending.append(states[:, states.shape[1] - known :])
        self.unread = max(sum(each.shape[1] for each in self._pending), 1)

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        logits, hidden = self._block()
        place = len(candidates)
        return (logits[place], hidden[place]) if place < len(logits) else None

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """By depth: all nodes of a depth have the same distribution, which is the marginal of that place.

        Example: a block of three places a, b, c. The root asks for a, each of its children for b, and nodes at depth 3
        propose nothing.
        """
        logits, hidden = self._block()
        depths = [tree.depths[node] for node in nodes]
        nothing = torch.full_like(logits[0], float("-inf")) if max(depths) >= len(logits) else logits[0]
        rows = [logits[depth] if depth < len(logits) else nothing for depth in depths]
        return torch.stack(rows), torch.stack([hidden[min(depth, len(hidden) - 1)] for depth in depths])

    def keep(self, path: list[int]) -> None:
        """What was accepted comes with the next round, with the target's states."""

    def _block(self) -> tuple[Tensor, Tensor]:
        """Logits `[places, vocab_size]` and final states `[places, hidden_size]` of this round's block."""
        if self._found is None:
            draft = self.draft
            pieces = [each.to(draft.device, draft.dtype) for each in self._pending]
            states = torch.cat(pieces, dim=1)
            first = self._length - 1 - states.shape[1]
            hidden = draft.model(draft.block_after(self._anchor), states, first, self.rows)[0, -draft.settings.places :]
            self._found = draft.logits(hidden, self.vocab_size), hidden
            self._pending, self.unread, self.passes = [], 0, 1
        return self._found
