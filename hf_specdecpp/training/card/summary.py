"""What a finished run says in the terminal: what it made, how good that is, and what to do with it."""

from __future__ import annotations

from pathlib import Path

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts.known import describe
from hf_specdecpp.files import read_json
from hf_specdecpp.hub.card import number
from hf_specdecpp.hub.repository import CONFIG
from hf_specdecpp.training.configuration import TrainingConfig


def summary(config: TrainingConfig) -> str:
    """A few lines about the assistant in `config.output`; figures of the held-out prompts, the first temperature."""
    made = read_json(Path(config.output) / CONFIG)
    evaluation = read_json(config.work / "evaluation" / "evaluation.json")
    temperature, report = next(iter(evaluation["sets"]["heldout"].items()))
    draft = config.named_draft or describe(SpecDecPPConfig.from_dict(made))
    adapter = " with an adapter" if made["adapter"] else ""
    best = report["equal_verification"]["at_best"]
    fixed = f"drafting {best['length']} candidates every time, with as many target passes"
    discards, fewer = best["discard_rate_of"]["head"], best["fewer_discards"]["head"]
    if discards is None:
        compared = (
            f"{number(best['discard_rate'])} candidates a generated token by {fixed}; the head's rule has no such point"
        )
    else:
        share = "" if fewer is None else f" ({number(abs(fewer), percent=True)} {'fewer' if fewer >= 0 else 'more'})"
        compared = f"{number(discards)} candidates a generated token, {number(best['discard_rate'])}{share} by {fixed}"
    arguments = "target=model"
    if config.named_draft is not None:
        arguments += f", draft={config.named_draft!r}"
    return "\n".join(
        (
            f"{config.output}: {draft}{adapter}, and an acceptance head, for {config.target}",
            f"acceptance  {number(report['mean_acceptance'])} of a candidate on average ({report['texts']} texts, "
            f"temperature {temperature})",
            f"discards    {compared}",
            f"use it      assistant = SpecDecPPAssistant.from_pretrained({config.output!r}, {arguments})",
            "            model.generate(**inputs, assistant_model=assistant)",
            "share it    the same command with --stage card --push_to_hub YOU/NAME",
        )
    )
