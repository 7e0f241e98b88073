"""Tiny random Gemma 4 targets and assistants of transformers' own classes, and what an assistant reads of a text."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_specdecpp.models.causal_lm import CausalLM, cache_argument
from hf_specdecpp.models.target_states import TargetStates

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB, WINDOW, HIDDEN, OWN = 12, 6, 32, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shares its own": {  # the last two layers read the keys of the first two, so the assistant does, too
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB,
    },
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}  # fmt: skip


def target_for(name: str = "plain", seed: int = 0, **changes: Any) -> CausalLM:
    """A target of four layers in float64, the same for the same arguments."""
    layers = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0}
    own = {"tie_word_embeddings": False}  # a tied random model mostly repeats its input
    config = AutoConfig.for_model("gemma4_text", **{**SHAPE, **layers, **own, **TARGETS[name], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).double().eval()


def other_pairs() -> dict[str, tuple[CausalLM, CausalLM]]:
    """Targets and assistants of further classes: the newer family, and a model that also reads images."""
    layers = {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2}
    own = {name: value for name, value in SHAPE.items() if "per_layer" not in name}
    plain: dict[str, Any] = {**own, **layers, "num_kv_shared_layers": 0, "tie_word_embeddings": False}
    narrow = {**own, **layers, "hidden_size": OWN, "num_kv_shared_layers": 2}
    text = AutoConfig.for_model("gemma4_unified_text", **narrow)
    unified = AutoConfig.for_model("gemma4_unified_assistant", text_config=text, backbone_hidden_size=HIDDEN)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
    }  # fmt: skip
    reader = {**SHAPE, **plain, "model_type": "gemma4_text", "pad_token_id": 0}
    images = transformers.Gemma4Config(text_config=reader, vision_config=vision, audio_config=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        targets = (
            AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_unified_text", **plain)),
            transformers.Gemma4ForConditionalGeneration(images),
        )
        newer = AutoModelForCausalLM.from_config(unified)
    drafts = newer.double().eval(), VARIANTS["plain"].theirs()
    names = ("unified", "images")
    return {name: (target.double().eval(), draft) for name, target, draft in zip(names, targets, drafts, strict=True)}


@dataclass(frozen=True)
class Variant:
    """An assistant: its layers, and what of its config is not usual."""

    layers: tuple[str, ...] = (SLIDING, FULL)
    clusters: bool = False
    of: str = "plain"

    def theirs(self, seed: int = 1, **changes: Any) -> CausalLM:
        """transformers' own model in float64."""
        heads = TARGETS[self.of] if self.of == "values are keys" else {}
        text = {
            **SHAPE, **heads, "model_type": "gemma4_text", "hidden_size": OWN, "layer_types": list(self.layers),
            "num_hidden_layers": len(self.layers), "num_kv_shared_layers": len(self.layers), **changes,
        }  # fmt: skip
        clusters = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}
        config = AutoConfig.for_model(
            "gemma4_assistant", text_config=AutoConfig.for_model(**text), backbone_hidden_size=HIDDEN,
            **(clusters if self.clusters else {}),
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config).double().eval()
            if self.clusters:
                model.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
        model.generation_config.num_assistant_tokens = 4
        return model


VARIANTS = {
    "plain": Variant(), "clusters": Variant(clusters=True), "several layers": Variant((SLIDING, SLIDING, FULL)),
    "shares its own": Variant(of="shares its own"), "values are keys": Variant(of="values are keys"),
}  # fmt: skip


def read_by(target: CausalLM, text: Tensor) -> Any:
    """What a target has read of a text `[1, n]` before a round: all but its last token (`bind_cache`)."""
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(text[:, :-1], use_cache=True, **{cache_argument(target): cache})
    return SimpleNamespace(cache=cache, shown=None, position=torch.tensor([[text.shape[1] - 1]]))


def begun(draft: Any, target: CausalLM, text: Tensor) -> Any:
    """A draft's side of a text, in the round after it, in which all is read anew."""
    session = draft.session(VOCAB)
    with TargetStates(target, draft.reads) as caught:
        session.bind_cache(read_by(target, text))
        states: Any = caught.states_of()
    session.read_verified(text, 0, states)
    return session
