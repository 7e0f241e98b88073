"""EAGLE-3 drafts (`Eagle3`), trained by this package or published (`docs/ready-made.md`): read the files, whose tensor
names depend on the format, bind a draft to its target, and export it to other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import LAYER, SLIDING
from hf_specdecpp.draft_kinds import checkpoints
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping, target_of
from hf_specdecpp.draft_kinds.conditioned import NO_LATE_VERDICTS
from hf_specdecpp.draft_kinds.draft_kind import Config, Parts, StoredKind, pinned, target_for
from hf_specdecpp.draft_kinds.eagle3 import config_eagle3
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import FLAGS, OF_QWEN3, Eagle3Settings, meanings, usual_reads
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Drafter, Eagle3Model
from hf_specdecpp.files import CHECKPOINT, save_tensors, save_text
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model_config, outside
from hf_specdecpp.serving import AS_EAGLE3, Destination, Exported, commands_for

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
    title, renamed, ignored = "EAGLE-3 draft", RENAMED, r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    settings_class, model_class, drafter = Eagle3Settings, Eagle3Model, Eagle3Drafter
    no_model = "an EAGLE-3 draft is none by itself. Give the folder or Hub id of its files"
    unsaid = "which layers of its target it reads (eagle_aux_hidden_state_layer_ids)"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"an EAGLE-3 layer, which reads states of {target}"
        otherwise = ", ".join(f"{name}={value}" for name, value in (config.eagle3 or {}).items())
        return f"EAGLE-3 {pinned(config)}{f', read with {otherwise}' if otherwise else ''}"

    def recognises(self, raw: Config) -> bool:
        """As in `PublishedKind`. Any Llama or Qwen3 config of one layer counts: EAGLE's first drafts are unmarked."""
        layers = raw.get("num_hidden_layers") if raw.get("model_type") in config_eagle3.LAYER_TYPES else None
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

    def overridden(self, raw: Config, config: SpecDecPPConfig) -> Config:
        overrides = config_eagle3.check_overrides(config.eagle3 or {})
        return {**raw, "eagle_config": {**mapping(raw, "eagle_config"), **overrides}}

    def original(self, name: str) -> str:
        name = re.sub(r"^(decoder|reader)\.", "", name)
        return re.sub(r"^layers\.0\.", "midlayer.", name)

    def settings_of(self, raw: Config, named: Mapping[str, Tensor], source: str) -> Eagle3Settings:
        given = config_eagle3.read_config(raw)
        if MARK not in named:  # an ordinary model, a draft of EAGLE-1 or 2, or heads of another method
            older = " It is an EAGLE-1 or EAGLE-2 draft." if "reader.fc.weight" in named else ""
            raise ValueError(checkpoints.not_of_form(source, self.title, [self.original(MARK)], []) + older)
        return completed(given, named)

    def build(self, settings: Eagle3Settings, named: dict[str, Tensor], source: str) -> Any:
        """As in `StoredKind`. Embeddings are left out if the target's are used, fc if only its final state is read."""
        used = {EMBEDDINGS: settings.own_embeddings, "reader.fc.weight": settings.num_reads > 0}
        return super().build(settings, {name: named[name] for name in named if used.get(name, True)}, source)

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

    def readings(self, module: Eagle3Model, target: CausalLM) -> dict[str, Eagle3Settings]:
        """As in `StoredKind`: one for each of the `meanings`."""
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        found = meanings(module.settings, depth)
        return {f"eagle3={{'reads': {reads}}}": replace(module.settings, reads=reads) for reads in found}

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """As in `DraftKind`: writes the original format in bfloat16, which vLLM, SGLang and llama.cpp read."""
        module: Eagle3Model = parts.module
        target = load_model_config(target_for(to)).get_text_config(decoder=True)
        depth = target.num_hidden_layers
        reads = meanings(module.settings, depth)[0]
        described = flat_config(module.settings, reads, target)
        save_tensors(self.own_tensors(module, dtype=torch.bfloat16), to.folder / CHECKPOINT)
        save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
        return Exported(commands_for(to, AS_EAGLE3), notes(module.settings, reads, depth))


# Tensors. -------------------------------------------------------------------------------------------------------------


def completed(given: dict[str, Any], named: Mapping[str, Tensor]) -> Eagle3Settings:
    """Make the settings from the result of `read_config` (`given`) and the tensors, by name in the module: these give
    number and type of layers, `num_reads`, norms, biases, own modules. `ValueError` for Llama layers with a window."""
    num_reads, size, fc = given["num_reads"], given["state_size"], named.get("reader.fc.weight")
    if num_reads and fc is not None and fc.dim() == 2 and fc.shape[-1] % size == 0:  # else its shape is refused
        num_reads = fc.shape[-1] // size or num_reads
    layers = {int(found[1]) for name in named if (found := re.match(r"decoder\.layers\.(\d{1,4})\.", name))}
    count = max(len(layers), 1)  # not from config.json: some files have one layer and a config of 40
    kind = "qwen3" if "decoder.layers.0.self_attn.q_norm.weight" in named else "llama"
    layer = {"model_type": kind, **given["layer"], "num_hidden_layers": count}
    types = layer["layer_types"][:count] if isinstance(layer.get("layer_types"), list) else []
    if types:
        layer["layer_types"] = types
    if kind == "llama":
        if SLIDING in types:
            raise ValueError(
                "The draft is a Llama layer with a sliding window (layer_types), which transformers' Llama does not "
                f"have, so it would see too much. {checkpoints.INSTEAD}."
            )
        layer = {name: value for name, value in layer.items() if name not in OF_QWEN3}
    own = checkpoints.own_modules(named, given["draft_vocab_size"], layer["vocab_size"])
    seen = {
        "layer": layer,
        "num_reads": num_reads,
        "norm_before_fc": given["norm_before_fc"] or "reader.input_norm.weight" in named,
        "fc_norm": given["fc_norm"] or "reader.fc_norm.0.weight" in named,
        "fc_bias": "reader.fc.bias" in named,
        "own_embeddings": given["own_embeddings"] and own["own_embeddings"],
    }
    return Eagle3Settings(**{**given, **own, **seen})


# For other engines. ---------------------------------------------------------------------------------------------------

WRITTEN = [name for name in LAYER if name not in (*OF_QWEN3, "rope_parameters")]  # layer arguments in config.json


def flat_config(settings: Eagle3Settings, reads: list[int], target: Any) -> dict[str, Any]:
    """Return the `config.json` of an exported draft that reads the target's layers `reads`; `ValueError` for other
    layers than Llama's. `target`: the target's text config.

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
    """Sentences on features that some engines do not support, of a draft that reads `reads` of `depth` layers."""
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
