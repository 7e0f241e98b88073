"""Conditioned drafts are taught what they do in a round, and what was taught is what is stored."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.files import eagle3_files
from support.files.dflash_files import Checkpoint
from support.files.repos import change_json
from support.runs.distillation_files import check_that_training_helps, measured, prepare, report_of, states_of
from support.runs.training_files import training_run
from support.targets.models import VOCAB_SIZE, prompt, quiet_later_layers, random_fusion, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import configuration, models
from hf_specdecpp.training.configuration import DistillConfig, TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.training.distillation.unrolling import in_rounds, unrolled
from hf_specdecpp.training.recorded_chains import Drawing, draft_chains, target_states
from hf_specdecpp.training.run import train


@torch.no_grad()
def one_by_one(drafter: Any, ids: Tensor, states: Tensor, place: int, step: int) -> Tensor:
    """The state at `place`, read as number `step` of a round, by the draft as it drafts."""
    begin = place - step + 1  # the last token that is read with the target's state
    cache = DynamicCache(config=drafter.text_config)
    cache.activate_past_recording()
    hidden = drafter.hidden_states(ids[:, 1 : begin + 1], cache, states[:, :begin])[:, -1:]
    for each in range(begin + 1, place + 1):
        hidden = drafter.hidden_states(ids[:, each : each + 1], cache, hidden)
    return hidden[0, 0]


@pytest.mark.daily("sdpa-llama", "sdpa-gpt2", "eager-mistral")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unrolled_is_what_a_round_does(family: str, attention: str) -> None:
    target = quiet_later_layers(tiny(family, attn_implementation=attention))
    fusion = random_fusion(target)
    drafter = SpecDecPPAssistant.from_conditioned(target, [0, 2], fusion=fusion).ready_drafter()
    assert drafter.fusion is not None
    ids = prompt(15)
    states = states_of(target, drafter.fusion, ids)
    with torch.no_grad():
        steps, mixed = list(unrolled(drafter, ids, states, 4)), in_rounds(drafter, ids, states, 3)
    for step, hidden in enumerate(steps, 1):
        for place in (step, 7, 14):
            assert torch.allclose(hidden[0, place], one_by_one(drafter, ids, states, place, step), atol=1e-5)
    assert torch.equal(mixed[0, 7], steps[7 % 3][0, 7])


def test_a_step_off_is_noticed() -> None:
    target = quiet_later_layers(tiny("llama"))
    drafter = SpecDecPPAssistant.from_conditioned(target, [0, 2], fusion=random_fusion(target)).ready_drafter()
    assert drafter.fusion is not None
    ids = prompt(15)
    states = states_of(target, drafter.fusion, ids)
    with torch.no_grad():
        hidden = list(unrolled(drafter, ids, states, 3))
    assert not torch.allclose(hidden[1][0, 9], one_by_one(drafter, ids, states, 9, 3), atol=1e-3)
    assert not torch.allclose(hidden[2][0, 9], one_by_one(drafter, ids, states, 9, 2), atol=1e-3)


@pytest.mark.takes(5)
def test_training_helps_and_is_what_is_stored(tmp_path: Any) -> None:
    config = prepare(tmp_path, "conditioned", draft_vocab_size=40, unroll=3, epochs=6)
    check_that_training_helps(config, tmp_path / "repo")
    stored = load_file(config.work / "adapter" / "adapter_model.safetensors")
    assert stored
    assert not any("fusion" in name for name in stored)


def test_training_that_does_not_help_leaves_the_fitted_fusion(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far too large steps; it is kept in half precision, as everything is that is stored."""
    config = prepare(tmp_path, "conditioned", answers=8, epochs=1)
    config.distill.learning_rate = config.distill.fusion_learning_rate = 0.5
    fitted: list[dict[str, torch.Tensor]] = []
    fit = first_weights.fit_fusion

    def noted(fusion: Fusion, *how: Any) -> None:
        fit(fusion, *how)
        fitted.append({name: tensor.clone() for name, tensor in fusion.state_dict().items()})

    warnings: list[str] = []
    monkeypatch.setattr(first_weights, "fit_fusion", noted)
    monkeypatch.setattr(distillation.logger, "warning", warnings.append)
    distillation.run(config)
    report = report_of(config)
    assert list(report["shares"]) == ["1.00", "0.67", "0.33", "0.00"]
    assert report["shares"]["0.00"] > max(report["shares"][share] for share in ("1.00", "0.67", "0.33"))
    assert report["after"]["all"]["acceptance"] == pytest.approx(report["before"]["all"]["acceptance"], abs=2e-3)
    assert "The fitted fusion is kept" in warnings[0]
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    assistant = models.load_assistant(config, target)
    assert measured(assistant, target) == pytest.approx(report["after"]["all"]["acceptance"], abs=2e-3)
    fusion = assistant.ready_drafter().fusion
    assert fusion is not None
    for name, tensor in fusion.state_dict().items():
        torch.testing.assert_close(tensor, fitted[0][name].half().float())


@pytest.mark.parametrize("rank", [None, 16])
def test_the_fusion_begins_as_the_targets_own_input(rank: int | None) -> None:
    """A full map is the least-squares solution, but for the ridge; one with a rank is better than its mean."""
    target, fusion = quiet_later_layers(tiny("llama")), Fusion(32, 32, [1], rank).double()
    texts = [prompt(40, seed) for seed in range(40)]
    first_weights.fit_fusion(fusion, target, 2, texts)
    pairs = [inputs_and_wanted(target, ids) for ids in texts]
    inputs, wanted = (torch.cat(each) for each in zip(*pairs, strict=True))
    best = inputs @ torch.linalg.lstsq(inputs, wanted).solution
    with torch.no_grad():
        found = fusion(inputs[:, :32], inputs[:, 32:])
    error, least = (float((each - wanted).square().mean()) for each in (found, best))
    assert least < 0.9 * float(wanted.var())
    assert error < (1.01 * least if rank is None else 0.97 * float(wanted.var()))


def inputs_and_wanted(target: CausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    final, below = states_of(target, Fusion(32, 32, [1]), ids)[0].split(32, dim=-1)
    return torch.cat((final[:-1], target.get_input_embeddings().weight[ids[0, 1:]].detach()), dim=-1), below[1:]


def test_a_draft_that_is_not_trained_yet(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="Run the stage distill first"):
        models.load_assistant(prepare(tmp_path, "conditioned"), tiny("llama"))


def test_chains_of_a_text_are_those_of_rounds() -> None:
    """What calibration records is what the draft does in a generation: chains at several places, read together."""
    target = quiet_later_layers(tiny("mistral"))
    assistant = SpecDecPPAssistant.from_conditioned(target, [0, 2], fusion=random_fusion(target))
    drafter, ids = assistant.ready_drafter(), prompt(20)
    states = target_states(target, drafter, ids[0].tolist())
    assert drafter.fusion is not None
    assert states is not None
    assert torch.equal(states, states_of(target, drafter.fusion, ids))
    starts = torch.tensor([3, 9, 17])
    drawing = Drawing(Sampling(0.0), VOCAB_SIZE)
    drafted = draft_chains(drafter, ids[0].tolist(), states, starts, 3, drawing)
    assert states is not None
    for chain, begin in enumerate(starts.tolist()):
        text = torch.cat((ids[:, :begin], drafted.tokens[chain][None]), dim=1)
        for step in range(4):
            expected = one_by_one(drafter, text, states, begin - 1 + step, step + 1)
            assert torch.allclose(drafted.hidden[chain, step], expected, atol=1e-5)


# An acceptance head on an EAGLE-3 draft that others trained, which stays as it is. ------------------------------------


STAGES = ["distill", "head", "calibrate", "eval", "card"]


@pytest.mark.slow
@pytest.mark.parametrize("shorthand", [True, False])
def test_a_head_on_a_frozen_draft(shorthand: bool, tmp_path: Path) -> None:
    """Named by its repository alone, with the Hub id of that local copy; or in full."""
    config: TrainingConfig = training_run(tmp_path)
    config.layers, config.rollouts.data = None, ["prompts.jsonl"]
    theirs = eagle3_files.Checkpoint(vocab=40).save(tmp_path / "theirs")
    before = (theirs / "model.safetensors").read_bytes()
    if shorthand:
        config.draft, config.draft_id, config.draft_revision = str(theirs), "org/theirs", "0123abc"
    else:
        config.draft, config.distill.enabled, config.distill.start_from = "eagle3", False, str(theirs)
    train(config, STAGES if shorthand else STAGES[1:])
    assert not (config.work / distillation.REPORT).exists(), "nothing is distilled"
    output = Path(config.output)
    assert not list(output.glob("eagle3*"))
    assert sorted(each.name for each in output.glob("*.safetensors")) == ["acceptance_head.safetensors"]
    assert not list(config.work.glob("eagle3*")), "no copy of the weights"
    assert (theirs / "model.safetensors").read_bytes() == before
    made = json.loads((output / "config.json").read_text())
    assert (made["draft_kind"], made["adapter"], made["eagle3"]) == ("eagle3", False, None)
    named = ("org/theirs", "0123abc") if shorthand else ("theirs", None)
    assert (made["draft_id"], made["draft_revision"]) == named, "its commit is stored with its name"
    card = (output / "README.md").read_text()
    assert ("EAGLE-3 org/theirs at 0123abc" if shorthand else "EAGLE-3 theirs") in card
    assert f"draft: {named[0]}" in card, "the settings of the run, which others may repeat"
    head = load_file(output / "acceptance_head.safetensors")
    assert any(bool(tensor.any()) for name, tensor in head.items() if name.startswith("output"))
    target = AutoModelForCausalLM.from_pretrained(config.target)
    assistant = SpecDecPPAssistant.from_pretrained(output, target=target, draft=theirs)
    assert assistant.head is not None
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    assistant.speculation.rule, assistant.speculation.threshold = "threshold", 0.9
    text = target.generate(prompt(), assistant_model=assistant, **options)
    assert torch.equal(text, target.generate(prompt(), **options))
    assert assistant.stats.drafted > 0


@pytest.mark.takes(5)
def test_a_head_on_published_blocks(tmp_path: Path) -> None:
    """All stages with a head that is known before a draw; it is given back, and fitted again beside the given one."""
    config = training_run(tmp_path, num_texts=16, early_exit=True, temperatures=(1.0, 0.0), inputs="path", epochs=8.0)
    checkpoint = Checkpoint(reads=(1,), block_size=4)
    theirs = checkpoint.save(tmp_path / "theirs", num_target_layers=3, vocab_size=VOCAB_SIZE)
    config.draft, config.layers, config.rollouts.data = str(theirs), None, ["prompts.jsonl"]
    train(config, STAGES)
    assert not (config.work / distillation.REPORT).exists(), "there is nothing to train"
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    assistant = SpecDecPPAssistant.from_pretrained(config.output, target=target, draft=theirs)
    assert assistant.head is not None
    assert assistant.head.inputs == "path"
    ids, options = prompt(9), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), target.generate(ids, **options))
    assert "| draft | DFlash theirs" in Path(config.output, "README.md").read_text(encoding="utf-8")

    change_json(Path(config.output, "config.json"), draft_id=str(theirs))  # the card's stage leaves folders out
    export(config.output, tmp_path / "given", config.target)
    again = replace(config, draft=str(tmp_path / "given"), distill=DistillConfig(), output=str(tmp_path / "again"))
    shutil.copytree(config.work / "rollouts", again.work / "rollouts")
    train(again, ["head", "calibrate", "eval"])
    judged = json.loads((again.work / "evaluation" / "evaluation.json").read_text())["sets"]["heldout"]["1"]
    first = json.loads((config.work / "evaluation" / "evaluation.json").read_text())["sets"]["heldout"]["1"]
    names = ["head", "published head", "draft probability", "draft probability, calibrated"]
    assert list(judged["estimators"]) == list(judged["curves"])[:-1] == names
    assert list(judged["speeds"]) == [*names, "fixed"]
    assert judged["estimators"]["published head"]["auc"] == pytest.approx(first["estimators"]["head"]["auc"], abs=1e-3)


def test_nobody_looks_for_the_repository_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be asked for at the Hub."""
    asked: list[str] = []
    monkeypatch.setattr(configuration, "ready_made", lambda repository: asked.append(repository.name))
    for draft in (None, "eagle3", "conditioned", "org/draft"):
        TrainingConfig(draft=draft).find_ready_made()
    assert asked == ["org/draft"]
