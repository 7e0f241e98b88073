"""How well a draft guesses what its target says tells the right reading of a checkpoint from wrong ones."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle3_files import VOCAB, Checkpoint
from support.formulas import states_of
from support.models import tiny
from support.repos import change_json, letter_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.drafts.eagle3 import meeting
from hf_specdecpp.drafts.eagle3.checkpoint import tensors_of
from hf_specdecpp.drafts.eagle3.meeting import TEXT, better, compare
from hf_specdecpp.files import load_tensors, save_tensors

RIGHT = [2, 1, 3]  # of five layers
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what config.json says, and the override that mends it
    "ids one too low": ({"reads": [1, 0, 2]}, {"reads": RIGHT}),
    "ids one too high": ({"reads": [3, 2, 4]}, {"reads": RIGHT}),
    "theta": ({"rope_theta": 3.0}, {"rope_theta": 10000.0}),
    "residual": ({"norm_before_residual": True}, {"norm_before_residual": False}),
    "feedback": ({"norm_output": True}, {"norm_output": False}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a draft that learned what it says of the text of the check."""
    folder = tmp_path_factory.mktemp("pair")
    target, letters = tiny("llama", num_hidden_layers=5).float(), letter_tokenizer()
    target.save_pretrained(folder / "target")
    letters.save_pretrained(folder / "target")
    draft = Checkpoint(vocab=VOCAB).save(folder / "draft", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 3]})
    assistant = SpecDecPPAssistant.from_pretrained(draft, target=target, eagle3={"reads": RIGHT})
    drafter, ids = assistant.ready_drafter(), letters(TEXT, return_tensors="pt")["input_ids"]
    states = states_of(target, drafter, ids)
    with torch.no_grad():
        said = target(ids).logits[0].argmax(-1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(drafter.model.requires_grad_(True).parameters(), lr=1e-2)
        for _ in range(80):
            steps = enumerate(unrolled(drafter, ids, states, 2), 1)
            losses = [cross_entropy(drafter.logits(hidden[0], VOCAB)[step:], said[step:]) for step, hidden in steps]
            optimizer.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
    save_tensors(tensors_of(drafter.model), draft / "model.safetensors")
    change_json(draft / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": RIGHT})
    return folder / "target", draft


def readings(pair: tuple[Path, Path], **said: Any) -> list[meeting.Reading]:
    """Of the draft, if its config said this."""
    target, said = AutoModelForCausalLM.from_pretrained(pair[0]), {"reads": RIGHT, **said}
    model = SpecDecPPAssistant.from_pretrained(pair[1], target=target, eagle3=said).ready_drafter().model
    return compare(model, target, letter_tokenizer()(TEXT, return_tensors="pt")["input_ids"])


def test_the_right_reading_is_best(pair: tuple[Path, Path]) -> None:
    found = readings(pair)
    assert min(found[0].agreement) > 0.9
    assert better(found) is None
    assert [each.name for each in found] == [
        "as read", "layers one lower", "layers one higher", "norm_before_residual true", "norm_output true",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_found_out(pair: tuple[Path, Path], wrong: str) -> None:
    said, override = WRONG[wrong]
    best = better(readings(pair, **said))
    assert best is not None
    assert best.overrides == override
    assert sum(best.agreement) > 1.8
    assert readings(pair, **{**said, **override})[0].agreement == best.agreement, "the override reads it so"


@pytest.mark.parametrize("wrong", WRONG)
def test_mutants_do_not_find_it(pair: tuple[Path, Path], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that builds the other reading without its change."""
    said, override = WRONG[wrong]
    changed = meeting.changed

    def unchanged(settings: Any, overrides: dict[str, Any]) -> Any:
        return settings if overrides == override else changed(settings, overrides)

    monkeypatch.setattr(meeting, "changed", unchanged)
    best = better(readings(pair, **said))
    assert best is None or best.overrides != override


def test_one_step_would_not_tell_what_is_fed_back(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "STEPS", 1)
    assert better(readings(pair, norm_output=True)) is None


def test_the_targets_theta_is_tried(pair: tuple[Path, Path]) -> None:
    config = AutoModelForCausalLM.from_pretrained(pair[0]).config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    settings = SpecDecPPAssistant.from_pretrained(pair[1]).parts.module.settings
    assert ("rope_theta 500000", {"rope_theta": 5e5}) in list(meeting.variants(settings, config))


def copied(pair: tuple[Path, Path], folder: Path, **changes: Any) -> Path:
    """A copy of the draft whose config.json says something else."""
    shutil.copytree(pair[1], folder, dirs_exist_ok=True)
    change_json(folder / "config.json", **changes)
    return folder


def test_ids_that_may_mean_either_are_settled_by_agreement(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair[0])
    for ids in (RIGHT, [read + 1 for read in RIGHT]):
        folder = copied(pair, tmp_path / "draft", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        assert SpecDecPPAssistant.from_pretrained(folder, target=target).ready_drafter().fusion.reads == RIGHT


def test_random_embeddings_in_the_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """An exporter writes such; the target's are right."""
    folder = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    tensors = load_tensors(folder / "model.safetensors")
    shape = (tensors["t2d"].shape[0] if "t2d" in tensors else VOCAB, tensors["norm.weight"].shape[0])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    save_tensors({**tensors, "embed_tokens.weight": noise}, folder / "model.safetensors")
    best = better(readings((pair[0], folder)))
    assert best is not None
    assert (best.name, best.overrides) == ("the target's embeddings", {"own_embeddings": False})
    again = readings((pair[0], folder), own_embeddings=False)
    assert again[0].agreement == best.agreement
    assert "the target's embeddings" not in [each.name for each in again]


# specdecpp inspect REPO --target ID -----------------------------------------------------------------------------------


def inspect(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def test_a_draft_that_is_read_rightly(pair: tuple[Path, Path]) -> None:
    code, output = inspect(pair[1], "--target", pair[0])
    assert code == 0, output
    assert re.search(r"agrees with the target first second as read (9\d|100)% (9\d|100)% layers one lower \d", output)
    assert "The draft agrees as one for this target should, and no other reading agrees better by far." in output


def test_a_draft_that_is_read_wrongly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(pair, tmp_path / "draft", norm_output=True)
    code, output = inspect(folder, "--target", pair[0])
    assert code == 0, output
    assert "far better: norm_output false. Load the draft with eagle3={'norm_output': False}." in output
    SpecDecPPAssistant.from_pretrained(folder, eagle3={"norm_before_fc": False}).save_pretrained(tmp_path / "saved")
    code, output = inspect(tmp_path / "saved", "--target", pair[0])
    assert "eagle3={'norm_before_fc': False, 'norm_output': False}" in output, "with those that there are"
    assert code == 0


def test_a_draft_of_another_target(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tiny("llama", num_hidden_layers=5, seed=7).save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    _, output = inspect(pair[1], "--target", tmp_path)
    assert re.search(
        r"Only \d% of the first candidates agree, .* 40% or more: it is probably for another target", output
    )
    tiny("llama", hidden_size=16, head_dim=8).save_pretrained(tmp_path)
    code, output = inspect(pair[1], "--target", tmp_path)
    assert code == 1
    assert "reads states of 32 numbers, and they have 16 in LlamaForCausalLM" in output
