"""Give a draft its PEFT adapter."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from hf_specdecpp.files import load_tensors, read_json
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import copy_sharing

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Ways to begin that leave the model's own weights alone; the others (PiSSA, OLoRA, ...) subtract from them.
HARMLESS_INITS = (None, True, False, "gaussian", "orthogonal")


def add_adapter(model: CausalLM, folder: Path, merge: bool) -> CausalLM:
    """The model with the adapter of `folder`, for inference.

    With `merge` the adapter is added to the weights, of which those that change are copied first, so that tensors
    shared with a target keep their values. Without it the adapter stays beside them: slower, but no copies.

    Raises:
        ValueError: the adapter does not fit the model, or would overwrite weights that a target may share.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The draft already has a PEFT adapter, and a second one on top would not be what it was trained as. Merge "
            "the first: model.merge_and_unload()."
        )
    _check_kind(folder)
    stored = load_tensors(folder / ADAPTER_FILES[1])
    if not merge:
        model = copy_sharing(model)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        with warnings.catch_warnings():
            # peft 0.21 reads what transformers 5.23 deprecates: nothing that a user could do anything about.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            adapted = PeftModel(model, config, autocast_adapter_dtype=False)
    finally:
        for parameter, flag in flags:  # PEFT freezes them, but they may be a target's
            parameter.requires_grad_(flag)
    _load(adapted, stored, folder)
    if not merge:
        return adapted.get_base_model().eval()
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer()
            for name, parameter in list(base.named_parameters(recurse=False)):
                # A new object: an assignment to the old one's `.data` would reach the target.
                setattr(base, name, copy.deepcopy(parameter))
    return adapted.merge_and_unload().eval()


def _check_kind(folder: Path) -> None:
    """Raise `ValueError` unless the adapter adds to a model and leaves the model's own weights as they are."""
    path = folder / ADAPTER_FILES[0]
    config = read_json(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"{path} describes a {kind!r} adapter; a draft takes LoRA adapters only.")
    bias, init = config.get("bias", "none"), config.get("init_lora_weights")
    if bias != "none" or init not in HARMLESS_INITS:
        raise ValueError(
            f"{path} has bias={bias!r} and init_lora_weights={init!r}, so loading the adapter overwrites the model's "
            "own weights, which a draft may share with its target. Use one with bias='none' and the usual "
            "initialisation, or merge it, save that model (merge_and_unload) and make it an independent draft."
        )


def _load(adapted: PeftModel, stored: dict[str, Tensor], folder: Path) -> None:
    """Fill the adapter. Only what is the adapter's: PEFT would take values for the model's own weights, too."""
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    own = adapted.state_dict()
    # PEFT stores the embeddings as they are beside an adapter on them.
    copies = {name for name, tensor in stored.items() if name in own and _equal(own[name], tensor)}
    odd = sorted((set(stored) ^ set(expected)) - (copies - set(expected)))
    name = type(adapted.get_base_model()).__name__
    if odd:
        raise ValueError(
            f"The adapter in {folder} does not fit {name}: {len(odd)} tensors have no counterpart, for example "
            f"{odd[0]}. It was trained for another draft; see base_model_name_or_path and the layers in its config."
        )
    try:
        set_peft_model_state_dict(adapted, {name: stored[name] for name in expected})
    except RuntimeError as error:
        raise ValueError(
            f"The adapter in {folder} does not fit {name}; it was trained for another draft. {error}"
        ) from None


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours.cpu(), theirs.to(ours.dtype))
