"""Compare the drafts that transformers supports in its own generation and in this package, in one run.

    OMP_NUM_THREADS=1 python examples/beside_transformers.py

A DFlash block (`speculation_type="dflash"`), a multi-token layer of a GLM-4.5 (`use_mtp=True`) and a Gemma 4
assistant each draft for a random target of 28 layers of width 64, uncompiled, so most time is spent launching
operations. With a vocabulary of 12 tokens random drafts guess some tokens. Both packages draft the same number of
candidates per round; this package also runs the throughput rule and a tree. transformers reads multi-token layers from
files in every call; here they are read once, before. The contestants take turns. Medians of the repetitions, in
processor time with one thread.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from launch_bound import NEW_TOKENS, milliseconds
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import SpeculationConfig

LAYERS, MULTI_TOKEN, CANDIDATES = 28, 1, 4
SHAPE: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": LAYERS, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "ours, as many": {"rule": "fixed"},
    "ours, throughput": {"rule": "throughput"},
    "ours, tree of 12": {"tree": "dyspec", "tree_budget": 12},
    "ours, tree, throughput": {"tree": "dyspec", "tree_budget": 12, "rule": "throughput"},
}
Made = tuple[nn.Module, dict[str, Any], Callable[..., SpecDecPPAssistant], int]


def random(config: Any, quiet: float = 1.0, loud: float = 1.0) -> Any:
    """A model of random weights, whose layers add a share of what they would, and embeddings are louder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() > 1:
            parameter.data *= quiet
        elif "embed" in name:
            parameter.data *= loud
    return model.eval()


def dflash(_: Path) -> Made:
    target = random(AutoConfig.for_model("llama", **SHAPE))
    shape = {name: value for name, value in SHAPE.items() if name not in ("vocab_size", "num_hidden_layers")}
    config = MuseGlimmerAssistantConfig(
        **shape, num_hidden_layers=1, layer_types=["full_attention"], block_size=CANDIDATES + 1, mask_token_id=11,
        target_layer_ids=[1, LAYERS // 2, LAYERS - 2],
    )  # fmt: skip
    draft = MuseGlimmerAssistantModel(config).eval()
    theirs = {"assistant_model": draft, "speculation_type": "dflash"}
    return target, theirs, partial(SpecDecPPAssistant.from_draft, draft, target=target), CANDIDATES


def multi_token_layers(folder: Path) -> Made:
    """Written as a checkpoint whose last layers are those, and loaded again. The layer before them is of their kind."""
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2}
    own = {**SHAPE, **experts, "moe_intermediate_size": 16, "first_k_dense_replace": LAYERS - 1}
    more = {**own, "num_hidden_layers": LAYERS + MULTI_TOKEN}
    random(AutoConfig.for_model("glm4_moe", **more), 0.3, 3.0).save_pretrained(folder)
    tensors, eye = load_file(folder / "model.safetensors"), torch.eye(SHAPE["hidden_size"])
    for place in range(LAYERS, LAYERS + MULTI_TOKEN):
        of = f"model.layers.{place}."
        tensors |= {f"{of}{name}.weight": torch.ones(len(eye)) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{of}eh_proj.weight"] = torch.cat((eye, 0.1 * eye), dim=1)
        tensors[f"{of}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{of}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fewer = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": MULTI_TOKEN}
    (folder / "config.json").write_text(json.dumps({**config, **fewer}), encoding="utf-8")
    target = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    # Its class names the layers of published models only, such as model.layers.46.
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS + place}\." for place in range(MULTI_TOKEN)]
    read = MtpModel.from_pretrained(target)
    MtpModel.from_pretrained = lambda *_, **__: read
    return target, {"use_mtp": True}, partial(partial(assist, draft="mtp", default=False), target), MULTI_TOKEN


def gemma4(_: Path) -> Made:
    layers = {"global_head_dim": 32, "sliding_window": 64, "hidden_size_per_layer_input": 0}
    text = {**SHAPE, **layers, "vocab_size_per_layer_input": 0}
    kinds = ["sliding_attention", "full_attention"]
    target = random(
        AutoConfig.for_model("gemma4_text", **text, layer_types=kinds * (LAYERS // 2), num_kv_shared_layers=0)
    )
    smaller = {**text, "hidden_size": 32, "num_hidden_layers": 2, "layer_types": kinds, "num_kv_shared_layers": 2}
    inner = AutoConfig.for_model("gemma4_text", **smaller)
    draft = random(AutoConfig.for_model("gemma4_assistant", text_config=inner, backbone_hidden_size=64))
    draft.generation_config.num_assistant_tokens = CANDIDATES
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return target, {"assistant_model": draft}, partial(SpecDecPPAssistant.from_draft, draft, target=target), CANDIDATES


PAIRS = {"DFlash block": dflash, "multi-token layers": multi_token_layers, "Gemma 4 assistant": gemma4}


def text_of(target: Any, how: dict[str, Any]) -> Tensor:
    found: Tensor = target.generate(torch.arange(1, 10)[None], max_new_tokens=NEW_TOKENS, do_sample=False, **how)
    return found


def passes_of(target: Any, how: dict[str, Any]) -> int:
    """How many passes it makes."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = target.get_decoder().register_forward_hook(note)  # drafts use its LM head, too
    text_of(target, how)
    handle.remove()
    return count


def results(name: str, repetitions: int) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        target, theirs, make, count = PAIRS[name](Path(folder))
        contestants: dict[str, dict[str, Any]] = {"plain generate()": {}, "transformers' own": theirs}
        for each, settings in OURS.items():
            speculation = SpeculationConfig(**settings, num_tokens=count, max_tokens=16)
            contestants[each] = {"assistant_model": make(speculation=speculation)}
        actions: dict[str, Callable[[], object]] = {
            each: partial(text_of, target, how) for each, how in contestants.items()
        }
        times, plain = milliseconds(actions, repetitions), text_of(target, {})
        table = Table("", "tokens a pass", "ms a token", "x plain", "same text", title=f"{name}, {count} candidates")
        for each, how in contestants.items():
            same = torch.equal(text_of(target, how), plain)
            if isinstance(assistant := how.get("assistant_model"), SpecDecPPAssistant):
                tokens = assistant.stats.tokens_per_pass
            else:
                tokens = NEW_TOKENS / passes_of(target, how)
            table.add_row(
                each,
                f"{tokens:.2f}",
                f"{times[each] / NEW_TOKENS:.2f}",
                f"{times['plain generate()'] / times[each]:.2f}",
                "yes" if same else "no",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    for name in options.pairs:
        Console(width=110).print(results(name, options.repetitions))


if __name__ == "__main__":
    main()
