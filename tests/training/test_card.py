"""The published folder: ids that others can load, and a card that says what was measured, with which data."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from support.files.repos import greedy, logits
from support.runs.hub_server import HubServer, point_client_at
from support.runs.training_files import evaluated, training_run
from support.targets.models import tiny
from transformers import AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.files import Repository
from hf_specdecpp.hub import inspection
from hf_specdecpp.hub.publishing import make_card, opening, unhelped
from hf_specdecpp.hub.repository import load_config, load_head
from hf_specdecpp.training import calibration, evaluation, recorded_chains, rollouts
from hf_specdecpp.training import card as card_stage
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import DistillConfig, TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation

SPEED_ROW = {"set": "sums", "temperature": 0, "tokens_per_pass": 3.21, "prompts": 5, "interval": [1.72, 2.0],
             "same_passes": 1.25, "same_passes_interval": [1.1, 1.3]}  # fmt: skip
SPEED = {
    "command": "specdecpp bench --assistant out",
    "device": "a slow machine, 1 thread",
    "dtype": "float32",
    "rows": [
        {**SPEED_ROW, "contestant": "plain", "tokens_per_second": 1234.56, "speedup": 1.0, "tokens_per_pass": None},
        {**SPEED_ROW, "contestant": "ours", "tokens_per_second": 2345.67, "speedup": 1.9},
    ],
}


@pytest.fixture(scope="module")
def run() -> TrainingConfig:
    config = evaluated("before")
    (config.work / "speed.json").write_text(json.dumps(SPEED))
    return config


@pytest.fixture(scope="module")
def card(run: TrainingConfig) -> ModelCard:
    return ModelCard((card_stage.run(run) / "README.md").read_text())


def test_only_ids_that_others_can_load(run: TrainingConfig, card: ModelCard) -> None:
    folder = Path(run.output)
    stored = json.loads((folder / "config.json").read_text())
    assert (stored["target_id"], stored["target_revision"]) == ("org/target", "abc123")
    assert (stored["draft_id"], stored["draft_revision"]) == ("org/draft", None)
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["r"]) == ("org/draft", 2)
    assert run.draft is not None
    own = json.loads((run.work / "adapter" / "adapter_config.json").read_text())
    assert own["base_model_name_or_path"] == run.draft
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(run.work.parent).encode() not in path.read_bytes(), f"{path} names a folder of this machine"
    data: Any = card.data
    assert data.base_model == ["org/target", "org/draft"]
    assert {path.name for path in folder.rglob("*")} == {
        "README.md", "config.json", "acceptance_head.safetensors", "adapter", "adapter_config.json",
        "adapter_model.safetensors",
    }  # fmt: skip


def test_local_drafts(run: TrainingConfig, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = AutoModelForCausalLM.from_pretrained(run.target)
    assert run.draft is not None
    draft: Any = AutoModelForCausalLM.from_pretrained(run.draft)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with HubServer() as hub:  # without org/draft
        point_client_at(monkeypatch, hub, tmp_path)
        with pytest.raises(OSError, match="org/draft"):
            SpecDecPPAssistant.from_pretrained(run.output, target=target)
        hub.requests.clear()
        assistant = SpecDecPPAssistant.from_pretrained(run.output, target=target, draft=draft)
        assert hub.requests == []
    assistant.speculation.rule = "threshold"  # by the default rule this draft would not pay
    assert greedy(target, assistant) == greedy(target)
    assert assistant.stats.accepted > 0
    reference = SpecDecPPAssistant.from_draft(run.draft, target, adapter=run.work / "adapter", head=assistant.head)
    ours, theirs = (logits(each.ready_drafter().model) for each in (assistant, reference))
    assert (ours - theirs).abs().max() < 1e-4, "with the adapter on it"
    assert (assistant.config.draft_id, assistant.config.target_id) == ("org/draft", "org/target")
    for name, tensor in before.items():
        assert tensor.equal(draft.state_dict()[name]), "the draft itself is as it was"


def tables(card: ModelCard) -> dict[str, list[list[str]]]:
    """The cells of each table, by the line of text before it."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in card.text.splitlines():
        if line.startswith("|"):
            found.setdefault(title, []).append([cell.strip() for cell in line.strip("|").split("|")])
        elif line.strip():
            title = line
    return found


def test_the_card_has_a_table_for_each_set_and_temperature(run: TrainingConfig, card: ModelCard) -> None:
    report = json.loads((run.work / "evaluation" / "evaluation.json").read_text())
    found = {title: rows for title, rows in tables(card).items() if title.startswith("**")}
    assert [title.split("**")[1] for title in found] == [
        f"{name}, temperature {temperature}" for name in ("heldout", "sums") for temperature in ("1", "0")
    ]
    parts = [part for each in report["sets"].values() for part in each.values()]
    for (title, rows), part in zip(found.items(), parts, strict=True):
        best = part["equal_verification"]["at_best"]
        assert f"{part['candidates']:,} candidates, mean acceptance {part['mean_acceptance']:.3f}" in title
        if part["interval"] is not None:
            assert "[{:.3f}, {:.3f}]".format(*part["interval"]) in title
        assert [row[0] for row in rows[2:]] == [
            "**head**",
            "draft probability",
            "draft probability, calibrated",
            f"fixed length {best['length']}",
        ]
        head = part["estimators"]["head"]
        assert rows[2][1:4] == [f"{head[metric]:.3f}" for metric in ("auc", "ece", "binary_kl")]
        fewer = best["fewer_discards"]["head"]
        assert rows[2][5] == ("–" if fewer is None else f"{100 * fewer:.0f} %")
        assert rows[-1][4] == f"{best['discard_rate']:.3f}"
    results: Any = card.data
    assert len(results.eval_results) == 2 * 2 * 4
    assert len({result.dataset_name for result in results.eval_results}) == 2 * 2, "each set keeps its name"
    assert f"on {report['device']}, float32." in card.text


BY = "(speculative decoding with [hf_specdecpp](https://pypi.org/project/hf-specdecpp/)).\n"


@pytest.mark.parametrize(
    ("speedup", "same_passes", "begins"),
    [(1.9, 1.25, "Makes"), (0.85, 0.85, "Did not make"), (1.9, 1.0, "Did not make")],
    ids=["faster", "slower", "only the passes are"],
)
def test_the_card_begins_with_what_was_measured(speedup: float, same_passes: float, begins: str) -> None:
    row = {**SPEED_ROW, "contestant": "ours", "speedup": speedup, "interval": [speedup - 0.1, speedup + 0.1]}
    row |= {"same_passes": same_passes, "same_passes_interval": [same_passes - 0.1, same_passes + 0.1]}
    others = [{**row, "contestant": name, "speedup": 9.0} for name in ("plain", "lookup", "prompt lookup 2")]
    other_set = {**row, "contestant": "ours", "set": "other", "speedup": 9.0}
    said = opening({"rows": [*others, {**row, "contestant": "worse", "speedup": 0.5}, row, other_set]})
    claim = "`generate()` of the target faster; the output is unchanged"
    assert said.startswith(f"{begins} {claim}\n{BY}")
    assert f"{speedup:.2f} ({speedup - 0.1:.2f} to {speedup + 0.1:.2f}) times the speed of plain" in said
    assert said.endswith("in the fastest setting (ours; sums, temperature 0).")


def test_the_card_of_what_was_not_measured_says_so(run: TrainingConfig, card: ModelCard, tmp_path: Path) -> None:
    assert card.text.split("\n\n")[1].startswith("Makes `generate()` of the target faster")
    assert "1.90 (1.72 to 2.00) times" in card.text.split("\n\n")[1]
    SpecDecPPAssistant.from_early_exit(tiny("llama"), 1).save_pretrained(tmp_path)
    plain = ModelCard((tmp_path / "README.md").read_text()).text.split("\n\n")[1]
    assert plain.startswith(
        f"Proposes tokens that `generate()` of the target verifies, so that its output is unchanged\n{BY}"
    )
    assert "The speed has not been measured yet" in plain
    assert "faster" not in plain
    assert opening({"rows": [{**SPEED_ROW, "contestant": "plain", "speedup": 1.0}]}) == plain


def trained(shares: dict[str, float], after: float = 0.5, auc: float = 0.8, kl: float = 0.3) -> dict[str, Any]:
    """What a card knows of a run whose draft was accepted with probability 0.5 before training."""
    judged = {"head": {"auc": auc, "binary_kl": kl}, "draft probability": {"auc": 0.7, "binary_kl": 0.4}}
    acceptance = {when: {"all": {"acceptance": each}} for when, each in (("before", 0.5), ("after", after))}
    sets = {"heldout": {"1": {"estimators": judged}}}
    return {"distillation": {**acceptance, "shares": shares}, "evaluation": {"sets": sets}}


def test_the_card_says_what_training_did_not_help() -> None:
    for helped in (None, trained({"1.00": 0.6}, 0.6), trained({"1.00": 0.6, "0.00": 0.5}, 0.6)):
        assert unhelped(helped) == []
    not_kept = unhelped(trained({"1.00": 0.4, "0.33": 0.45, "0.00": 0.5}))
    assert not_kept == [
        "Training did not help the draft: a candidate is accepted with probability 0.500 without training, and with "
        "it at most 0.450."
    ]
    fitted = trained({"1.00": 0.55, "0.00": 0.6}, 0.6)
    assert "probability 0.600 without training, and with it at most 0.550" in unhelped(fitted)[0], (
        "least squares are better"
    )
    silent, said_of = ((0.8, 0.5), (0.6, 0.3)), ((0.6, 0.5), (0.5, 0.3), (0.5, 0.5), (0.2, 0.11))
    for auc, kl in (*silent, *said_of):
        said = unhelped(trained({"1.00": 0.6}, 0.6, auc, kl))
        assert bool(said) is ((auc, kl) in said_of)
        begins = "Training did not help the head" if kl > 0.4 else "The head estimates how often candidates "
        assert all(each.startswith(begins) and f": its AUC is {auc:.3f} and" in each for each in said)
    assert len(unhelped({**trained({}, auc=0.6, kl=0.5), "distillation": {"before": {}}})) == 1


def test_the_card_shows_speeds(card: ModelCard) -> None:
    title, rows = next(
        (title, rows) for title, rows in tables(card).items() if title.startswith("Measured by `specdecpp bench")
    )
    assert title == "Measured by `specdecpp bench --assistant out` on a slow machine, 1 thread, float32."
    assert rows[2:] == [
        ["sums", "0", "plain", "1,234.6", "1.00 (1.72 to 2.00)", "1.25 (1.10 to 1.30)", "–", "5"],
        ["sums", "0", "ours", "2,345.7", "1.90 (1.72 to 2.00)", "1.25 (1.10 to 1.30)", "3.21", "5"],
    ]


def test_the_settings_in_the_card_make_the_run_again(run: TrainingConfig, card: ModelCard) -> None:
    settings = re.findall(r"```yaml\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(settings) == 1
    again = TrainingConfig.from_dict(yaml.safe_load(settings[0]))
    assert (again.target, again.draft, again.rollouts.data) == ("org/target", "org/draft", ["prompts.jsonl"])
    assert (again.head, again.distill) == (run.head, run.distill)
    assert again.evaluation.data == ["sums.jsonl"]
    assert not {"{{", "{%", "None", "nan"} & set(re.findall(r"\{\{|\{%|\bNone\b|\bnan\b", card.text))


@pytest.mark.usefixtures("card")
def test_the_card_names_the_runs_that_came_before(run: TrainingConfig) -> None:
    """It is written of what the run's folder keeps; of a run whose settings nobody has it says so."""
    repository, results = Repository(run.output), json.loads((run.work / card_stage.RESULTS).read_text())
    earlier = [{"tokens": 1234, "epochs": 2, "run": "target: org/earlier\n"}, {"tokens": 567, "epochs": 3, "run": None}]
    results["distillation"]["begun"] = earlier
    config = load_config(repository)
    text = str(make_card(config, load_head(repository, config), results))
    assert ", continued from an earlier run of 1,234 tokens and 2 epochs" in text
    assert text.index(
        "of 1,234 tokens and 2 epochs. Its settings:\n\n```yaml\ntarget: org/earlier\n```\n"
    ) < text.index("That run continued another run, of 567 tokens and 3 epochs. Its settings were not stored.\n")


@pytest.mark.slow
def test_an_early_exit_has_the_target_as_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_chains, "STARTS", 3)
    config = training_run(tmp_path, early_exit=True, epochs=1.0)
    config.distill, config.target_id = DistillConfig(rank=2, batch_size=4), "org/target"
    config.speculation = {"cpu_products": "off"}
    for stage in (distillation, head_fitting, calibration, evaluation, card_stage):
        stage.run(config)
    stored = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == "org/target"
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ours["draft_id"] is None
    assert (ours["speculation"]["rule"], ours["speculation"]["cpu_products"]) == ("throughput", "off")
    target = AutoModelForCausalLM.from_pretrained(config.target)
    assert greedy(target, SpecDecPPAssistant.from_pretrained(config.output, target)) == greedy(target)


# What a run is worth, and names that others cannot load. --------------------------------------------------------------


def rarely(run: TrainingConfig, folder: Path, accepted: float, **changes: Any) -> TrainingConfig:
    """The run, copied, with another acceptance on the held-out prompts."""
    shutil.copytree(run.work, folder / "work")
    path = folder / "work" / "evaluation" / "evaluation.json"
    report = json.loads(path.read_text())
    for each in report["sets"]["heldout"].values():
        each["mean_acceptance"] = accepted
    path.write_text(json.dumps(report))
    return replace(run, output=str(folder / "out"), work_dir=str(folder / "work"), **changes)


@pytest.mark.daily("0.099-False", "0.1-True")
@pytest.mark.parametrize(("accepted", "is_enough"), [(0.031, False), (0.099, False), (0.1, True), (0.8, True)])
def test_what_is_hardly_accepted_is_not_to_be_used(
    accepted: float, is_enough: bool, run: TrainingConfig, tmp_path: Path
) -> None:
    config = rarely(run, tmp_path, accepted)
    card = (card_stage.run(config) / "README.md").read_text()
    says = card_stage.summary(config)
    assert f"acceptance  {accepted:.3f} of a candidate" in says
    assert ("use it      assist(model" in says) is is_enough
    assert ("--push_to_hub" in says) is is_enough
    assert (f"not yet     A candidate is accepted with probability {accepted:.3f} only." in says) is not is_enough
    trained = re.search(
        r"This run trained on [\d,]+ tokens of answers\. More prompts give more answers, which help", says
    )
    assert (trained is not None) is not is_enough
    assert (f"A candidate is accepted with probability {accepted:.3f} only." in card) is not is_enough


def test_a_folder_is_no_id(run: TrainingConfig, tmp_path: Path) -> None:
    """Of a target that was read from a folder its name is kept, but not as something that others can load."""
    config = rarely(run, tmp_path, 0.5, target_id=None, target_revision=None)
    folder, name = card_stage.run(config), Path(run.target).name
    card = (folder / "README.md").read_text()
    assert f"| target | {name}, the name of a folder: its Hub id is not known |" in card
    assert 'AutoModelForCausalLM.from_pretrained("TARGET")' in card
    assert f'from_pretrained("{name}")' not in card
    assert f"first set target_id, the Hub id of {run.target!r}" in card_stage.summary(config)
    report = inspection.inspect(Repository(str(folder)))
    assert [each for each in report.traps if f"target_id={name!r}, which seems to be a local folder" in each]
    known = rarely(run, tmp_path / "known", 0.5)
    report = inspection.inspect(Repository(str(card_stage.run(known))))
    assert not [each for each in report.traps if "target_id" in each]
    assert "first set target_id" not in card_stage.summary(known)


@pytest.mark.parametrize(("tokens", "is_little"), [(469, True), (49_999, True), (50_000, False)])
def test_few_tokens_are_warned_of(tokens: int, is_little: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(rollouts.logger, "warning", warnings.append)
    rollouts.warn_of_few(answers=12, answer_tokens=tokens, finished=12)
    assert [f"trains on {tokens:,} tokens of 12 answers" in each for each in warnings] == [True] * is_little
