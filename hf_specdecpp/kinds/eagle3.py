"""EAGLE-3: a layer of its own that reads the target's states, trained here or by others (`docs/ready-made.md`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import logging

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.modules import as_described
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.eagle3.checkpoint import build, read_model, tensors_of
from hf_specdecpp.eagle3.description import is_marked, looks_like_one, read_description
from hf_specdecpp.eagle3.drafter import Eagle3Drafter
from hf_specdecpp.eagle3.flat_config import flat_config, notes
from hf_specdecpp.eagle3.layer_ids import readings
from hf_specdecpp.eagle3.model import Eagle3Model
from hf_specdecpp.eagle3.self_check import TEXT, choose
from hf_specdecpp.eagle3.settings import Eagle3Settings
from hf_specdecpp.files import Repository, load_tensors, read_json, save_tensors, save_text
from hf_specdecpp.kinds.conditioned import Conditioned
from hf_specdecpp.kinds.kind import Feat, Kind, Loading, Parts
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.loading import load_model_config
from hf_specdecpp.models.vocabulary import tokenizer_of
from hf_specdecpp.serving.commands import eagle3_commands
from hf_specdecpp.serving.destination import Destination, Exported

logger = logging.get_logger("hf_specdecpp")

WEIGHTS, CHECKPOINT = "eagle3.safetensors", "model.safetensors"  # of a draft trained here; of others' repositories
PICKLE = "pytorch_model.bin"


class Eagle3(Kind):
    """A draft of the world's most common kind; `config.draft_id` names the repository that others trained it in."""

    name = "eagle3"
    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "target"
    module_files = (WEIGHTS, CHECKPOINT)
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
        description = read_description(raw)
        return SpecDecPPConfig(
            draft_kind=self.name,
            draft_id=str(Path(source.name, source.subfolder or "")) if source.is_local else source.name,
            draft_revision=commit,
            target_id=description.target_id,
            draft_vocab_size=None,
            speculation=SpeculationConfig(rule="throughput").to_dict(),
        )

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"an EAGLE-3 layer, which reads states of {target}"
        return f"EAGLE-3 {config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"

    def check_shareable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is not None and Path(config.draft_id).exists():
            raise ValueError(
                f"The EAGLE-3 draft {config.draft_id!r} is a local folder, so nobody else could load this assistant. "
                "Push the draft first, and load it from its Hub id."
            )

    def module_file(self, config: SpecDecPPConfig) -> str | None:
        if config.draft_id is None:
            return WEIGHTS
        return CHECKPOINT if config.draft_id == config.name_or_path else None

    def read_module(self, config: SpecDecPPConfig, path: Path) -> Eagle3Model:
        if config.draft_id is not None:
            description = read_description(read_json(path.parent / "config.json"), config.eagle3)
            return read_model(description, load_tensors(path), str(path))
        if config.eagle3 is None:
            raise ValueError("The config describes an EAGLE-3 draft and not its settings. Save the assistant again.")
        return read_layer(config.eagle3, path)

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> Eagle3Model:
        if config.draft_id is None:
            return self.read_module(config, repository.file(WEIGHTS))
        named = config.draft_id if draft is None else str(draft)
        pinned = config.draft_revision if draft is None else None
        is_itself = named == repository.name
        source = repository if is_itself else Repository(named, pinned, None, repository.hub_kwargs)
        source.file("config.json")
        try:
            path = source.file(CHECKPOINT)
        except (FileNotFoundError, EntryNotFoundError) as error:
            raise ValueError(
                f"{named!r} has no {CHECKPOINT}. EAGLE's own repositories have {PICKLE}, a pickle, which could run "
                "code and is never opened here. Convert it once, tensors only: "
                f"specdecpp inspect {named} --convert FOLDER. Then load FOLDER."
            ) from error
        return self.read_module(config, path)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        if config.draft_id is None:
            config.eagle3 = module.settings.to_config()

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        if config.draft_id is None:
            save_tensors(tensors_of(module), folder / WEIGHTS)

    def load(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> None:
        """It is made of a target."""

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> Eagle3Drafter:
        meet(parts.module, target, self.describe(config))
        return Eagle3Drafter(parts.module, target)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        model: Eagle3Model = parts.module
        if to.target is None:
            raise ValueError(
                "The config of this draft names no target, and what it reads depends on it. Name it: --target ID."
            )
        target = load_model_config(to.target).get_text_config(decoder=True)
        depth, reads = target.num_hidden_layers, model.settings.reads
        if reads is None:
            reads = readings(model.settings.layer_ids, depth)[0] if model.settings.num_reads else []
        described = flat_config(model.settings, reads, target)
        tensors = {
            name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors_of(model).items()
        }
        save_tensors(tensors, to.folder / CHECKPOINT)
        save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
        return Exported(eagle3_commands(to), notes(model.settings, reads, depth))

    def usual_layers(self, depth: int) -> int | list[int]:
        return [depth - 1]


def read_layer(arguments: dict[str, Any], path: Path) -> Eagle3Model:
    """The layer with these settings, trained here, whose tensors are in `path`.

    Raises:
        ValueError: the settings make no sense, or the file is damaged or does not fit them.
    """
    with as_described("EAGLE-3 draft"):
        check_arguments(Eagle3Settings, arguments)
        settings = Eagle3Settings(**arguments)
    return build(settings, load_tensors(path), str(path))


def meet(model: Eagle3Model, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
    """Bring a draft to its target, and find out which layers it reads.

    Args:
        name: of the draft, for messages.
        dtype: by default the target's.

    Raises:
        ValueError: the draft was made for another target.
    """
    _check_fits(model, target, name)
    model.to(device=input_device(target), dtype=dtype or target.dtype)  # type: ignore[call-arg]
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    known = model.settings.reads
    meanings = [known] if known is not None else [[]]
    if known is None and model.settings.num_reads:
        meanings = readings(model.settings.layer_ids, depth)
    model.meet(target, meanings[0])
    if len(meanings) > 1:
        _settle(model, target, meanings)


def _check_fits(model: Eagle3Model, target: CausalLM, name: str) -> None:
    """Raise `ValueError` unless a draft was made for a target of these sizes."""
    config = target.config.get_text_config(decoder=True)
    settings = model.settings
    if settings.state_size != config.hidden_size:
        raise ValueError(
            f"{name} reads states of {settings.state_size} numbers, and those of {type(target).__name__} have "
            f"{config.hidden_size}. It was trained for another target."
        )
    largest = int(model.token_ids.max()) if model.token_ids is not None else -1
    if largest >= config.vocab_size:
        raise ValueError(
            f"{name} proposes token ids up to {largest}, and {type(target).__name__} has {config.vocab_size}. It was "
            "trained for a target with another tokenizer."
        )
    if settings.layer["vocab_size"] != config.vocab_size:
        logger.warning(
            f"{name} was made for {settings.layer['vocab_size']} token ids, and the target has {config.vocab_size}. "
            "That is harmless padding if it is the same tokenizer; if almost nothing is accepted, it is not."
        )


def _settle(model: Eagle3Model, target: CausalLM, meanings: list[list[int]]) -> None:
    """Read the layers with which the draft guesses best, where its config may mean several."""
    ids = model.settings.layer_ids
    tokenizer = tokenizer_of(target.config.name_or_path)
    if tokenizer is None:
        logger.warning(
            f"eagle_aux_hidden_state_layer_ids={ids} may mean the outputs of layers {' or '.join(map(str, meanings))}; "
            f"the former are read. If little is accepted, say otherwise: eagle3={{'reads': {meanings[1]}}}."
        )
        return
    text = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    chosen = choose(model, target, meanings, text)
    model.meet(target, chosen)
    logger.info(f"eagle_aux_hidden_state_layer_ids={ids} means the outputs of layers {chosen}: these agree best.")
