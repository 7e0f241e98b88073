"""A causal LM that drafts token by token (`Drafter`), and its sessions for a sequence (`DraftSession`) and for a row of
a batch (`RowSession`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_specdecpp.caches.cached_context import GrowingContext, PathRows
from hf_specdecpp.caches.masks import tree_inputs, why_not_in_place
from hf_specdecpp.cuda_graphs.fixed_cache import windows_of
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.drafting.draft import Draft, DraftingSession, by_id, slice_head
from hf_specdecpp.drafting.draft_checks import check_can_draft, check_draft_vocab, check_logits, check_sizes
from hf_specdecpp.drafting.model_steps import ModelSteps
from hf_specdecpp.drafting.rows import BatchSession
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, num_embeddings, takes_positions
from hf_specdecpp.models.quantised import is_quantised, sizes_of
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.sampling.randomness import waits_for_reads
from hf_specdecpp.trees.tree import DraftTree, TreePass


class ModelSession(DraftingSession):
    """Base class of a draft model's sessions: decides which tokens of the sequence the model reads in each pass.

    Invariant: between rounds the draft's cache contains a prefix of the verified sequence, each token once.

    A draft that reads the target's states reads each token with the target's state at the token before; the first token
    of the sequence has none and is skipped. It reads candidates with its own states at the token before. After each
    round it rolls back, and reads accepted candidates again, with the target's states. A draft with recurrent layers
    also rolls back to the start of the round, and reads accepted candidates again."""

    length = 0

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        super().__init__()
        self.drafter, self.vocab_size, self.embed = drafter, vocab_size, drafter.embed
        self.reads_states = self.reads_again = drafter.fusion is not None  # the latter: accepted candidates again
        # Whether all emitted and drafted ids are in the embedding table; prompts may contain others.
        self.knows_all = num_embeddings(drafter.model) >= vocab_size
        self.device = drafter.device  # looked up once, which takes as long as a small matrix multiplication
        # Unread tokens `[1, n]` and their states `[1, n, size]`, by round; concatenated when the draft reads them.
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._num_read_candidates = 0
        self._own_states: dict[int, Tensor] = {}  # its own states `[hidden_size]` by tree node; a chain uses 0

    @abstractmethod
    def _keep(self, count: int, of: int) -> None:
        """Called after a round: of the last `of` tokens that the draft has read, keep the first `count` in the cache,
        and remove the others."""

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        # The last token is always read, because the next candidate follows it. It can be an accepted candidate if the
        # rows of a batch end their rounds together.
        keep = 0 if self.reads_again else max(min(num_accepted, self._num_read_candidates, new_tokens.shape[1] - 1), 0)
        self._keep(keep, of=self._num_read_candidates)
        new_tokens = new_tokens[:, keep:]
        if states is not None:
            known = min(states.shape[1], new_tokens.shape[1])  # fewer than tokens if a cache is reused
            new_tokens, states = new_tokens[:, -known:], states[:, -known:]
        if self.length == 0 or not self.knows_all:
            new_tokens = self.drafter.known(new_tokens)
        # A view would keep the whole sequence alive, once per round.
        self._pending.append((new_tokens.clone(), states))
        self.length += keep + new_tokens.shape[1]
        self.unread += new_tokens.shape[1]
        self._num_read_candidates = self.passes = 0

    def next_tokens(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Begin a draft pass: return the tokens `[1, n]` that the pass must read, all unread ones or the last of
        `candidates`, and the states `[1, n, size]` at the token before each (`None` unless the draft reads states)."""
        self.passes += 1
        if candidates:
            self._num_read_candidates += 1
            token = candidates[-1].view(1, 1).to(self.device)
            own = self._own_states[0][None, None].to(self.device) if self.reads_states else None
            return token if self.knows_all else self.drafter.known(token), own
        tokens = torch.cat([each for each, _ in self._pending], dim=1)
        known = [each for _, each in self._pending if each is not None]
        states = torch.cat(known, dim=1) if known else None
        self._pending, self.unread = [], 0
        return tokens.to(self.device), states if states is None else states.to(self.device)


class DraftSession(ModelSession):
    """A draft model's session for a single sequence, with its own KV cache."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.cache = DynamicCache(config=drafter.text_config)
        self.context = GrowingContext(self.cache)
        self._nodes: list[int] = []  # of the round's tree, in the order read

    def _keep(self, count: int, of: int) -> None:
        if self.passes:
            self.context.commit(count, of)

    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self.next_tokens(candidates)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=True)[0, -1]
        self._own_states = {0: hidden}
        if not candidates:
            if not self.context.num_tokens:
                # From here on the cache must be able to roll back. The prompt needs no roll-back: recording it, layers
                # with a sliding window would keep all of it.
                self.cache.activate_past_recording()
            self.context.begin_round()
            self.reads_again = self.reads_states or self.context.rollback_point is not None
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """As in `DraftingSession`. The call for the root reads all unread tokens, of which the root is the last."""
        if nodes == [0]:
            self._nodes = [0]
            logits, hidden = self.propose_next([])
            return logits[None], hidden[None]
        states = None
        if self.reads_states:
            states = torch.stack([self._own_states[tree.parents[node]] for node in nodes])[None]
        read = len(self._nodes)
        self._nodes += nodes
        tokens, ancestors, depths = TreePass(tree, self._nodes).upload(self.device, first=read)
        inputs = {}
        if len(nodes) > 1 or tree.depths[nodes[0]] < read:  # a single node that sees all earlier ones extends a chain
            num_prefix = self.cache.get_seq_length() - read
            inputs = tree_inputs(self.drafter.model, self.cache, ancestors, depths, num_prefix)
        hidden = self.drafter.hidden_states(tokens[None], self.cache, states, are_known=self.knows_all, **inputs)[0]
        self.passes += 1
        self._own_states.update(zip(nodes, hidden, strict=True))
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def commit_path(self, path: list[int]) -> None:
        """As in `DraftingSession`: keep the root and the accepted nodes that were read in the draft's cache.

        If the draft reads states or runs on an accelerator, only the root is kept, and accepted nodes are read again: a
        pass over a few more tokens takes no longer on an accelerator, and moving rows would need an upload."""
        if not self._nodes:  # nothing was drafted
            return
        again = self.reads_states or waits_for_reads(self.device)
        rows = [0, *(self._nodes.index(node) for node in path if node in self._nodes and not again)]
        self.context.commit(len(rows), len(self._nodes), PathRows(rows, torch.tensor(rows, device="cpu")))
        self._num_read_candidates, self._nodes = len(rows) - 1, []


class RowSession(ModelSession):
    """A draft model's session for one row of a batch. `BatchSession` runs the draft for all rows, and stores the row's
    next logits `[vocab_size]` and hidden state in `found`. `num_dropped`: number of the row's last tokens in the cache
    that were rejected and are not removed yet."""

    found: tuple[Tensor, Tensor]
    num_dropped = 0

    def _keep(self, count: int, of: int) -> None:
        self.num_dropped += of - count

    def store(self, logits: Tensor, hidden: Tensor) -> None:
        """Called after a pass over the tokens of `next_tokens`, with logits and hidden state at the last of them."""
        self.found, self._own_states = (logits, hidden), {0: hidden}

    def propose_next(self, _candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `DraftingSession`: returns the result of `BatchSession.run_draft`, which was called before."""
        return self.found


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
        return None if self.draft_vocab is None else slice_head(self.model.get_output_embeddings(), self.draft_vocab)

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
            for own, now in zip(small.parameters(), slice_head(head, ids).parameters(), strict=True):
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
        if not takes_positions(inner_decoder(self.model)):
            return f"it {causal_lm.why_no_positions(inner_decoder(self.model))}"
        return why_not_in_place(self.model)
