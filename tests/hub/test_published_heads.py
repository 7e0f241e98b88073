"""Every published repository in `hub_cards/`: sound, small, lossless, and as good as its card says.

The prompts in `data/test_prompts.jsonl` are from the test sets GSM8K and HumanEval (both MIT). The slow tests need the
models: SmolLM2 is in `.models/smollm2` after `make demo`; `SPECDECPP_QWEN=TARGET_FOLDER:DRAFT_FOLDER` names the two of
Qwen2.5-Coder."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.hub.publishing import make_card, opening
from hf_specdecpp.hub.repository import load_config, load_head

pytest.importorskip("datasets", reason="needs the [train] extra")

from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig, settings
from hf_specdecpp.training.recorded_chains import Recorder

ROOT = Path(__file__).parents[2]
HEADS = sorted(path.parent for path in (ROOT / "hub_cards").glob("*/config.json"))
QWEN_TARGET, _, QWEN_DRAFT = os.environ.get("SPECDECPP_QWEN", "/no/such/folder:").partition(":")
# Repository, target, draft, prompts a set, new tokens: as many as a minute or two allow.
CASES: dict[str, tuple[str, Path, Path | None, int, int]] = {
    "smollm2": ("specdecpp-smollm2-135m-instruct", ROOT / ".models" / "smollm2", None, 5, 96),
    "qwen": ("specdecpp-qwen2.5-coder-1.5b-instruct", Path(QWEN_TARGET), Path(QWEN_DRAFT), 3, 48),
}
ALLOWED = {
    "config.json", "acceptance_head.safetensors", "draft_vocab.safetensors", "fusion.safetensors", "README.md",
    "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
}  # fmt: skip
PROMPTS = [json.loads(line) for line in (ROOT / "tests" / "data" / "test_prompts.jsonl").open(encoding="utf-8")]
# Ten answers vary more than the hundred behind the card; half of what the draft is worth would be missed by far.
TOLERANCE = 0.10


@pytest.mark.parametrize("folder", HEADS, ids=lambda path: path.name)
def test_the_card_begins_with_the_speeds_of_its_table(folder: Path) -> None:
    text, rows = (folder / "README.md").read_text(), []
    ratio = r"([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    for row in re.findall(rf"^\| (\w+) \| ([\d.]+) \| ([^|]+) \| [\d.]+ \| {ratio} \| {ratio} \|", text, re.MULTILINE):
        (speedup, *interval), (same, *same_interval) = map(float, row[3:6]), map(float, row[6:])
        rows.append({"set": row[0], "temperature": float(row[1]), "contestant": row[2], "speedup": speedup,
                     "interval": interval, "same_passes": same, "same_passes_interval": same_interval})  # fmt: skip
    assert f"\n\n{opening({'rows': rows})}\n\n" in text


def kept(folder: Path) -> dict[str, Any]:
    """The results that the card of a repository shows."""
    return json.loads((folder.parent / "results" / f"{folder.name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", HEADS, ids=lambda path: path.name)
def test_the_card_is_what_is_written_of_the_results(folder: Path) -> None:
    """`python examples/publish_benchmark.py --card FOLDER` writes it; `train` does, of a run."""
    source = Repository(str(folder))
    config = load_config(source)
    card = make_card(config, load_head(source, config), kept(folder))
    assert (folder / "README.md").read_text(encoding="utf-8") == str(card)


@pytest.mark.parametrize("folder", HEADS, ids=lambda path: path.name)
def test_the_runs_of_a_card_can_be_made_again(folder: Path) -> None:
    """Its settings are taken by today's `train`; a run that went on from another says from which."""
    card, results = (folder / "README.md").read_text(encoding="utf-8"), kept(folder)
    begun = results["distillation"]["begun"]
    shown = re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)
    assert len(shown) == 1 + sum(run["run"] is not None for run in begun)
    for text in shown:
        config = TrainingConfig.from_dict({**yaml.safe_load(text), "output": "out"})
        config.validate()
        assert yaml.safe_load(settings(config)) == yaml.safe_load(text)
        assert (config.distill.start_from is None) == (not begun)
        with pytest.raises(ValueError, match="Unknown setting distill.alpha"):
            TrainingConfig.from_dict({**yaml.safe_load(text), "distill": {"alpha": 320}})
    assert {**results["config"], "output": "out"} == asdict(
        TrainingConfig.from_dict({**yaml.safe_load(shown[0]), "output": "out"})
    )
    for run in begun:
        assert f"of {run['tokens']:,} tokens and {run['epochs']} epochs. " in card


@pytest.mark.parametrize("folder", HEADS, ids=lambda path: path.name)
def test_files(folder: Path) -> None:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files <= ALLOWED
    assert sum((folder / name).stat().st_size for name in files) < 12_000_000
    assert not re.search(r"/(work|home|root|tmp)/", (folder / "README.md").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text())
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", config["target_id"])
    if config["draft_kind"] == "independent":
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", config["draft_id"])
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        assert {adapter.get_slice(name).get_dtype() for name in adapter.keys()} <= {"F16", "BF16"}  # noqa: SIM118 - not a dict


@pytest.mark.parametrize("folder", HEADS, ids=lambda path: path.name)
def test_they_are_sound(folder: Path) -> None:
    report = inspect(Repository(str(folder)))
    kind = json.loads((folder / "config.json").read_text())["draft_kind"]
    assert [file.problem for file in report.files] == [None] * (6 if kind == "conditioned" else 5)


def said(folder: Path, dataset: str, temperature: float) -> float:
    """Mean acceptance of the draft as the card tells it."""
    results = ModelCard.load(folder / "README.md").data.eval_results or []
    name = f"{dataset}, temperature {temperature:g}"
    return next(
        result.metric_value
        for result in results
        if result.metric_type == "mean_acceptance" and result.dataset_name.endswith(name)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["gsm8k_test", "humaneval_test"])
@pytest.mark.parametrize("case", CASES)
def test_lossless_and_as_good_as_the_card(case: str, dataset: str) -> None:
    name, folder, draft, num_prompts, new_tokens = CASES[case]
    repository = ROOT / "hub_cards" / name
    if not (folder / "config.json").exists():
        pytest.skip(f"{folder} is missing, see the top of this file")
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Its own rule may find that speculating does not pay on this machine, and then nothing would be tested.
    rule = SpeculationConfig(rule="threshold", threshold=0.7)
    assistant = SpecDecPPAssistant.from_pretrained(repository, target=target, speculation=rule, draft=draft)
    labels = []
    for row in [row for row in PROMPTS if row["set"] == dataset][:num_prompts]:
        messages = [{"role": "user", "content": row["prompt"]}]
        how: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs: Any = tokenizer.apply_chat_template(messages, **how)
        knobs: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        plain = target.generate(**inputs, **knobs)
        assert torch.equal(plain, target.generate(**inputs, **knobs, assistant_model=assistant))
        assert assistant.stats.accepted > 0
        starts = range(inputs["input_ids"].shape[1] + 1, plain.shape[1], 8)
        recorder = Recorder(assistant, target, Sampling(0.0), "before")
        labels.append(recorder.of_text(plain[0].tolist(), list(starts), torch.Generator())["label"])
    assistant.detach()
    assert abs(float(torch.cat(labels).mean()) - said(repository, dataset, 0.0)) < TOLERANCE
