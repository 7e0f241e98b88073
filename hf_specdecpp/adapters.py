"""Give a draft its PEFT adapter."""

from __future__ import annotations

import copy
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from hf_specdecpp.repository import ADAPTER_FILES, load_tensors
from hf_specdecpp.typing import CausalLM


def add_adapter(model: CausalLM, folder: Path, merge: bool) -> CausalLM:
    """The model with the adapter of `folder`, for inference.

    With `merge` the adapter is added to the weights, of which those that change are copied first, so that tensors
    shared with a target keep their values. Without it the adapter stays beside them: slower, but no copies.

    Raises:
        ValueError: the adapter does not fit the model.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The draft already has a PEFT adapter, and a second one on top would not be what it was trained as. Merge "
            "the first: model.merge_and_unload()."
        )
    if not merge:
        model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    adapted = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    stored = load_tensors(folder / ADAPTER_FILES[1])
    expected = get_peft_model_state_dict(adapted)
    if set(stored) != set(expected):
        odd = sorted(set(stored) ^ set(expected))
        raise ValueError(
            f"The adapter in {folder} does not fit {type(model).__name__}: {len(odd)} tensors have no counterpart, for "
            f"example {odd[0]}. It was trained for another draft; see base_model_name_or_path and the layers in its "
            "config."
        )
    if not merge:
        return adapted.get_base_model().eval()
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            for parameter in module.get_base_layer().parameters():
                parameter.data = parameter.data.clone()
    return adapted.merge_and_unload().eval()
