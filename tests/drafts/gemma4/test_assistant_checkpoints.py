"""Checkpoints of Gemma 4 assistants: how they are loaded, stored and described, and what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gemma4_files import FULL, HIDDEN, OWN, SLIDING, VARIANTS, VOCAB, target_for
from support.models import tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.drafts.gemma4.kind import read_model
from hf_specdecpp.drafts.known import GEMMA4, ready_made, recognise
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.known_costs import Rounds
from hf_specdecpp.training.configuration import TrainingConfig

FIXED = SpeculationConfig(rule="fixed", num_tokens=3)


def saved(folder: Path, name: str = "plain", **changes: Any) -> Path:
    VARIANTS[name].theirs().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def load(folder: Path, target: CausalLM | None = None, **options: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target or target_for(), **options)


def tensors(assistant: SpecDecPPAssistant) -> dict[str, Tensor]:
    found: dict[str, Tensor] = assistant.ready_drafter().model.state_dict()
    return found


def same(first: SpecDecPPAssistant, other: SpecDecPPAssistant) -> bool:
    ours, theirs = tensors(first), tensors(other)
    return set(ours) == set(theirs) and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ways_to_one(name: str, tmp_path: Path) -> None:
    target = target_for(VARIANTS[name].of)
    folder = saved(tmp_path / "one", name)
    first = load(folder, target)
    assert first.config.draft_kind == GEMMA4.name
    assert first.speculation.rule == "throughput"
    theirs = VARIANTS[name].theirs()
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    by_draft = (SpecDecPPAssistant.from_draft(given, target=target, speculation=FIXED) for given in (folder, theirs))
    for other in (*by_draft, load(tmp_path / "shards", target)):
        assert same(first, other)
    draft = first.ready_drafter()
    assert (draft.block, draft.hidden_size, draft.embedding_size) == (1, OWN, HIDDEN)
    assert draft.suspect == f"Gemma 4 assistant {folder}"
    assert recognise(json.loads((folder / "config.json").read_text())) is GEMMA4
    assert ready_made(theirs) is GEMMA4


def test_an_object_without_a_name_cannot_be_stored(tmp_path: Path) -> None:
    theirs = VARIANTS["plain"].theirs()
    assistant = SpecDecPPAssistant.from_draft(theirs, target=target_for())
    assert "reads the cache of the target" in assistant.kind.describe(assistant.config)
    with pytest.raises(ValueError, match="model in memory"):
        assistant.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["plain", "clusters"])
def test_what_its_costs_depend_on(name: str) -> None:
    """A step has a price, and so has a further node."""
    target = target_for()
    draft = SpecDecPPAssistant.from_draft(VARIANTS[name].theirs(), target=target).ready_drafter()
    costs = Rounds(target, draft, DraftProbability(), 4, trees=True).assumed()
    assert costs.block == 1
    assert costs.draft > 0.0
    assert costs.read < costs.draft
    assert costs.branch < costs.draft
    assert draft.describe()["reads"] == {
        "sources": {SLIDING: 2, FULL: 3},
        "clusters": 2 if name == "clusters" else None,
    }


def test_inspected(tmp_path: Path) -> None:
    report = inspect(Repository(str(saved(tmp_path, "clusters"))))
    assert report.sound
    files = {file.name: file.content for file in report.files}
    assert set(files) == {"config.json", "model.safetensors"}
    assert "parameters" in files["model.safetensors"]
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


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no order": ({"masked_embedding.token_ordering": None}, "token_ordering is missing"),
    "an order that is none": ({"masked_embedding.token_ordering": torch.zeros(VOCAB, dtype=torch.long)}, "12 numbers"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, tmp_path: Path) -> None:
    changes, reason = TENSORS[name]
    file = saved(tmp_path, "clusters") / "model.safetensors"
    found = {**load_file(file), **changes}
    save_file({key: tensor for key, tensor in found.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


def test_an_order_without_clusters(tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    save_file({**load_file(file), "masked_embedding.token_ordering": torch.arange(VOCAB)}, file)
    with pytest.raises(ValueError, match="has unknown masked_embedding.token_ordering"):
        load(tmp_path)


def test_what_it_is_not_for(tmp_path: Path) -> None:
    folder = saved(tmp_path / "theirs")
    named = TrainingConfig(target="org/model", output=str(tmp_path), draft=str(folder))
    named.rollouts.data = ["prompts.jsonl"]
    named.find_ready_made()
    with pytest.raises(ValueError, match="loaded, not trained"):
        named.validate()
