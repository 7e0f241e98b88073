"""A DFlash draft as one generation sees it (`DFlashDraft`), and its side of a text (`BlockReading`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafts.dflash.model import DFlashModel, Rows, View
from hf_specdecpp.drafts.state_draft import StateDraft
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import as_wide_as
from hf_specdecpp.trees.tree import DraftTree


class DFlashDraft(StateDraft):
    """Drafts blocks with a `DFlashModel` that has met its target.

    Args:
        model: on the target's device, in its dtype.
        target: whose embeddings and LM head it takes where it has none of its own.
    """

    model: DFlashModel

    def __init__(self, model: DFlashModel, target: CausalLM) -> None:
        super().__init__(model, model.reader, target)
        self.settings = model.settings
        self.block = self.places = model.settings.places
        own, head = model.embed_tokens, model.lm_head
        self.embeddings = target.get_input_embeddings() if own is None else own
        self.head = target.get_output_embeddings() if head is None else head

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model, self.head]

    def session(self, vocab_size: int) -> BlockReading:
        return BlockReading(self, vocab_size)

    def describe(self) -> dict[str, Any]:
        return {"reads": self.settings.to_config(), "draft_vocab": None, "captured": False}

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

    def blocks_after(self, input_ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Final states `[batch, a, places, hidden_size]` of the block after each anchor, as in a round there.

        A block sees the text before its anchor and its own rows, and nothing of the other blocks.

        Example: anchors 3 and 5, blocks of 2 rows. Rows 0 and 1 stand at the positions 3 and 4 of the text and see the
        target's states at 0, 1 and 2; rows 2 and 3 stand at 5 and 6 and see those at 0 to 4.

        Args:
            input_ids: `[batch, n]`.
            states: `[batch, n, width]`, the target's at each token.
            anchors: `[batch, a]`, places of tokens in the text, each at least 1.
        """
        size = self.settings.block_size
        blocks = self.block_after(input_ids.gather(1, anchors)[..., None]).to(self.dtype)  # [batch, a, b, hidden_size]
        context = self.model.reader(states)
        batch, length = context.shape[:2]
        text = torch.arange(length, device=anchors.device)
        rows = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        positions = torch.cat((text.expand(batch, -1), rows), dim=1)
        own = torch.arange(rows.shape[1], device=anchors.device) // size
        is_own = own[:, None] == own
        before = text < anchors.repeat_interleave(size, dim=1)[..., None]  # [batch, a * b, n]
        seen = torch.cat((before, is_own.expand(batch, -1, -1)), dim=2)

        def mask(view: View, _keys: Tensor) -> Tensor:
            reach, is_causal = view
            back = rows[..., None] - positions[:, None]
            visible = seen & (back >= 0) if is_causal else seen
            return (visible if reach is None else visible & (back.abs() <= reach))[:, None]

        hidden = self.model.through(blocks.flatten(1, 2), context, positions, mask)
        return hidden.unflatten(1, (-1, size))[:, :, -self.settings.places :]

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
