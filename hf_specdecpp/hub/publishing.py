"""Writes an assistant's repository to a folder and to the Hub, with a model card from `card_template.md`."""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitInfo, EvalResult, HfApi, ModelCard, ModelCardData

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import Parts
from hf_specdecpp.draft_kinds.known import describe, kind_of
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.ledger import Speed, effect
from hf_specdecpp.files import Repository, read_json, save_tensors, save_text
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.provenance import public_name
from hf_specdecpp.version import __version__

TEMPLATE = Path(__file__).with_name("card_template.md")
NONE = "–"
LEAST_ACCEPTANCE = 0.1  # a candidate costs 0.07 target passes or more (docs/choosing.md)
NOT_THE_HEAD = "Training did not help the head"
OTHERS = ("plain", "transformers", "prompt lookup")  # contestants of a benchmark that do not use the assistant
THIS_REPO = "THIS_REPO"  # placeholder in a card, which `push` replaces by the repository's id


@dataclass(frozen=True)
class Contents:
    """The contents of an assistant's repository (`SpecDecPPAssistant.contents`). The config is copied, not changed;
    `calibration`, if not `None`, replaces that of the config."""

    config: SpecDecPPConfig
    speculation: SpeculationConfig
    head: AcceptanceHead | None = None
    parts: Parts = field(default_factory=Parts)
    calibration: dict[str, list[float]] | None = None

    def described(self) -> SpecDecPPConfig:
        """Return the config for `config.json` of the repository."""
        config = copy.deepcopy(self.config)
        config.head = self.head.to_config() if self.head is not None else None
        parts, kind = self.parts, kind_of(config)
        if parts.module is not None and kind.has_own_file(config):
            setattr(config, kind.own_field, parts.module.to_config())
        config.adapter = parts.adapter is not None
        config.draft_vocab_size = len(parts.draft_vocab) if parts.draft_vocab is not None else None
        config.calibration = config.calibration if self.calibration is None else self.calibration
        config.speculation = self.speculation.to_dict()
        config.specdecpp_version, config.transformers_version = __version__, transformers.__version__
        config.architectures = ["SpecDecPPAssistant"]
        return config


def save(contents: Contents, folder: Path) -> None:
    """Write the repository; an existing `README.md` is kept. `ValueError` if the draft is a model without a name."""
    config = contents.described()
    kind = kind_of(config)
    if kind.is_named and config.draft_id is None:
        raise ValueError(
            "The draft is a model in memory without a Hub id or folder, so the saved assistant could not be loaded. "
            "Save the draft, load it from there and build the assistant from that: assist(model, folder)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if contents.head is not None:
        save_tensors(contents.head.state_dict(), folder / HEAD)
    parts = contents.parts
    if parts.module is not None and kind.has_own_file(config):
        save_tensors(kind.own_tensors(parts.module), folder / kind.own_file)
    if parts.draft_vocab is not None:
        save_tensors({"token_ids": parts.draft_vocab}, folder / DRAFT_VOCAB)
    if parts.adapter is not None:
        # Written without folders of this machine.
        place, base = folder / ADAPTER_FOLDER, getattr(config, f"{kind.rests_on}_id")
        place.mkdir(exist_ok=True)
        config_name, weights_name = ADAPTER_FILES
        adapter = {**read_json(parts.adapter / config_name), "base_model_name_or_path": base and public_name(base)}
        if parts.adapter.resolve() != place.resolve():
            shutil.copyfile(parts.adapter / weights_name, place / weights_name)
        save_text(json.dumps(adapter, indent=2) + "\n", place / config_name)
    # Last: a config marks the folder as complete.
    save_text(config.to_json_string(), folder / CONFIG)
    if not (folder / CARD).exists():
        save_text(str(make_card(config, contents.head)), folder / CARD)


def push(
    contents: Contents, repo_id: str, card: str | None = None, private: bool | None = None,
    token: str | bool | None = None, **commit: Any,
) -> CommitInfo:  # fmt: skip
    """Upload the assistant's repository to the Hub. An existing model card is kept, unless `card` has a new one.

    A local target is named without its parent folders. `commit`: arguments of `huggingface_hub.upload_folder`.
    `ValueError` if the draft is a local folder; errors of the upload as in `huggingface_hub`."""
    config = contents.config
    if config.draft_id is not None and Path(config.draft_id).exists():
        raise ValueError(
            f"The draft {config.draft_id!r} is a local folder, so nobody else could load this assistant. Push the "
            "draft first and build the assistant from its Hub id, or set assistant.config.draft_id to it."
        )
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # An existing card may have been edited.
    kept = [CARD] if card is None and api.file_exists(repo, CARD, revision=commit.get("revision")) else None
    text = str(make_card(contents.described(), contents.head)) if card is None else card
    config = copy.deepcopy(config)
    config.target_id = config.target_id and public_name(config.target_id)
    with tempfile.TemporaryDirectory() as folder:
        save_text(text.replace(THIS_REPO, repo), Path(folder, CARD))
        save(replace(contents, config=config), Path(folder))
        return api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=kept, **commit)


# The card -------------------------------------------------------------------------------------------------------------


def make_card(
    config: SpecDecPPConfig, head: AcceptanceHead | None, training: dict[str, Any] | None = None
) -> ModelCard:
    """Make the card of an assistant from its config (as stored) and head. `training`: `training.card.results`."""
    ids = [name for name in (config.target_id, config.draft_id) if name and not Path(name).exists()]
    bases = [Repository(name).name for name in ids]
    sets = {} if training is None else training["evaluation"]["sets"]
    reports = [(name, at, report) for name, temperatures in sets.items() for at, report in temperatures.items()]
    data = ModelCardData(
        library_name="hf_specdecpp",
        base_model=bases or None,
        base_model_relation="adapter" if config.adapter and bases else None,
        tags=["speculative-decoding", "assisted-generation", "specdecpp"],
        pipeline_tag="text-generation",
        license=training.get("license") if training else None,
        model_name="SpecDec++ assistant" if training else None,
        eval_results=list(_eval_results(reports)) if training else None,
    )
    config = copy.deepcopy(config)
    config.target_id, config.draft_id = (name and public_name(name) for name in (config.target_id, config.draft_id))
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        config=config,
        head=head,
        training=training,
        number=number,
        draft=describe(config),
        is_independent=kind_of(config).rests_on == "draft",
        opening=opening((training or {}).get("speed")),
        unhelped=[*unhelped(training), *filter(None, [training and too_rarely_accepted(training["evaluation"])])],
        no_id=no_id,
        tables=reports,
    )


def no_id(name: str | None) -> bool:
    """Whether `name` cannot be a Hub id (ORG/NAME), so that it is the name of a local folder; `False` for `None`."""
    return bool(name) and ("/" not in str(name) or str(name).startswith(("/", ".", "~")))


def opening(speed: dict[str, Any] | None) -> str:
    """Return a card's first paragraph, with the speed-up that `specdecpp bench --card` has measured, if any."""
    by = "(speculative decoding with [hf_specdecpp](https://pypi.org/project/hf-specdecpp/))"
    rows = speed["rows"] if speed else []
    rows = [row for row in rows if (row["set"], row["temperature"]) == (rows[0]["set"], rows[0]["temperature"])]
    ours = [row for row in rows if not row["contestant"].startswith(OTHERS) and row["contestant"] != "lookup"]
    if not ours:
        return (
            f"Proposes tokens that `generate()` of the target verifies, so that its output is unchanged\n{by}.\n"
            "The speed has not been measured yet: run `specdecpp bench`."
        )
    best = max(ours, key=lambda row: row["speedup"])
    plain = Speed(best["speedup"], *best["interval"])
    same = Speed(best["same_passes"], *best["same_passes_interval"])
    made = "Makes" if effect(plain, same) == "gain" else "Did not make"
    how = f"{best['contestant']}; {best['set']}, temperature {best['temperature']:g}"
    return (
        f"{made} `generate()` of the target faster; the output is unchanged\n{by}.\n[Measured](#speed), with 95 % "
        f"intervals: {plain} times the speed of plain `generate()`, and {same} times its speed\nwith the same matrix "
        f"multiplications, in the fastest setting ({how})."
    )


def unhelped(training: dict[str, Any] | None) -> list[str]:
    """Return sentences for the card if training did not improve the draft or the head on held-out prompts."""
    if training is None:
        return []
    found, drafted = [], training["distillation"] or {}
    if "after" in drafted:
        before, after = (drafted[when]["all"]["acceptance"] for when in ("before", "after"))
        shares = drafted.get("shares", {})
        most = max((value for share, value in shares.items() if float(share)), default=after)
        if most <= max(before, shares.get("0.00", before)):
            found.append(
                "Training did not help the draft: a candidate is accepted with probability "
                f"{number(max(before, after))} without training, and with it at most {number(most)}."
            )
    judged = next(iter(training["evaluation"]["sets"]["heldout"].values()))["estimators"]
    head, own = judged["head"], judged["draft probability"]
    ranks = round(head["auc"], 2) > 0.5
    is_better = (ranks and head["auc"] > own["auc"]) or head["binary_kl"] < own["binary_kl"]
    if not is_better or not ranks:
        what = "The head estimates how often candidates are accepted, but not which ones" if is_better else NOT_THE_HEAD
        found.append(
            f"{what}: its AUC is {number(head['auc'])} and its binary KL {number(head['binary_kl'])}, those of the "
            f"draft's own probability are {number(own['auc'])} and {number(own['binary_kl'])}."
        )
    return found


def too_rarely_accepted(evaluation: dict[str, Any]) -> str | None:
    """Return a sentence for the card if the held-out acceptance is too low for a speed-up; otherwise `None`."""
    accepted = next(iter(evaluation["sets"]["heldout"].values()))["mean_acceptance"]
    if accepted >= LEAST_ACCEPTANCE:
        return None
    return (
        f"A candidate is accepted with probability {number(accepted)} only. Drafting makes `generate()` faster if "
        f"that is more than a candidate costs in target passes, which is hardly ever less than {LEAST_ACCEPTANCE}."
    )


def number(value: float | None, digits: int = 3, percent: bool = False) -> str:
    """Format a number: `0.1234` as "0.123" (3 `digits`), or as "12 %" with `percent`; `None` and NaN as "–"."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.0f} %" if percent else f"{value:,.{digits}f}"


def _eval_results(reports: list[tuple[str, str, dict[str, Any]]]) -> Iterator[EvalResult]:
    """A card's model-index: acceptance, AUC, ECE and binary KL of each (set, temperature, report), where finite."""
    for name, temperature, report in reports:
        measured = {"mean_acceptance": report["mean_acceptance"], **report["estimators"]["head"]}
        for metric in ("mean_acceptance", "auc", "ece", "binary_kl"):
            if math.isfinite(value := measured[metric]):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type="rollouts",
                    dataset_name=f"answers of the target to {name}, temperature {temperature}",
                    dataset_config=f"{name}, temperature {temperature}",  # without it, the index joins all sets
                    metric_type=metric,
                    metric_value=round(value, 4),
                )
