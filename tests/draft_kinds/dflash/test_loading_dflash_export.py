"""`export` of a published DFlash or DSpark draft with a head that was fitted for it: an equal DSpark draft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import dflash_files, dspark_files
from support.files.checkpoints import HIDDEN
from support.files.dspark_exports import DFLASH, DRAFTS, given_back, random_head
from support.targets.models import prompt
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.files import load_tensors
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.serving import TEMPERATURES
from hf_specdecpp.training.recorded_chains import target_states


@torch.inference_mode()
def along(assistant: SpecDecPPAssistant, target: CausalLM) -> tuple[Tensor, Tensor]:
    """q and the estimate of each candidate of a chain."""
    text, draft, head = prompt(9) % 11, assistant.ready_drafter(), assistant.head
    assert head is not None
    session: Any = draft.session(target.config.vocab_size)
    states = target_states(target, draft, text[0].tolist())
    assert states is not None
    session.read_verified(text, 0, states[:, :-1])
    found: list[Any] = []
    path = [torch.tensor(each) for each in (4, 9, 2, 5)]
    for place in range(int(draft.places)):
        scores, hidden = session.propose_next(path[:place])
        step = DraftStep(place, scores, hidden, session.embed)
        found.append((step.q, head.estimate(step)))
    return torch.stack([each for each, _ in found]), torch.stack([each for _, each in found])


@pytest.mark.daily("DFlash", "DFlash, first row", "deepspec", "speculators", "gated, prefixed", "reduced")
@pytest.mark.parametrize("name", DRAFTS)
def test_it_drafts_the_same_and_its_confidence_is_that_of_the_head(name: str, tmp_path: Path) -> None:
    assistant, target, _ = given_back(name, tmp_path)
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)
    assert again.config.draft_kind == "dspark"
    assert again.head is not None
    assert again.head.is_published
    (q, c), (q_again, c_again) = along(assistant, target), along(again, target)
    assert torch.equal(q, q_again)
    # The bias and the mean temperature are in the head, the rest in the file for SGLang.
    left = json.loads((tmp_path / "out" / TEMPERATURES).read_text())["temperatures"]
    assert len(left) == len(q)
    assert_close((c_again.double().logit() / torch.tensor(left)).sigmoid().float(), c, rtol=1e-3, atol=1e-4)
    assert_close(torch.tensor(left).log().sum(), torch.tensor(0.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["DFlash", "deepspec", "specforge", "speculators"])
def test_the_fields_stand_where_engines_read_them(name: str, tmp_path: Path) -> None:
    given_back(name, tmp_path)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_tensors(tmp_path / "out" / "model.safetensors")
    rank = 8 if name == "DFlash" else dspark_files.RANK
    wanted = {
        "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "sample_from_anchor": name in ("deepspec", "specforge"),
        "block_size": 5 if name == "DFlash" else dspark_files.BLOCK,
    }  # fmt: skip
    places = [raw] if name == "speculators" else [raw, raw["dflash_config"]]
    assert all({field: place.get(field) for field in wanted} == wanted for place in places)
    if name != "speculators":
        reads = list(DRAFTS[name][0].reads)
        assert all(place["target_layer_ids"] == reads for place in places)
        assert raw["dflash_config"]["projector_type"] == "dspark"
    assert raw["architectures"] == ["Qwen3DSparkModel" if name == "deepspec" else "DSparkDraftModel"]
    weight = tensors["confidence_head.proj.weight"]
    assert weight.shape == (1, HIDDEN + rank), "as wide with a Markov head of zeros, which llama.cpp expects"
    assert bool(weight[:, HIDDEN:].any()) is (name != "DFlash")
    assert tensors["confidence_head.proj.bias"].shape == (1,)
    if name == "DFlash":
        assert not any(tensors[f"markov_head.markov_w{part}.weight"].any() for part in (1, 2))


def test_commands_act_on_the_head(tmp_path: Path) -> None:
    exported = given_back("DFlash", tmp_path)[2]
    (vllm,), (sglang,), (convert, llama) = (exported.commands[name] for name in ("vLLM", "SGLang", "llama.cpp"))
    assert '"method":"dspark"' in vllm
    assert '"num_speculative_tokens":4,"enable_adaptive_verification":true' in vllm
    assert sglang.startswith("env SGLANG_RAGGED_VERIFY_MODE=compact python -m sglang.launch_server --model-path org/")
    assert "--speculative-algorithm DSPARK" in sglang
    assert "--speculative-num-draft-tokens 5" in sglang, "with the last token of the sequence"
    assert f"out/{TEMPERATURES}" in sglang
    assert "--spec-type draft-dspark" in llama
    assert "--spec-draft-n-max 4 --spec-draft-p-min 0.5" in llama
    assert "--target-model-dir org/target" in convert
    assert not any("do not use the stopping rule" in note for note in exported.notes)


def test_a_head_that_reads_the_candidate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="(?s)so nothing is exported.*--head-only.*other heads read the candidate"):
        given_back("DFlash", tmp_path, AcceptanceHead(HIDDEN, inputs="before"))
    folder = DFLASH.save(tmp_path / "theirs", "transformers")
    assistant = SpecDecPPAssistant.from_pretrained(folder, target=dflash_files.target_for())
    assistant.head = random_head(HIDDEN)
    assistant.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="of model_type 'muse_glimmer_assistant'.*nothing is exported"):
        export(tmp_path / "other", tmp_path / "none", "org/target")
    assert not (tmp_path / "none").exists()
