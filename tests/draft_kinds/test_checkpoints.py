"""What is alike for drafts that others trained, in every dialect: their files, and what is refused of damaged ones."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files import dflash_files, dspark_files, gemma4_files
from support.files.checkpoints import WEIGHTS, edited, in_shards
from support.files.eagle3_files import VARIANTS as EAGLE3
from support.targets.models import tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.draft_kinds.known import BY_NAME, PUBLISHED, ready_made, recognise
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.training.configuration import TrainingConfig


@dataclass(frozen=True)
class Case:
    """A dialect: how a small draft of it is written into a folder, and the targets that it fits and does not fit."""

    kind: str
    save: Callable[[Path], Any]
    target: Callable[..., Any]

    def load(self, folder: Path, **options: Any) -> SpecDecPPAssistant:
        return SpecDecPPAssistant.from_pretrained(folder, target=self.target(), **options)


def eagle3_target(**changes: Any) -> Any:
    return tiny("llama", **({**changes, "head_dim": 8} if changes else {}))


CASES = {
    "eagle3": Case("eagle3", lambda folder: EAGLE3["plain"].save(folder), eagle3_target),
    "eagle3, speculators": Case("eagle3", lambda folder: EAGLE3["plain"].save(folder, "speculators"), eagle3_target),
    **{
        f"dflash, {dialect}": Case(
            "dflash",
            lambda folder, dialect=dialect: dflash_files.VARIANTS["plain"].save(folder, dialect),  # type: ignore[misc]
            dflash_files.target_for,
        )
        for dialect in dflash_files.DIALECTS
    },
    **{
        f"dspark, {name}": Case("dspark", dspark_files.VARIANTS[name].save, dspark_files.target_for)
        for name in ("minicpm", "speculators", "specforge", "gemma4")
    },
    "gemma4": Case(
        "gemma4",
        lambda folder: gemma4_files.VARIANTS["clusters"].theirs().save_pretrained(folder),
        gemma4_files.target_for,
    ),
}
ALL = pytest.mark.parametrize("name", CASES)


def written(name: str, folder: Path) -> Path:
    CASES[name].save(folder)
    return folder


def weights_of(folder: Path) -> dict[str, Any]:
    """The tensors of numbers that are trained."""
    return {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if tensor.is_floating_point()}


def parts(assistant: SpecDecPPAssistant) -> dict[str, Any]:
    found: dict[str, Any] = assistant.ready_drafter().model.state_dict()
    return found


def test_every_format_is_here() -> None:
    recognised = {kind.name for kind in PUBLISHED if kind.is_whole}
    assert {case.kind for case in CASES.values()} == recognised


@ALL
def test_by_either_method_and_in_several_files(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], written(name, tmp_path / "one")
    first = case.load(folder)
    assert first.kind is BY_NAME[case.kind]
    assert first.speculation.rule == "throughput"
    assert recognise(json.loads((folder / "config.json").read_text())) is first.kind
    assert ready_made(Repository(str(folder))) is first.kind
    in_shards(written(name, tmp_path / "shards"))
    given = SpecDecPPAssistant.from_draft(folder, target=case.target())
    for other in (given, case.load(tmp_path / "shards")):
        assert parts(other).keys() == parts(first).keys()
        assert all(torch.equal(tensor, parts(first)[name]) for name, tensor in parts(other).items())
    with pytest.raises(ValueError, match=f"{case.kind} draft is taken as it is"):
        SpecDecPPAssistant.from_draft(folder, target=case.target(), draft_vocab=[1, 2])


@ALL
def test_named_as_the_draft_of_a_training_run(name: str, tmp_path: Path) -> None:
    """It stays as it is and gets a head, where its kind can."""
    named = TrainingConfig(target="org/model", output=str(tmp_path), draft=str(written(name, tmp_path / "theirs")))
    named.rollouts.data = ["prompts.jsonl"]
    named.find_ready_made()
    if CASES[name].kind == "gemma4":
        with pytest.raises(ValueError, match="loaded, not trained"):
            named.validate()
    else:
        assert (named.draft, named.ready_made) == (CASES[name].kind, str(tmp_path / "theirs"))
        named.validate()


@ALL
def test_inspected(name: str, tmp_path: Path) -> None:
    report = inspect(Repository(str(written(name, tmp_path))))
    assert report.sound
    assert report.is_foreign
    assert [file.name for file in report.files] == ["config.json", WEIGHTS]
    assert "parameters" in report.files[1].content


@ALL
def test_exported_only_where_it_was_changed(name: str, tmp_path: Path) -> None:
    kind = next(kind for kind in PUBLISHED if kind.name == CASES[name].kind)
    if kind.served_by:
        with pytest.raises(ValueError, match=re.escape(f"nothing is exported: {kind.served_by}")):
            export(written(name, tmp_path / "theirs"), tmp_path / "out", str(tmp_path))


@ALL
def test_a_target_of_another_width(name: str, tmp_path: Path) -> None:
    target = CASES[name].target(hidden_size=24)
    with pytest.raises(ValueError, match="(is 32 wide|reads states of 32 numbers).*(another target|trained for alone)"):
        SpecDecPPAssistant.from_pretrained(written(name, tmp_path), target=target)


@ALL
def test_the_dtype_is_the_targets(name: str, tmp_path: Path) -> None:
    """Rotary frequencies keep their digits: rounded to bfloat16 they turn far tokens by whole radians more."""
    target = CASES[name].target().to(torch.bfloat16)
    draft = SpecDecPPAssistant.from_pretrained(written(name, tmp_path), target=target).ready_drafter()
    model: Any = draft.model
    assert draft.dtype == model.dtype == torch.bfloat16
    frequencies = [each for name, each in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies
    for each in frequencies:
        assert each.dtype == torch.float32
        assert not torch.equal(each, each.bfloat16().float())


def refused(name: str, folder: Path, match: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        CASES[name].load(folder)


# DSpark's heads are described by their tensors, which the config may contradict.
OF_HEADS = "|, and by the draft's tensors that is .*do not belong together|has no d2t"
ANY: dict[str, tuple[Any, str]] = {
    "missing": (None, f"of the form that this package reads: missing .*again{OF_HEADS}"),
    "of another shape": (torch.ones(7, 5), rf"has shape \[7, 5\], and config.json makes it \[{OF_HEADS}"),
}


@pytest.mark.daily("*-eagle3", "missing-dflash, speculators")
@ALL
@pytest.mark.parametrize("damage", ANY)
def test_any_tensor(damage: str, name: str, tmp_path: Path) -> None:
    tensor, reason = ANY[damage]
    whole = load_file(written(name, tmp_path) / WEIGHTS)
    for wrong in weights_of(tmp_path):
        save_file(whole, tmp_path / WEIGHTS)
        refused(name, edited(tmp_path, **{wrong: tensor}), reason)


TENSORS: dict[str, tuple[Callable[[str, Any], dict[str, Any]], str]] = {
    "unknown": (
        lambda *_: {"bias": torch.zeros(2)},
        "this is not an? .* of the form that this package reads: unexpected bias",
    ),
    "whole numbers": (lambda norm, weight: {norm: torch.ones_like(weight, dtype=torch.int8)}, "int8.*Quantised"),
    "not a number": (lambda norm, weight: {norm: torch.full_like(weight, torch.nan)}, "NaN or infinite values in"),
}


@ALL
@pytest.mark.parametrize("damage", TENSORS)
def test_other_tensors(damage: str, name: str, tmp_path: Path) -> None:
    change, reason = TENSORS[damage]
    norms = [pair for pair in weights_of(written(name, tmp_path)).items() if pair[1].dim() == 1]
    refused(name, edited(tmp_path, **change(*norms[0])), reason)


@ALL
def test_no_pickle_and_nothing_outside_is_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("opened a pickle"))
    (written(name, tmp_path) / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    refused(name, tmp_path, rf"neither model\.safetensors nor.*pickle.*specdecpp inspect {tmp_path} --convert FOLDER")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    refused(name, tmp_path, "does not map tensors to safetensors files in its folder")
