"""Stage `card`: write the assistant's repository, with its model card, from the results of the other stages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.known import describe
from hf_specdecpp.files import read_json, save_text
from hf_specdecpp.hub.publishing import make_card, no_id, number, too_rarely_accepted
from hf_specdecpp.hub.repository import CARD, CONFIG
from hf_specdecpp.provenance import command, public_name, source_commit
from hf_specdecpp.texts import answers
from hf_specdecpp.training import evaluation
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import TrainingConfig, file_names, settings
from hf_specdecpp.training.distillation.distill import REPORT
from hf_specdecpp.training.models import CALIBRATION, EVALUATION_FOLDER, HEAD, Trained
from hf_specdecpp.training.trainers import save_json
from hf_specdecpp.version import __version__

EVALUATION = Path(EVALUATION_FOLDER, evaluation.REPORT)
SPEED, RESULTS = "speed.json", "card.json"


def run(config: TrainingConfig) -> Path:
    """Write the repository into `config.output`, and return that path. The model card there is replaced; it includes
    the speeds of `work/speed.json`, if `specdecpp bench --card` wrote that file. `work/card.json` stores the results
    that `make_card` takes. `ValueError` if the head has not been evaluated yet."""
    training = results(config)
    assistant = Trained.load(config).assistant
    # For generation in several processes, where `throughput` cannot measure costs and becomes `threshold`.
    first = next(iter(training["evaluation"]["sets"]["heldout"].values()))
    best = max(first["curves"]["head"], key=lambda point: point["speed"])
    assistant.speculation = SpeculationConfig(**{"threshold": best["setting"], **config.speculation})
    assistant.config.acceptance_by_rank = training["evaluation"]["acceptance_by_rank"]
    own = assistant.config
    if config.target_id is not None:
        own.target_id, own.target_revision = config.target_id, config.target_revision
    if config.draft_id is not None:
        own.draft_id, own.draft_revision = config.draft_id, config.draft_revision
    card = make_card(assistant.contents().described(), assistant.head, training)
    # After the card, which does not list folders of this machine as base models.
    own.target_id, own.draft_id = (name and public_name(name) for name in (own.target_id, own.draft_id))
    assistant.save_pretrained(output := Path(config.output))
    save_text(str(card), output / CARD)
    save_json(training, config.work / RESULTS)
    return output


def results(config: TrainingConfig) -> dict[str, Any]:
    """Settings and results of all stages for `make_card`, `None` for a stage that has not run. `eval` must have run."""
    if not (config.work / EVALUATION).is_file():
        raise ValueError(f"{config.work / EVALUATION} is missing: run 'head', 'calibrate' and 'eval' before 'card'.")
    work = config.work
    fitted = _read(work / HEAD / head_fitting.RECORD)
    return {
        "config": asdict(config),
        "data": {"training": file_names(config.rollouts.data), "test": file_names(config.evaluation.data)},
        "settings": settings(config),
        "evaluation": _read(work / EVALUATION),
        "rollouts": _read(work / answers.FOLDER / answers.RECORD),
        "distillation": _read(work / REPORT),
        "head": fitted and fitted["settings"]["head"],
        "head_metrics": fitted,
        "calibration": _read(work / HEAD / CALIBRATION),
        "speed": _read(work / SPEED),
        "provenance": {
            "command": command(folders=False),
            "hf_specdecpp": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "git_commit": source_commit(),
        },
    }


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def summary(config: TrainingConfig) -> str:
    """Return the text that a finished run prints, with held-out acceptance at the first temperature, and next steps."""
    made = read_json(Path(config.output) / CONFIG)
    measured = read_json(config.work / EVALUATION)
    temperature, report = next(iter(measured["sets"]["heldout"].items()))
    draft = config.named_draft or describe(SpecDecPPConfig.from_dict(made))
    adapter = " with an adapter" if made["adapter"] else ""
    named = "" if config.named_draft is None else f", draft={config.named_draft!r}"
    share = "the same command with --stage card --push_to_hub YOU/NAME"
    if no_id(made["target_id"]):
        share = f"first set target_id, the Hub id of {config.target!r}, in a --config file; then {share}"
    found = [
        f"{config.output}: {draft}{adapter}, and an acceptance head, for {config.target}",
        f"acceptance  {number(report['mean_acceptance'])} of a candidate on average ({report['texts']} "
        f"text{'' if report['texts'] == 1 else 's'}, temperature {temperature})",
    ]
    use = f"assist(model, {config.output!r}{named}); model.generate(**inputs)"
    if (why := too_rarely_accepted(measured)) is None:
        return "\n".join([*found, f"use it      {use}", f"share it    {share}"])
    tokens = answers.record(config.work)["train"]["answer_tokens"]
    more = f"This run trained on {tokens:,} tokens of answers. More prompts give more answers, which help."
    return "\n".join([*found, f"not yet     {why} {more}", f"try it      {use}"])
