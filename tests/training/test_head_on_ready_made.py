"""An acceptance head on an EAGLE-3 draft that others trained, which stays as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.distillation_files import report_of
from support.models import prompt, random_layer
from support.training_files import training_run
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafts.eagle3.checkpoint import tensors_of
from hf_specdecpp.drafts.eagle3.kind import flat_config
from hf_specdecpp.training import configuration
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.run import train

STAGES = ["distill", "head", "calibrate", "eval", "card"]


def published(folder: Path, target: Any) -> Path:
    """A repository as others make them: one layer that guesses some tokens, of 40 of the target's."""
    layer = random_layer(target, (0, 1), vocab=torch.arange(4, 44))
    folder.mkdir()
    save_file(tensors_of(layer), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(flat_config(layer.settings, [0, 1], target.config)))
    return folder


def begun(folder: Path, shorthand: bool) -> TrainingConfig:
    """The settings of a run whose answers are there already."""
    config: TrainingConfig = training_run(folder)
    theirs = str(published(folder / "theirs", AutoModelForCausalLM.from_pretrained(config.target)))
    config.layers, config.rollouts.data = None, ["prompts.jsonl"]
    if shorthand:
        config.draft = theirs
    else:
        config.draft, config.distill.enabled, config.distill.start_from = "eagle3", False, theirs
    return config


@pytest.mark.takes(4)
@pytest.mark.parametrize("shorthand", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_head_on_a_frozen_draft(shorthand: bool, tmp_path: Path) -> None:
    """Named by its repository alone, with the Hub id of that local copy; or in full, and not measured before."""
    config = begun(tmp_path, shorthand)
    theirs = tmp_path / "theirs"
    before = (theirs / "model.safetensors").read_bytes()
    if shorthand:
        config.draft_id, config.draft_revision = "org/theirs", "0123abc"
    train(config, STAGES if shorthand else STAGES[1:])
    if shorthand:
        report = report_of(config)
        assert 0.02 < report["before"]["all"]["acceptance"] < 0.9
        assert "after" not in report
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


def test_nobody_looks_for_the_repository_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be asked for at the Hub."""
    asked: list[str] = []
    monkeypatch.setattr(configuration, "ready_made", asked.append)
    for draft in (None, "eagle3", "conditioned", "org/draft"):
        TrainingConfig(draft=draft).find_ready_made()
    assert asked == ["org/draft"]


def test_a_draft_that_is_not_there_stays_untrained_in_vain(tmp_path: Path) -> None:
    config = begun(tmp_path, shorthand=False)
    config.distill.start_from = None
    with pytest.raises(ValueError, match=r"distill.enabled=False: the layer has to be trained.*draft=REPO"):
        train(config, STAGES)
    config.distill.start_from = config.target
    with pytest.raises(ValueError, match="not of an hf_specdecpp assistant"):
        train(config, STAGES)
