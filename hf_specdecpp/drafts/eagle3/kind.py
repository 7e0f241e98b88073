"""EAGLE-3: a layer of its own that reads the target's states, trained here or by others (`docs/ready-made.md`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.modules import as_described
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.drafts.conditioned import Conditioned
from hf_specdecpp.drafts.eagle3.checkpoint import build, read_model, tensors_of
from hf_specdecpp.drafts.eagle3.description import FLAGS, check_overrides, is_marked, looks_like_one, read_description
from hf_specdecpp.drafts.eagle3.drafter import Eagle3Drafter
from hf_specdecpp.drafts.eagle3.flat_config import flat_config, notes
from hf_specdecpp.drafts.eagle3.layer_ids import meanings
from hf_specdecpp.drafts.eagle3.meeting import meet
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.drafts.eagle3.self_check import GOOD, TEXT, better, compare
from hf_specdecpp.drafts.eagle3.settings import Eagle3Settings
from hf_specdecpp.drafts.kind import Feat, Parts, SelfCheck
from hf_specdecpp.drafts.ready_made import ReadyMade, is_model
from hf_specdecpp.files import (
    CHECKPOINT,
    PICKLE,
    Repository,
    find_weights,
    read_fields,
    read_weights,
    save_tensors,
    save_text,
)
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model_config
from hf_specdecpp.serving.commands import eagle3_commands
from hf_specdecpp.serving.destination import Destination, Exported

WEIGHTS = "eagle3.safetensors"  # of a draft that was trained here


class Eagle3(ReadyMade):
    """A draft of the world's most common kind; `config.draft_id` names the repository that others trained it in."""

    name = "eagle3"
    title = "EAGLE-3"
    module_files = (WEIGHTS,)
    can_be_misread = True
    own_layer = True
    cannot: ClassVar[Mapping[Feat, str]] = {
        **Conditioned.cannot,
        "stays untrained": "the layer has to be trained, so leave it on, or name the repository of a ready-made one: "
        "draft=REPO",
    }

    def owns(self, raw: Mapping[str, Any]) -> bool:
        return super().owns(raw) or looks_like_one(raw)

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return is_marked(raw)

    def read_config(self, raw: dict[str, Any], source: Repository, commit: str | None) -> SpecDecPPConfig:
        if not looks_like_one(raw):
            return super().read_config(raw, source, commit)
        return self.config_of(source, commit, target_id=read_description(raw).target_id)

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"an EAGLE-3 layer, which reads states of {target}"
        otherwise = ", ".join(f"{name}={value}" for name, value in (config.eagle3 or {}).items())
        return f"{self.pinned(config)}{f', read with {otherwise}' if otherwise else ''}"

    def override(self, config: SpecDecPPConfig, values: Any) -> None:
        if config.draft_id is None:
            super().override(config, values)
        config.eagle3 = dict(check_overrides(values))

    def read_module(self, config: SpecDecPPConfig, path: Path) -> Eagle3Model:
        if config.draft_id is not None:
            description = read_description(read_fields(path.parent / "config.json"), config.eagle3)
            return read_model(description, read_weights(path), str(path))
        if config.eagle3 is None:
            raise ValueError("The config describes an EAGLE-3 draft and not its settings. Save the assistant again.")
        return self.read_layers(config.eagle3, path)

    def read_layers(self, arguments: dict[str, Any], path: Path) -> Eagle3Model:
        with as_described("EAGLE-3 draft"):
            check_arguments(Eagle3Settings, arguments)
            settings = Eagle3Settings(**arguments)
        return build(settings, read_weights(path), str(path))

    def tensors_of(
        self, module: Any, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return tensors_of(module, state, dtype)

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> Eagle3Model:
        if config.draft_id is None:
            return self.read_module(config, repository.file(WEIGHTS))
        if is_model(draft):
            raise ValueError(
                f"draft={type(draft).__name__} is a model, and an EAGLE-3 draft is none by itself. Give the folder or "
                f"Hub id of a copy of {config.draft_id!r}."
            )
        source = self.source(config, repository, draft)
        source.file("config.json")
        if (path := find_weights(source)) is None:
            raise ValueError(
                f"{source.full_name!r} has no {CHECKPOINT}. EAGLE's own repositories have {PICKLE}, a pickle, which "
                "could run code and is never opened here. Convert it once, tensors only: "
                f"specdecpp inspect {source.full_name} --convert FOLDER. Then load FOLDER."
            )
        return self.read_module(config, path)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        if config.draft_id is None:
            config.eagle3 = module.settings.to_config()

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        if config.draft_id is None:
            save_tensors(tensors_of(module), folder / WEIGHTS)

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> Eagle3Drafter:
        meet(parts.module, target, self.describe(config))
        drafter = Eagle3Drafter(parts.module, target)
        drafter.suspect = None if config.draft_id is None else self.describe(config)
        return drafter

    def facts(self, module: Any) -> dict[str, str]:
        return _facts(module.settings)

    def check_foreign(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> None:
        read_model(read_description(raw), tensors, source)

    def self_check(self, config: SpecDecPPConfig, module: Any, target: CausalLM, tokenizer: Any) -> SelfCheck:
        self.make(config, Parts(module=module), target)
        found = compare(module, target, tokenizer(TEXT, return_tensors="pt")["input_ids"])
        best = better(found)
        remarks = []
        if best is not None:
            override = {**(config.eagle3 or {}), **best.overrides}
            remarks.append(f"Another reading agrees far better: {best.name}. Load the draft with eagle3={override}.")
        if (share := (best or found[0]).agreement[0]) < GOOD:
            remarks.append(
                f"Only {share:.0%} of the first candidates agree, and a draft for this target has {GOOD:.0%} or more: "
                "it is probably for another target, or read in a way that is not listed here."
            )
        fine = "The draft agrees as one for this target should, and no other reading agrees better by far."
        return SelfCheck([(each.name, each.agreement) for each in found], remarks or [fine])

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        model: Eagle3Model = parts.module
        if to.target is None:
            raise ValueError(
                "The config of this draft names no target, and what it reads depends on it. Name it: --target ID."
            )
        target = load_model_config(to.target).get_text_config(decoder=True)
        depth = target.num_hidden_layers
        reads = meanings(model.settings, depth)[0]
        described = flat_config(model.settings, reads, target)
        save_tensors(tensors_of(model, dtype=torch.bfloat16), to.folder / CHECKPOINT)
        save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
        return Exported(eagle3_commands(to), notes(model.settings, reads, depth))


def _facts(settings: Eagle3Settings) -> dict[str, str]:
    """What a draft is, in words."""
    layer, ids, count = settings.layer, settings.layer_ids, settings.draft_vocab_size
    if settings.num_reads == 0:
        reads = "its final state"
    elif settings.reads or (ids and ids[0] == 1):
        reads = f"outputs of layers {', '.join(map(str, settings.reads or ids or []))}, counted from 0"
    elif ids is None:
        reads = "outputs of the usual three layers, since its config names none"
    else:
        reads = f"layers {ids}, where it depends on the target whether these are inputs or outputs (--target ID)"
    flags = [name for name in FLAGS if getattr(settings, name)]
    own = {True: "its own", False: "the target's"}
    return {
        "draft": f"EAGLE-3, {layer['num_hidden_layers']} x {layer['model_type']}, {layer['hidden_size']} wide",
        "reads of the target": reads,
        "flags": ", ".join(flags) or "none",
        "rope_theta": f"{settings.layer_config().rope_parameters['rope_theta']:g}",
        "draft vocabulary": f"{count or 'all'} of {layer['vocab_size']} token ids",
        "embeddings, LM head": f"{own[settings.own_embeddings]}, {own[settings.own_head]}",
    }
