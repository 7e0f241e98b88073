"""A draft of some of the target's own layers, from its embeddings: any target has one, without a second model."""

from __future__ import annotations

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.kind import Kind, Loading, Parts, Stored, Trainable
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.early_exit import early_exit, per_layer
from hf_specdecpp.models.loading import check_hash, load_model
from hf_specdecpp.serving import Destination, Exported, write_plain_model


def draft_of(config: SpecDecPPConfig, parts: Parts, how: Loading) -> Drafter:
    draft = early_exit(how.target, config.draft_layers or [])
    if parts.adapter is not None:
        draft = add_adapter(draft, parts.adapter, merge=parts.merge)
    if parts.module is not None:
        parts.module.to(draft.device, draft.dtype)
    return Drafter(draft, parts.draft_vocab, shares_target=True, fusion=parts.module)


def export(config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
    if to.target is None:
        raise ValueError(
            "This assistant drafts with layers of a target that its config.json does not name (target_id), so there "
            "are no weights to export. Name it: --target ID_OR_FOLDER."
        )
    target = load_model(to.target, to.revision)
    check_hash(target, config.vocab_hash, config.target_id)
    draft = draft_of(config, parts, Loading(target=target)).model
    exported = write_plain_model(draft, to.target, to.revision, config, to)
    kinds = sorted(name for name, each in per_layer(target.config).items() if len(set(map(str, each))) > 1)
    if kinds and config.draft_layers != list(range(draft.config.num_hidden_layers)):
        exported.notes.append(
            f"The target's layers are of several kinds ({', '.join(kinds)}), and these are not its first ones. An "
            "engine that reckons the kind from a layer's number, as llama.cpp does for some families, drafts badly."
        )
    return exported


def words(config: SpecDecPPConfig, target: str) -> str:
    """Such as "layers 0, 1 of the target"."""
    layers = config.draft_layers or []
    return f"layer{'s' if len(layers) != 1 else ''} {', '.join(map(str, layers))} of {target}"


EARLY_EXIT = Kind(
    name="early_exit",
    rests_on="target",
    draft=draft_of,
    words=words,
    stored=Stored(export=export),
    trainable=Trainable(first_layers=4),
)
