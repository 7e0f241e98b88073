"""Exported DSpark drafts in the package `speculators` (`make test-formats`)."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.dspark_exports import DRAFTS, given_back

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.files import load_tensors

pytestmark = pytest.mark.takes(60)
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
BLOCK = ("block_size", "mask_token_id", "sample_from_anchor")
OF_TARGET = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}


def theirs(folder: Path) -> Any:
    """The package's draft with the exported tensors: from the folder if that is of its format, else its config is made
    of the exported fields. Skips where the package is not installed, and fails where it is and cannot be imported."""
    if find_spec("speculators") is None:
        pytest.skip("speculators is not installed: make test-formats")
    package: Any = importlib.import_module("speculators.models.dspark")
    raw = json.loads((folder / "config.json").read_text())
    layers = raw.get("transformer_layer_config")
    fields = {name: raw[name] for name in (*HEADS, *BLOCK)}
    ids = raw["aux_hidden_state_layer_ids"] if layers else [each + 1 for each in raw["target_layer_ids"]]
    vocab = raw["draft_vocab_size"] if layers else raw["vocab_size"]
    config = package.DSparkSpeculatorConfig(
        transformer_layer_config=layers or raw, aux_hidden_state_layer_ids=ids, draft_vocab_size=vocab, **fields
    )
    draft = package.DSparkDraftModel(config).double().eval()
    found = draft.load_state_dict(load_tensors(folder / "model.safetensors"), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= OF_TARGET
    return draft


@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "gemma4"])  # they have no such layers
@torch.no_grad()
def test_their_heads_say_what_ours_say(name: str, tmp_path: Path) -> None:
    _, target, _ = given_back(name, tmp_path)
    draft, ours = theirs(tmp_path / "out"), SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)
    ours_draft, size = ours.ready_drafter(), draft.config.transformer_layer_config.hidden_size
    previous = torch.tensor([[3, 7, 1, 7]])
    hidden = torch.randn(1, 4, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    markov, nothing = draft.markov_head.prev_embeddings(previous), hidden.new_zeros(1, 4, ours_draft.memory_size)
    features = torch.cat((hidden, markov), -1) if draft.config.confidence_head_with_markov else hidden
    assert ours.head is not None
    bias = draft.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    logits, state, _ = ours_draft.after(previous, torch.zeros_like(bias), hidden, nothing)
    torch.testing.assert_close(ours.head(state).double(), draft.confidence_head(features), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), bias, rtol=1e-5, atol=1e-5)
