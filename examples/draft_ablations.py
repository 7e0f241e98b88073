"""Train conditioned drafts that differ in one setting, and compare their acceptance.

    specdecpp train --config draft.yaml --stage rollouts
    python examples/draft_ablations.py draft.yaml ["as configured" "twice the epochs" ...]

`draft.yaml` is the configuration of a conditioned draft, and its `work_dir` contains the answers. By default all
variants are trained, each in its own folder in `<work_dir>-ablations`. An interrupted run continues, and trained
variants are not trained again. The table shows, on held-out answers, the probability that a candidate is accepted at
temperature 1: the first candidate of a round by source, and the later candidates, for which the draft reads its own
states. For greedy generation it shows how often the draft's likeliest token is the target's. The table is printed at
the end, and written to `table.md` after each variant.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, DynamicCache

from hf_specdecpp.caches.masks import as_mask
from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.files import read_json
from hf_specdecpp.models.causal_lm import cache_among
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts import answers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation import trainer
from hf_specdecpp.training.distillation.trainer import DistillationTrainer

Settings = dict[str, Any]
EAGLE3: Settings = {"draft": "eagle3", "layers": None, "reads": None}  # reads the layers that every engine supports


def variants(config: TrainingConfig) -> dict[str, Settings]:
    """Settings that differ from `config`, those of `distill` with a dot before their names. `answers` and `keys` are
    this program's own: the share of the training texts, and whose keys the draft attends to."""
    text = AutoConfig.from_pretrained(config.target).get_text_config(decoder=True)
    last, middle, epochs = text.num_hidden_layers - 1, text.num_hidden_layers // 2, config.distill.epochs
    rate = config.distill.learning_rate
    layer = {**EAGLE3, ".learning_rate": rate / 3}  # all weights are trained, without an adapter
    return {
        "as configured": {},
        "reads the final state only": {"reads": []},
        "reads a middle layer, too": {"reads": [middle]},
        "reads nothing: an early exit of the last layer": {"draft": None, "layers": [last]},
        "the layer before the last drafts": {"layers": [last - 1]},
        "a middle layer drafts": {"layers": [middle]},
        "the last two layers draft": {"layers": [last - 1, last]},
        "attends to the target's keys and values": {"keys": "target"},
        "unrolled 1 step": {".unroll": 1},
        "unrolled 2 steps": {".unroll": 2},
        "unrolled 6 steps": {".unroll": 6},
        "LoRA of rank 16": {".rank": 16},
        "LoRA of full rank": {".rank": text.hidden_size},
        "total variation as the loss": {".loss": "tv"},
        "half of the answers": {"answers": 0.5},
        "half of the answers, as many steps": {"answers": 0.5, ".epochs": 2 * epochs},
        "twice the epochs": {".epochs": 2 * epochs},
        "KL and total variation as the loss": {".loss": "kl+tv"},
        "an EAGLE-3 layer": layer,
        "an EAGLE-3 layer at the same rate": EAGLE3,
        "an EAGLE-3 layer, mixing at its rate": {**layer, ".fusion_learning_rate": rate / 3},
    }


def trained(config: TrainingConfig, folder: Path, settings: Settings) -> dict[str, Any]:
    """The report of a variant, which is trained in `folder` unless it is there."""
    own = ("answers", "keys")
    whole = {name: value for name, value in settings.items() if not name.startswith(".") and name not in own}
    distill = {name[1:]: value for name, value in settings.items() if name.startswith(".")}
    variant = replace(config, work_dir=str(folder), distill=replace(config.distill, **distill), **whole)
    variant.validate()
    share_answers(config.work, folder, settings.get("answers", 1.0))
    with over_target_keys() if "keys" in settings else nullcontext():
        distillation.run(variant)
    return read_json(folder / distillation.REPORT)


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


@contextmanager
def over_target_keys() -> Iterator[None]:
    """Within it drafts are trained over the target's keys and values."""
    with patch.object(distillation, "DistillationTrainer", OverTargetKeys), patch.object(trainer, "unrolled", read):
        yield


class OverTargetKeys(DistillationTrainer):
    """Trains a draft of the target's last layer that attends to the target's keys and values of that layer wherever the
    target has read, and to its own at the tokens of the round: it would not have to read the prompt."""

    keys: Tensor
    values: Tensor

    def _read(self, inputs: dict[str, Any], fusion: Fusion | None) -> tuple[Tensor, Tensor | None]:
        with TargetStates(self.target.model, fusion) as caught:
            output = self.target.model(inputs["input_ids"], use_cache=True, logits_to_keep=1)
            states, cache = caught.states_of(), cache_among(output)
        OverTargetKeys.keys, OverTargetKeys.values = cache.layers[-1].keys, cache.layers[-1].values
        return states[..., : fusion.hidden_size], states


def read(drafter: Drafter, input_ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    """As `unrolling.unrolled`, over the target's keys. A round that begins with the token at place b sees the target's
    up to place b - 1, which it has read before it emits that token.

    Example: in step 2 the token at place 5 is the second of a round that begins at 4. It sees the target's keys at
    places 0 to 3, and the draft's own at 4 (of step 1) and 5.
    """
    later, length = input_ids[:, 1:], input_ids.shape[1] - 1
    cache = DynamicCache()
    cache.update(OverTargetKeys.keys, OverTargetKeys.values, 0)
    places = torch.arange(1, length + 1, device=input_ids.device)
    key, query = places[None], places[:, None]
    before = states[:, :-1]
    for step in range(1, steps + 1):
        blocks = [torch.arange(length + 1, device=query.device) <= query - step]
        blocks += [key == query - step + other for other in range(1, step + 1)]
        mask = as_mask(torch.cat(blocks, dim=1), drafter.model)
        hidden = drafter.hidden_states(later, cache, before, attention_mask=mask, position_ids=places[None])
        yield functional.pad(hidden, (0, 0, 1, 0))
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def row(name: str, report: dict[str, Any], sources: list[str]) -> str:
    """A row of the table, in Markdown."""
    after, steps = report["after"], range(2, 7)
    first = [f"{after[source]['acceptance']:.3f}" for source in ("all", *sources)]
    later, agrees = (
        ", ".join(f"{after['all'][key]:.3f}" for key in keys if key in after["all"])
        for keys in ([f"acceptance_{step}" for step in steps], ["agreement", *(f"agreement_{step}" for step in steps)])
    )
    return f"| {name} | {' | '.join(first)} | {later} | {agrees} | {report['tokens']:,} | {report['steps']} |\n"


def main(path: str, *names: str) -> None:
    config = TrainingConfig.from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    folder = Path(f"{config.work}-ablations")
    rows: list[str] = []
    for number, (name, settings) in enumerate(variants(config).items()):
        if names and name not in names:
            continue
        report = trained(config, folder / f"{number:02}", settings)
        sources = sorted(source for source in report["after"] if source != "all")
        if not rows:
            header = (
                f"| | all | {' | '.join(sources)} | later candidates | likeliest agrees | answer tokens | steps |\n"
            )
            rows += [header, f"|---|---|{'---|' * len(sources)}---|---|---|---|\n"]
        rows.append(row(name, report, sources))
        (folder / "table.md").write_text("".join(rows), encoding="utf-8")
    sys.stdout.writelines(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
