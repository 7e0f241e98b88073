"""Add a LoRA adapter, stored in PEFT's files, to a draft model.

Adapters are not trusted, and a draft may share tensors with the target, which must not change. PEFT overwrites a
model's own weights for some kinds of LoRA (KaSA, PiSSA, ...). Here the two small matrices of each module are read and
checked, and used in new tensors and modules, so that no existing tensor is written to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_specdecpp.files import load_tensors, read_fields
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import copy_sharing
from hf_specdecpp.models.quantised import is_quantised

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# Fields that are read, and fields that may be ignored: tensor names and shapes give the modules and their ranks, and
# the type of a module determines whether its weight is transposed. All other fields must be unset.
FIELDS = {
    "peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "target_modules", "bias",
    "init_lora_weights",
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
}  # fmt: skip
# Initialisations that do not change the model's own weights; others (PiSSA, OLoRA, ...) subtract from them.
HARMLESS_INITS = (None, True, False, "gaussian", "orthogonal")
RETRY = "Download or save it again."
STORED_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_(?:([AB])\.weight|embedding_([AB]))")


@dataclass
class Lora:
    """LoRA matrices `b` `[out, rank]` and `a` `[rank, in]` of one module: they add `scaling * b @ a` to its weight."""

    a: Tensor
    b: Tensor
    scaling: float

    def to(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies of `a` and of `scaling * b` on a device and in a dtype."""
        return self.a.to(device, dtype), self.scaling * self.b.to(device, dtype)


@dataclass
class Adapter:
    """The contents of the folder of a PEFT adapter, checked by `read_adapter`."""

    config: dict[str, Any]  # `adapter_config.json`
    loras: dict[str, Lora]  # by module name, such as "model.layers.0.self_attn.q_proj"
    others: dict[str, Tensor]  # all other tensors of the file, by their full names


class LoraLinear(nn.Module):
    """The linear layer `base_layer`, also a quantised one, plus a LoRA adapter (the result of `Lora.to`)."""

    def __init__(self, base_layer: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base_layer, _linear(a), _linear(b)
        self.in_features, self.out_features = a.shape[1], b.shape[0]

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base_layer(x)
        return output + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(output.dtype)


def add_adapter(model: CausalLM, folder: Path, merge: bool) -> CausalLM:
    """A copy of the model in eval mode, sharing its tensors, with the LoRA adapter of `folder`; `ValueError` if the
    adapter is not ordinary LoRA, is damaged, or does not fit the model, or if the model has an adapter already.

    With `merge`, changed weights are new tensors. Without, each `LoraLinear` computes the adapter separately, which is
    slower but needs no new weights. Embeddings and the LM head are always merged, quantised layers never."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The draft already has a PEFT adapter, and a second one on top would not be what it was trained as. Merge "
            "the first: model.merge_and_unload()."
        )
    adapter = read_adapter(folder)
    _check_fit(adapter, model, folder)
    adapted = copy_sharing(model)
    head = adapted.get_output_embeddings()
    for name, lora in adapter.loras.items():
        module = adapted.get_submodule(name)
        weight = module.weight
        if is_quantised(module):
            if isinstance(module, nn.Embedding):
                raise ValueError(
                    f"The adapter in {folder} changes {name}, which is quantised ({type(weight).__name__}), so it can "
                    "be neither merged nor computed beside it. Leave the embeddings out of the adapter, or out of the "
                    "quantisation."
                )
            adapted.set_submodule(name, LoraLinear(module, *lora.to(weight.device, model.dtype)))
        elif merge or isinstance(module, nn.Embedding) or module is head:
            module.weight = _merged(module, lora)
        else:
            adapted.set_submodule(name, LoraLinear(module, *lora.to(weight.device, weight.dtype)))
    return adapted.eval()


def read_adapter(folder: Path) -> Adapter:
    """Read the PEFT adapter in `folder`; `ValueError` if it is not ordinary LoRA, or a file is damaged."""
    config = read_adapter_config(folder / ADAPTER_FILES[0])
    path = folder / ADAPTER_FILES[1]
    halves: dict[str, dict[str, Tensor]] = {}
    others = {}
    for stored, tensor in load_tensors(path).items():
        if match := STORED_NAME.fullmatch(stored):
            halves.setdefault(match[1], {})[match[2] or match[3]] = tensor
        else:
            others[stored] = tensor
    return Adapter(config, {name: _pair(name, half, config, path) for name, half in halves.items()}, others)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """The fields of the `adapter_config.json` at `path`; `ValueError` if they are invalid or not of ordinary LoRA."""
    config = read_fields(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{path} describes a {kind!r} adapter; a draft takes LoRA adapters only. Name another.")
    odd = {name: value for name, value in config.items() if name not in FIELDS and value}
    for name, harmless in (("bias", ("none", None)), ("init_lora_weights", HARMLESS_INITS)):
        if config.get(name) not in harmless:
            odd[name] = config[name]
    if odd:
        settings = ", ".join(f"{name}={str(value)[:40]}" for name, value in odd.items())
        raise ValueError(
            f"{path} has {settings}, so it is more than an ordinary LoRA adapter, or overwrites the model's own "
            "weights, which a draft may share with its target. Use one with bias='none' and the usual initialisation, "
            "or merge it, save that model (merge_and_unload) and make it an independent draft."
        )
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in pattern):
            raise ValueError(
                f"{path} has {name}={str(pattern)[:80]}; it must map names of modules to numbers. Regular expressions "
                "are not read, since one from a stranger can take for ever."
            )
    ranks, alphas = ([config.get(one, 8), *(config.get(more) or {}).values()] for one, more in (
        ("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")
    ))  # fmt: skip
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ValueError(f"{path} has ranks {ranks[:9]}; a rank is a whole number of at least 1. {RETRY}")
    if not all(type(alpha) in (int, float) and abs(alpha) < 2**31 for alpha in alphas):
        raise ValueError(f"{path} has lora_alpha {alphas[:9]}; it must be a number. {RETRY}")
    return config


def _pair(name: str, half: dict[str, Tensor], config: dict[str, Any], path: Path) -> Lora:
    """The LoRA of module `name`, from its tensors "A" and "B" in `half`; `ValueError` if sizes do not match."""
    shapes = {which: list(tensor.shape) for which, tensor in half.items()}
    if set(half) != {"A", "B"} or not half["A"].dim() == half["B"].dim() == 2 or shapes["A"][0] != shapes["B"][1]:
        raise ValueError(f"{path} has {shapes} for {name}, not a pair of matrices. {RETRY}")
    a, b, rank = half["A"], half["B"], shapes["A"][0]
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"{path} has {a.dtype} and {b.dtype} for {name}; they must be floating point numbers. {RETRY}")
    if rank not in (config.get("r", 8), *(config.get("rank_pattern") or {}).values()):
        raise ValueError(f"{path} has rank {rank} for {name}; its {ADAPTER_FILES[0]} says r={config.get('r')}. {RETRY}")
    alpha = config.get("lora_alpha", 8)
    alphas = config.get("alpha_pattern") or {}
    if fitting := [key for key in _suffixes(name) if key in alphas]:
        alpha = alphas[min(fitting, key=list(alphas).index)]  # the first match, as in PEFT
    return Lora(a, b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _check_fit(adapter: Adapter, model: CausalLM, folder: Path) -> None:
    """Raise `ValueError` unless each tensor fits a module, and each module listed in `target_modules` has tensors."""
    modules = dict(model.named_modules())
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    wanted = adapter.config.get("target_modules")
    odd = sorted(set(adapter.loras) - set(modules))
    if isinstance(wanted, list) and not any(adapter.config.get(n) for n in ("exclude_modules", "layers_to_transform")):
        listed = set(map(str, wanted))
        meant = {name for name in modules if listed & set(_suffixes(name))}
        odd += sorted(meant - set(adapter.loras))
    for stored, tensor in adapter.others.items():
        # With an adapter on embeddings PEFT also stores the unchanged embeddings.
        ours = own.get(stored.removeprefix("base_model.model.").replace(".base_layer.", "."))
        if ours is None or not _equal(ours, tensor):
            odd.append(stored)
    kind = type(model).__name__
    if odd:
        raise ValueError(
            f"The adapter in {folder} does not fit {kind}: {len(odd)} modules or tensors have no counterpart, for "
            f"example {odd[0]}. It was trained for another draft, or for one that is not quantised there; see "
            "base_model_name_or_path and the layers in its config."
        )
    for name, lora in adapter.loras.items():
        theirs = [lora.a.shape[1], lora.b.shape[0]]
        if theirs != (ours := _sizes(modules[name])):
            raise ValueError(
                f"The adapter in {folder} does not fit {kind}; it was trained for another draft. {name} has "
                f"{ours or type(modules[name]).__name__} as inputs and outputs, the adapter {theirs}."
            )


def _merged(module: nn.Module, lora: Lora) -> nn.Parameter:
    """A new weight for the module, with the adapter's change. The old tensor is unchanged: the target may share it."""
    weight: Any = module.weight
    a, b = lora.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    delta = b @ a
    merged = weight.detach() + (delta if isinstance(module, nn.Linear) else delta.T)
    return nn.Parameter(merged.to(weight.dtype), requires_grad=False)


def _sizes(module: nn.Module) -> list[int]:
    """`[inputs, outputs]` of a linear layer, `[rows, size]` of an embedding, and an empty list for other modules."""
    if isinstance(module, nn.Embedding):
        return [module.num_embeddings, module.embedding_dim]
    if isinstance(module, Conv1D):
        return list(module.weight.shape)
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]  # quantised layers have them, too
    return [size for size in sizes if isinstance(size, int)]


def _suffixes(name: str) -> list[str]:
    """Names by which a config may refer to a module: `["layers.0.mlp", "0.mlp", "mlp"]` for `"layers.0.mlp"`."""
    parts = name.split(".")
    return [".".join(parts[place:]) for place in range(len(parts))]


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    ordinary = type(ours) in (Tensor, nn.Parameter)  # quantised weights differ from those in training
    return ordinary and ours.shape == theirs.shape and torch.equal(ours.cpu(), theirs.to(ours.dtype))
