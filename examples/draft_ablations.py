"""What decides how good a conditioned draft becomes: drafts that differ in one setting, each trained from the start.

    specdecpp train --config draft.yaml --stage rollouts
    python examples/draft_ablations.py draft.yaml

`draft.yaml` is the configuration of a conditioned draft. Its answers are used, those of its `work_dir`; each variant is
trained in a folder of its own in `<work_dir>-ablations`. A run that was interrupted goes on, and variants that are
trained are not trained again. The table has, of held-out answers, the chance that a candidate is accepted: the first of
a round by source, and the later ones, for which the draft reads its own states. It is printed at the end, and grows in
`table.md` there.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from hf_specdecpp.files import read_json
from hf_specdecpp.texts import answers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import stage

Settings = dict[str, Any]


def variants(config: TrainingConfig) -> dict[str, Settings]:
    """Settings that differ from `config`, those of `distill` with a dot before their names."""
    text = AutoConfig.from_pretrained(config.target).get_text_config(decoder=True)
    last, middle, epochs = text.num_hidden_layers - 1, text.num_hidden_layers // 2, config.distill.epochs
    return {
        "as configured": {},
        "reads the final state only": {"reads": []},
        "reads a middle layer, too": {"reads": [middle]},
        "reads nothing: an early exit of the last layer": {"draft": None, "layers": [last]},
        "the layer before the last drafts": {"layers": [last - 1]},
        "a middle layer drafts": {"layers": [middle]},
        "the last two layers draft": {"layers": [last - 1, last]},
        "unrolled 1 step": {".unroll": 1},
        "unrolled 2 steps": {".unroll": 2},
        "unrolled 6 steps": {".unroll": 6},
        "LoRA of rank 16": {".rank": 16, ".alpha": 32},
        "LoRA of full rank": {".rank": text.hidden_size, ".alpha": 2 * text.hidden_size},
        "total variation as the loss": {".loss": "tv"},
        "half of the answers": {"answers": 0.5},
        "half of the answers, as many steps": {"answers": 0.5, ".epochs": 2 * epochs},
        "twice the epochs": {".epochs": 2 * epochs},
    }


def trained(config: TrainingConfig, folder: Path, settings: Settings) -> dict[str, Any]:
    """The report of a variant, which is trained in `folder` unless it is there."""
    whole = {name: value for name, value in settings.items() if not name.startswith(".") and name != "answers"}
    distill = {name[1:]: value for name, value in settings.items() if name.startswith(".")}
    variant = replace(config, work_dir=str(folder), distill=replace(config.distill, **distill), **whole)
    variant.validate()
    share_answers(config.work, folder, settings.get("answers", 1.0))
    stage.run(variant)
    return read_json(folder / stage.REPORT)


def share_answers(work: Path, folder: Path, share: float) -> None:
    """The answers of `work` in `folder`, of the training texts a share, evenly spaced."""
    made = folder / answers.FOLDER
    if (made / answers.RECORD).exists():
        return
    for split in ("train", "heldout"):
        texts = answers.load(work, split)
        if split == "train" and share < 1.0:
            texts = texts.select(range(0, len(texts), round(1 / share)))
        (made / split).mkdir(parents=True, exist_ok=True)
        texts.to_parquet(str(made / split / "shard-0.parquet"))
    (made / answers.RECORD).write_bytes((work / answers.FOLDER / answers.RECORD).read_bytes())


def row(name: str, report: dict[str, Any], sources: list[str]) -> str:
    """A row of the table, in Markdown."""
    after, steps = report["after"], range(2, 7)
    first = [f"{after[source]['acceptance']:.3f}" for source in ("all", *sources)]
    later = [f"{after['all'][key]:.3f}" for key in (f"acceptance_{step}" for step in steps) if key in after["all"]]
    return f"| {name} | {' | '.join(first)} | {', '.join(later)} | {report['tokens']:,} | {report['steps']} |\n"


def main(path: str) -> None:
    config = TrainingConfig.from_dict(yaml.safe_load(Path(path).read_text()))
    folder = Path(f"{config.work}-ablations")
    rows: list[str] = []
    for number, (name, settings) in enumerate(variants(config).items()):
        report = trained(config, folder / f"{number:02}", settings)
        sources = sorted(source for source in report["after"] if source != "all")
        if not rows:
            rows += [f"| | all | {' | '.join(sources)} | later candidates | answer tokens | steps |\n"]
            rows += [f"|---|---|{'---|' * len(sources)}---|---|---|\n"]
        rows.append(row(name, report, sources))
        (folder / "table.md").write_text("".join(rows))
    sys.stdout.writelines(rows)


if __name__ == "__main__":
    main(sys.argv[1])
