"""EAGLE-3: a layer of its own that reads the target's states, trained here or by others (`docs/ready-made.md`)."""

from __future__ import annotations

import json
from typing import Any

import torch

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.checks import LAYER
from hf_specdecpp.drafts.checkpoints import own_reader, target_of
from hf_specdecpp.drafts.conditioned import NO_LATE_VERDICTS
from hf_specdecpp.drafts.eagle3 import checkpoint
from hf_specdecpp.drafts.eagle3.checkpoint import FLAGS, OF_QWEN3, build, tensors_of
from hf_specdecpp.drafts.eagle3.meeting import BELONGS, meanings, meet, misfit, usual_reads
from hf_specdecpp.drafts.eagle3.model import Eagle3Drafter, Eagle3Model, Eagle3Settings
from hf_specdecpp.drafts.kind import Config, Format, Kind, Loading, OwnFile, Parts, Trainable, pinned
from hf_specdecpp.files import CHECKPOINT, save_tensors, save_text
from hf_specdecpp.models.loading import load_model_config
from hf_specdecpp.serving import Destination, Exported, eagle3_commands

WRITTEN = [name for name in LAYER if name not in (*OF_QWEN3, "rope_parameters")]  # of the layers


def fields(raw: Config) -> dict[str, Any]:
    """What a config says of an assistant; `ValueError` if it is damaged."""
    checkpoint.read_config(raw)
    return {"target_id": target_of(raw)}


def facts(module: Any) -> dict[str, str]:
    settings: Eagle3Settings = module.settings
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


def export(config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG001
    """Write the draft in the original dialect, which vLLM, SGLang and llama.cpp read."""
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


def flat_config(settings: Eagle3Settings, reads: list[int], target: Any) -> dict[str, Any]:
    """The config that describes a draft to other engines; `ValueError` if its layers are of another type.

    What is usual is left out, since engines differ in what they understand by it. Layers of the target that are not the
    usual ones to read stand there twice: in `eagle_config` by what comes out of them (SGLang), at the top by what goes
    into them (vLLM).

    Example: of a target of 32 layers `reads=[1, 15, 28]` is usual. `[3, 15, 28]` stands there as itself and as
    `[4, 16, 29]`.
    """
    if settings.layer["model_type"] != "llama":
        raise ValueError(
            f"The draft has layers of type {settings.layer['model_type']!r}, which only vLLM serves, from the "
            "repository that it was loaded from. Nothing is exported."
        )
    layer = settings.layer_config().to_dict()
    rope = dict(layer["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: layer[name] for name in WRITTEN},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": settings.draft_vocab_size or layer["vocab_size"],
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{name: True for name in FLAGS if getattr(settings, name)},
    }
    if settings.state_size != layer["hidden_size"]:
        config["target_hidden_size"] = settings.state_size
    if reads != usual_reads(target.num_hidden_layers):
        ids: dict[str, Any] = {"use_aux_hidden_state": bool(reads)}
        if reads:
            ids["eagle_aux_hidden_state_layer_ids"] = reads
            config["eagle_aux_hidden_state_layer_ids"] = [read + 1 for read in reads]
            config["num_aux_hidden_states"] = len(reads)
        config["eagle_config"] = ids
    return config


def notes(settings: Eagle3Settings, reads: list[int], depth: int) -> list[str]:
    """What of it some engine does not serve, in whole sentences."""
    found = []
    if reads != usual_reads(depth):
        found.append(
            f"The draft reads the outputs of layers {reads} of its target, where {usual_reads(depth)} are usual: "
            "llama.cpp, and vLLM and SGLang before 2026, read the usual ones whatever the config says, and would draft "
            "badly."
        )
    flags = [name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(settings, name)]
    if flags:
        found.append(
            f"The draft has {' and '.join(flags)} (EAGLE-3.1): new versions of vLLM and SGLang serve that, llama.cpp "
            "and older ones do not."
        )
    return found


def words(config: SpecDecPPConfig, target: str = "the target") -> str:
    if config.draft_id is None:
        return f"an EAGLE-3 layer, which reads states of {target}"
    otherwise = ", ".join(f"{name}={value}" for name, value in (config.eagle3 or {}).items())
    return f"EAGLE-3 {pinned(config)}{f', read with {otherwise}' if otherwise else ''}"


def draft_of(config: SpecDecPPConfig, parts: Parts, how: Loading) -> Eagle3Drafter:
    meet(parts.module, how.target, words(config))
    return Eagle3Drafter(parts.module, how.target)


# A draft of the world's most common kind; `config.draft_id` names the repository that others trained it in.
EAGLE3 = Kind(
    name="eagle3",
    rests_on="target",
    draft=draft_of,
    describe=words,
    own=OwnFile("eagle3.safetensors", "eagle3", own_reader(Eagle3Settings, build, checkpoint.TITLE), tensors_of),
    format=Format(  # the original dialect, and that of speculators
        checkpoint.read_model,
        checkpoint.looks_like_one,
        checkpoint.is_marked,
        misfit,
        BELONGS,
        fields,
        facts,
        checkpoint.check_overrides,
        Eagle3Model,
        no_model="an EAGLE-3 draft is none by itself. Give the folder or Hub id of its files",
    ),
    export=export,
    trainable=Trainable(
        own_layers=True,
        cannot={
            "stay untrained": "the layer has to be trained, so leave it on, or name the repository of a ready-made "
            "one: draft=REPO",
            "late verdicts": NO_LATE_VERDICTS,
        },
    ),
)
