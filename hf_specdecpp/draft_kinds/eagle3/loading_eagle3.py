"""EAGLE-3 drafts (`Eagle3`), trained by this package or published (`docs/ready-made.md`): read the files, whose tensor
names depend on the format, bind a draft to its target, and export it to other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import LAYER, SLIDING
from hf_specdecpp.draft_kinds import checkpoints
from hf_specdecpp.draft_kinds.acceptance import agreements
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, Names, target_of
from hf_specdecpp.draft_kinds.conditioned import NO_LATE_VERDICTS
from hf_specdecpp.draft_kinds.draft_kind import Config, Parts, StoredKind, pinned
from hf_specdecpp.draft_kinds.eagle3 import config_eagle3
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import FLAGS, OF_QWEN3, Eagle3Settings, meanings, usual_reads
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Drafter, Eagle3Model
from hf_specdecpp.files import CHECKPOINT, save_tensors, save_text
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model_config, outside
from hf_specdecpp.serving import AS_EAGLE3, Destination, Exported, commands_for

logger = logging.get_logger("hf_specdecpp")


# Patterns from names in a file to names in `Eagle3Model`, applied in order.
# Example: `midlayer.self_attn.q_proj.weight` becomes `decoder.layers.0.self_attn.q_proj.weight`.
RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),  # SGLang's name in further layers
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^aux_norm_(low|mid|high)\.", r"fc_norm.\1."),
    (r"^fc_norm\.low\.", "fc_norm.0."), (r"^fc_norm\.mid\.", "fc_norm.1."), (r"^fc_norm\.high\.", "fc_norm.2."),
    (r"^(layers|embed_tokens)\.", r"decoder.\1."),
    (r"^(fc|fc_norm|input_norm)\.", r"reader.\1."),
)  # fmt: skip
EMBEDDINGS, MARK = "decoder.embed_tokens.weight", "decoder.layers.0.hidden_norm.weight"


def original(name: str) -> str:
    """Return the name in the original format of a tensor of `Eagle3Model`: the inverse of `RENAMED`."""
    name = re.sub(r"^(decoder|reader)\.", "", name)
    return re.sub(r"^layers\.0\.", "midlayer.", name)


NAMES = Names(RENAMED, r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", original)


class Eagle3(StoredKind):
    """Draft with a new layer that reads the target's hidden states. Published drafts (`config.draft_id`) are in the
    original format or that of speculators."""

    name = "eagle3"
    own_file, own_field = "eagle3.safetensors", "eagle3"
    own_layers = True
    cannot = {
        "stay untrained": "the layer has to be trained, so leave it on, or name the repository of a ready-made one: "
        "draft=REPO",
        "late verdicts": NO_LATE_VERDICTS,
    }
    belongs = "It was trained for another target, or is read wrongly."
    title, names = "EAGLE-3 draft", NAMES
    settings_class, model_class, drafter = Eagle3Settings, Eagle3Model, Eagle3Drafter
    no_model = "an EAGLE-3 draft is none by itself. Give the folder or Hub id of its files"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"an EAGLE-3 layer, which reads states of {target}"
        otherwise = ", ".join(f"{name}={value}" for name, value in (config.eagle3 or {}).items())
        return f"EAGLE-3 {pinned(config)}{f', read with {otherwise}' if otherwise else ''}"

    def recognises(self, raw: Config) -> bool:
        """Also accepts unmarked Llama and Qwen3 configs of one layer: EAGLE's first drafts have no other sign."""
        layers = raw.get("num_hidden_layers") if raw.get("model_type") in tuple(config_eagle3.LAYER_CONFIGS) else None
        return layers == 1 or self.is_marked(raw)

    def is_marked(self, raw: Config) -> bool:
        marks = {SPECULATORS, "draft_vocab_size", "eagle_config"}
        return bool(marks & set(raw)) or "eagle" in str(raw.get("architectures")).lower()

    def fields(self, raw: Config) -> dict[str, Any]:
        config_eagle3.read_config(raw)
        return {"target_id": target_of(raw)}

    def override(self, config: SpecDecPPConfig, values: Any) -> None:
        if config.draft_id is None:
            super().override(config, values)
        config.eagle3 = config_eagle3.check_overrides(values)

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str, overrides: Any = None) -> Eagle3Model:
        given, named = config_eagle3.read_config(raw, overrides), NAMES.here(tensors, source)
        if MARK not in named:  # an ordinary model, a draft of EAGLE-1 or 2, or heads of another method
            older = " It is an EAGLE-1 or EAGLE-2 draft." if "reader.fc.weight" in named else ""
            raise ValueError(checkpoints.not_of_form(source, self.title, [original(MARK)], []) + older)
        return self.build(settings_of(given, named), tensors, source)

    def reader(self, config: SpecDecPPConfig) -> Callable[[Config, Mapping[str, Tensor], str], Eagle3Model]:
        return partial(self.read, overrides=config.eagle3)

    def unused(self, settings: Eagle3Settings) -> set[str]:
        """The embeddings if the target's are used; fc if the draft reads the target's final state only."""
        used = {EMBEDDINGS: settings.own_embeddings, "reader.fc.weight": settings.num_reads > 0}
        return {name for name, is_used in used.items() if not is_used}

    def misfit(self, module: Eagle3Model, target: CausalLM) -> str | None:
        config, settings = target.config.get_text_config(decoder=True), module.settings
        depth, largest = config.num_hidden_layers, int(module.token_ids.max()) if module.token_ids is not None else -1
        if settings.state_size != config.hidden_size:
            return f"reads states of {settings.state_size} numbers, and they have {config.hidden_size}"
        if largest >= config.vocab_size:
            return f"proposes token ids up to {largest}, and there are {config.vocab_size}"
        if max(found := meanings(settings, depth)[0], default=0) >= depth:
            return f"reads the outputs of layers {found}, counted from 0, and there are {depth}"
        return outside(settings.layer["vocab_size"], target)

    def bind(self, module: Eagle3Model, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
        """As in `PublishedKind`; also sets the layers to read. If the layer ids have several `meanings`, measures the
        `agreement` with each, keeps the best, and sets `module.agreement`. Without a tokenizer that fits, takes the
        likeliest with a warning."""
        super().bind(module, target, name, dtype)
        config, made_for = target.config.get_text_config(decoder=True), module.settings.layer["vocab_size"]
        if made_for != config.vocab_size:
            logger.warning(
                f"{name} was made for {made_for} token ids, and the target has {config.vocab_size}. That is harmless "
                "padding if it is the same tokenizer; if almost nothing is accepted, it is not."
            )
        found, ids = meanings(module.settings, config.num_hidden_layers), module.settings.layer_ids

        def read(place: int) -> Eagle3Drafter:
            module.set_target(target, found[place])
            return Eagle3Drafter(module, target)

        rates = agreements(read, range(len(found)), target) if len(found) > 1 else {}
        module.set_target(target, chosen := found[max(rates, key=lambda place: rates[place], default=0)])
        module.agreement = max(rates.values(), default=[])
        if rates:
            what = f"means the outputs of layers {chosen}, which agree best"
            logger.info(f"eagle_aux_hidden_state_layer_ids={ids} {what}.")
        elif len(found) > 1:
            logger.warning(
                f"eagle_aux_hidden_state_layer_ids={ids} may mean the outputs of layers {' or '.join(map(str, found))};"
                f" the former are read. If little is accepted, say otherwise: eagle3={{'reads': {found[1]}}}."
            )

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """Write the original format in bfloat16, which vLLM, SGLang and llama.cpp read."""
        module: Eagle3Model = parts.module
        if to.target is None:
            raise ValueError(
                "The config of this draft names no target, and what it reads depends on it. Name it: --target ID."
            )
        target = load_model_config(to.target).get_text_config(decoder=True)
        depth = target.num_hidden_layers
        reads = meanings(module.settings, depth)[0]
        described = flat_config(module.settings, reads, target)
        save_tensors(self.own_tensors(module, dtype=torch.bfloat16), to.folder / CHECKPOINT)
        save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
        return Exported(commands_for(to, AS_EAGLE3), notes(module.settings, reads, depth))


# Tensors. -------------------------------------------------------------------------------------------------------------


def settings_of(given: dict[str, Any], named: Mapping[str, Tensor]) -> Eagle3Settings:
    """Complete the settings of `read_config` from the tensors (by name in the module): number and type of layers,
    `num_reads`, norms, biases and own modules. `ValueError` for Llama layers with a sliding window."""
    layers = {int(found[1]) for name in named if (found := re.match(r"decoder\.layers\.(\d{1,4})\.", name))}
    size, vocab_size, num_reads = given["state_size"], given["layer"]["vocab_size"], given.get("num_reads")
    if num_reads is None:
        fc = named.get("reader.fc.weight")
        width = fc.shape[-1] if fc is not None and fc.dim() == 2 else 0
        num_named = config_eagle3.NUM_USUAL if given["layer_ids"] is None else len(given["layer_ids"])
        num_reads = num_named if width % size or not width else width // size
    head, draft_vocab_size = named.get("lm_head.weight"), given["draft_vocab_size"]
    if draft_vocab_size is None and head is not None and head.dim() and head.shape[0] < vocab_size:
        draft_vocab_size = head.shape[0]
    count = max(len(layers), 1)  # not from config.json: some files have one layer and a config of 40
    kind = "qwen3" if "decoder.layers.0.self_attn.q_norm.weight" in named else "llama"
    layer = {"model_type": kind, **given["layer"], "num_hidden_layers": count}
    types = found if isinstance(found := layer.get("layer_types"), list) else []
    if types:
        layer["layer_types"] = types[:count]
    if kind == "llama":
        if SLIDING in types:
            raise ValueError(
                "The draft is a Llama layer with a sliding window (layer_types), which transformers' Llama does not "
                f"have, so it would see too much. {checkpoints.INSTEAD}."
            )
        layer = {name: value for name, value in layer.items() if name not in OF_QWEN3}
    settings = {
        **given,
        "layer": layer,
        "num_reads": num_reads,
        "draft_vocab_size": None if draft_vocab_size == vocab_size else draft_vocab_size,
        "norm_before_fc": given["norm_before_fc"] or "reader.input_norm.weight" in named,
        "fc_norm": given["fc_norm"] or "reader.fc_norm.0.weight" in named,
        "fc_bias": "reader.fc.bias" in named,
        "own_embeddings": given["own_embeddings"] and EMBEDDINGS in named,
        "own_head": head is not None or draft_vocab_size not in (None, vocab_size),
    }
    return Eagle3Settings(**settings if num_reads else {**settings, "reads": None, "layer_ids": None})


# For other engines. ---------------------------------------------------------------------------------------------------

WRITTEN = [name for name in LAYER if name not in (*OF_QWEN3, "rope_parameters")]  # layer arguments in config.json


def flat_config(settings: Eagle3Settings, reads: list[int], target: Any) -> dict[str, Any]:
    """Return the `config.json` of an export; `ValueError` for other layers than Llama's. `target`: its text config.

    The usual layers to read are not listed, since engines interpret ids differently. Others are listed twice: as ids of
    layer outputs in `eagle_config` (SGLang), and as ids of layer inputs at the top level (vLLM, llama.cpp).

    Example: with a target of 32 layers `reads=[1, 15, 28]` is not listed; `[3, 15, 28]` is listed as `[3, 15, 28]` in
    `eagle_config` and as `[4, 16, 29]` at the top level."""
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
    """List features of the draft that some engines do not support, as full sentences."""
    found = []
    if reads != usual_reads(depth):
        found.append(
            f"The draft reads the outputs of layers {reads} of its target, where {usual_reads(depth) or 'others'} are "
            "usual: vLLM and SGLang before 2026, and llama.cpp before July 2026, read the usual ones whatever the "
            "config says, and would draft badly."
        )
    if len(reads) != config_eagle3.NUM_USUAL:
        found.append(f"The draft reads {len(reads) or 1} layers of its target; llama.cpp loads drafts that read three.")
    if flags := [name for name in ("fc_norm", "norm_output", "fc_bias") if getattr(settings, name)]:
        found.append(
            f"The draft has {' and '.join(flags)} (EAGLE-3.1): new versions of vLLM and SGLang serve that, llama.cpp "
            "and older ones do not."
        )
    return found
