"""Checkpoints of Gemma 4 assistants: how they are loaded, stored and described, and what is refused and why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edited
from support.gemma4_files import VARIANTS, VOCAB, target_for
from support.models import tiny
from support.repos import change_json

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafts.gemma4.kind import read_model
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.causal_lm import CausalLM

ORDER = "masked_embedding.token_ordering"


def saved(folder: Path, name: str = "plain", **changes: Any) -> Path:
    VARIANTS[name].theirs().save_pretrained(folder)
    change_json(folder / "config.json", **changes)
    return folder


def load(folder: Path, target: CausalLM | None = None, **options: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target or target_for(), **options)


def test_an_object_without_a_name_cannot_be_stored(tmp_path: Path) -> None:
    assistant = SpecDecPPAssistant.from_draft(VARIANTS["plain"].theirs(), target=target_for())
    assert "reads the cache of the target" in assistant.kind.describe(assistant.config)
    with pytest.raises(ValueError, match="model in memory"):
        assistant.save_pretrained(tmp_path)


TOKENS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no order": ("clusters", {ORDER: None}, "token_ordering is missing"),
    "an order that is none": ("clusters", {ORDER: torch.zeros(VOCAB, dtype=torch.long)}, "12 numbers"),
    "an order without clusters": ("plain", {ORDER: torch.arange(VOCAB)}, f"has unknown {ORDER}"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_order_of_tokens(case: str, tmp_path: Path) -> None:
    name, changes, reason = TOKENS[case]
    with pytest.raises(ValueError, match=reason):
        load(edited(saved(tmp_path, name), **changes))


def test_inspected(tmp_path: Path) -> None:
    report = inspect(Repository(str(saved(tmp_path, "clusters"))))
    assert report.facts["draft"] == "Gemma 4 assistant, 2 layers (sliding, full), 16 wide"
    assert report.facts["draft vocabulary"] == "2 of 4 clusters of 12 token ids"


# Refused. -------------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 24}, "reads states of 32 numbers, and they have 24"),
    "tokens": ({"vocab_size": VOCAB + 1}, "proposes 12 token ids, and there are 13"),
    "heads": ({"num_key_value_heads": 4}, r"reads 2 heads of 8 numbers \(sliding_attention\), and there are 4 of 8"),
    "head size": ({"global_head_dim": 8}, r"reads 2 heads of 16 numbers \(full_attention\), and there are 2 of 8"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_gemma_4(name: str) -> None:
    changes, reason = OTHERS[name]
    with pytest.raises(ValueError, match=f"{reason} in Gemma4ForCausalLM.*trained for alone"):
        SpecDecPPAssistant.from_draft(VARIANTS["plain"].theirs(), target=target_for(**changes))


def test_another_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drafts for a Gemma 4, and there is a model of type 'llama'"):
        load(saved(tmp_path), tiny("llama", vocab_size=VOCAB))


def test_a_class_that_this_transformers_lacks(tmp_path: Path) -> None:
    folder = saved(tmp_path, model_type="gemma9_assistant")
    with pytest.raises(ValueError, match=r"'gemma9_assistant', a class.*that version \d.* does not have.*Install"):
        load(folder)


PLAIN = VARIANTS["plain"].theirs().config.to_dict()
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"text_config": None}, ""),
    "clusters of no size": ({"use_ordered_embeddings": True, "num_centroids": 5}, "vocab_size=12 .*num_centroids=5"),
    "more than there are": (
        {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 5},
        "centroid_intermediate_top_k=5",
    ),
    "no clusters": ({"use_ordered_embeddings": True, "num_centroids": 0}, "num_centroids=0"),
    "nonsense": ({"backbone_hidden_size": "wide"}, "backbone_hidden_size"),
    "a layer of its own": ({"text_config": {**PLAIN["text_config"], "num_kv_shared_layers": 1}}, "must be shared"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str) -> None:
    changes, reason = CONFIGS[name]
    weights = VARIANTS["plain"].theirs().state_dict()
    with pytest.raises(ValueError, match=f"(?s)No Gemma 4 assistant can be built.*{reason}"):
        read_model({**PLAIN, **changes}, weights, "The draft")
