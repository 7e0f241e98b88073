"""The kinds of draft without modules of this package: a smaller model (`Independent`, which includes PARD drafts), some
of the target's layers (`EarlyExit`), and no draft model (`Lookup`): candidates are copied from earlier text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.draft_kinds import pard
from hf_specdecpp.draft_kinds.draft_kind import DraftKind, Loading, Parts, draft_of, pinned, raw_config, target_for
from hf_specdecpp.drafting.draft import Draft, DraftingSession
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.files import Repository
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.causal_lm import CausalLM, base_model
from hf_specdecpp.models.early_exit import early_exit, per_layer
from hf_specdecpp.models.loading import check_hash, check_named_draft, load_model
from hf_specdecpp.serving import Destination, Exported, write_plain_model


class Independent(DraftKind):
    """Draft with a smaller model that has the target's tokenizer."""

    name = "independent"
    rests_on = "draft"
    is_named = True

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        return pinned(config)

    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Drafter:
        """As in `DraftKind`. An adapter is merged into a model that is loaded here, not into a user's model object."""
        chosen, revision = draft_of(config, how.draft)
        is_named = isinstance(chosen, str | Path)
        source: Any = Repository(str(chosen), revision, None, how.hub_kwargs) if is_named else base_model(chosen)
        raw = raw_config(source) or {}
        mask_token = pard.mask_token_of(raw)  # before weights are read
        if how.target is not None and is_named:
            check_named_draft(source, raw, how.target, parts.draft_vocab is not None)
        likewise = ("auto", "cpu") if how.target is None else (how.target.dtype, how.target.device)
        place = how.dtype or likewise[0], how.device or likewise[1]
        model = (load_model(source, None, *place) if is_named else source).eval()  # dropout would change q
        if parts.adapter is not None:
            model = add_adapter(model, parts.adapter, merge=is_named)
        vocab = parts.draft_vocab
        return Drafter(model, vocab) if mask_token is None else pard.ParallelDrafter(model, vocab, mask_token)

    def refuse_published(self, draft: CausalLM) -> None:
        if pard.mask_token_of(draft.config.to_dict()) is not None:
            raise ValueError(
                f"{draft.config.name_or_path!r} is a PARD draft, for which nothing is trained or exported here. vLLM "
                "serves it from its own repository (method draft_model, parallel_drafting)."
            )

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        model = self.make(config, parts, Loading()).model
        self.refuse_published(model)
        return write_plain_model(model, str(config.draft_id), config.draft_revision, config, to)


class EarlyExit(DraftKind):
    """Draft with some of the target's layers, its final norm and its LM head."""

    name = "early_exit"
    first_layers: ClassVar[int | None] = 4

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """Example: "layers 0, 1 of the target"."""
        layers = config.draft_layers or []
        return f"layer{'s' if len(layers) != 1 else ''} {', '.join(map(str, layers))} of {target}"

    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Drafter:
        draft = early_exit(how.target, config.draft_layers or [])
        if parts.adapter is not None:
            draft = add_adapter(draft, parts.adapter, merge=parts.merge)
        if parts.module is not None:
            parts.module.to(draft.device, draft.dtype)
        return Drafter(draft, parts.draft_vocab, shares_target=True, fusion=parts.module)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        name = target_for(to)
        target = load_model(name, to.revision)
        check_hash(target, config.vocab_hash, config.target_id)
        draft = self.make(config, parts, Loading(target=target)).model
        exported = write_plain_model(draft, name, to.revision, config, to)
        kinds = sorted(field for field, each in per_layer(target.config).items() if len(set(map(str, each))) > 1)
        if kinds and config.draft_layers != list(range(draft.config.num_hidden_layers)):
            exported.notes.append(
                f"The target's layers are of several kinds ({', '.join(kinds)}), and these are not its first ones. An "
                "engine that reckons the kind from a layer's number, as llama.cpp does for some families, drafts badly."
            )
        return exported


class Lookup(DraftKind):
    """Draft without a model: all candidates are copied from earlier text."""

    name = "lookup"
    rests_on = "nothing"
    unserved = (
        "This assistant looks its candidates up and has no draft, so there is nothing to export. Engines look "
        "candidates up by themselves, such as vLLM with the method ngram."
    )
    untrainable = "there is nothing to train where all candidates are looked up"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        return "lookups in earlier text"

    def make(self, *_: Any) -> Draft:
        return NoDraft()


class NoSteps(RoundSteps):
    """The steps of `NoDraft` in captured rounds: none, since such rounds only look up. `unroll` is never called."""

    most, num_layers = 0, 0

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        raise NotImplementedError

    def read(self, cache: FixedCache, window: Window) -> None:
        pass


class NoDraft(Draft):
    """The `Draft` of `Lookup`, which proposes no candidates: lookups do not use drafts (`lookup.looking_up`)."""

    model = None
    device, dtype = torch.device("cpu"), torch.float32
    places = 0
    steps_class = NoSteps

    def embed(self, tokens: Tensor) -> Tensor:
        """Never called: only acceptance heads use embeddings, of drafted candidates."""
        raise NotImplementedError

    def captured_copy(self, fuse: bool) -> Any:
        self.captured = found = self.captured or ([], self)  # else `give_up` has refused
        return found[1]

    def session(self, vocab_size: int) -> NoSession:
        return NoSession(self)


class NoSession(DraftingSession):
    """The session of `NoDraft`: reads nothing, and proposes nothing."""

    length = 0

    def __init__(self, draft: NoDraft) -> None:
        super().__init__()
        self.embed = draft.embed

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        pass

    def propose_next(self, _candidates: list[Tensor]) -> None:
        pass
