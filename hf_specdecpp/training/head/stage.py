"""Stage `head`: fit the acceptance head on cached features with `transformers.Trainer`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import read_json, save_text
from hf_specdecpp.training.checkpoints import last_checkpoint, telling_of_full_disks
from hf_specdecpp.training.configuration import HeadConfig, TrainingConfig
from hf_specdecpp.training.head import features
from hf_specdecpp.training.head.labels import weighted_bce
from hf_specdecpp.training.metrics import auc, binary_kl
from hf_specdecpp.training.models import HEAD_CONFIG, load_assistant, load_target, save_head
from hf_specdecpp.training.processes import process_state
from hf_specdecpp.training.trackers import LOGS, tensorboard_in

LEARNING_CURVE = "learning_curve.json"
SCALARS_RATE = 10.0  # learning rate of the few weights that read a few numbers, relative to that of the others
Texts: TypeAlias = features.FeatureSet | Subset[dict[str, Tensor]]


def run(config: TrainingConfig) -> dict[str, float]:
    """Fit the head of `config` and write it to `work/head`; held-out metrics. Done if that was fitted like this.

    A killed run goes on where it was: finished shards of features, then the newest checkpoint.

    Raises:
        ValueError: there are no rollouts, a shard of features is damaged, or the loss is NaN.
    """
    folder = config.work / "head"
    fit_settings = {name: value for name, value in asdict(config.head).items() if name != "learning_curve"}
    wanted = {"head": fit_settings, "features": features.settings(config)}
    with process_state().main_process_first():
        if not (folder / "fit.json").is_file() or read_json(folder / "fit.json") != wanted:
            shutil.rmtree(folder, ignore_errors=True)  # a head, calibration or checkpoint of other settings
            folder.mkdir(parents=True, exist_ok=True)
            save_text(json.dumps(wanted, indent=2) + "\n", folder / "fit.json")
    if (folder / HEAD_CONFIG).is_file():
        metrics = read_json(folder / "metrics.json")
    else:
        with process_state().main_process_first():
            drafter, train, heldout = load_data(config)
        head = new_head(config, drafter)
        metrics = fit(head, train, heldout, config, drafter, folder / "checkpoints")
        if process_state().is_main_process:
            save_text(json.dumps(metrics, indent=2) + "\n", folder / "metrics.json")
            save_head(head, folder)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if config.head.learning_curve:
        learning_curve(config, metrics)
    return metrics


def learning_curve(
    config: TrainingConfig, whole: dict[str, float], fractions: Sequence[float] = (0.25, 0.5)
) -> list[dict[str, float]]:
    """Held-out metrics of heads fitted on `fractions` of the training texts, the same number of epochs each.

    In `work/head/learning_curve.json`, a point as soon as it is there; a run that was killed goes on with the others.

    Args:
        whole: metrics of the head that was fitted on all texts, the last point.
    """
    path = config.work / "head" / LEARNING_CURVE
    points: list[dict[str, float]] = read_json(path) if path.is_file() else []
    if not points or points[-1]["fraction"] < 1.0:
        with process_state().main_process_first():
            drafter, train, heldout = load_data(config)
        # Shards come one temperature after the other; each part must have all of them, and be part of the next one.
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).tolist()
        for fraction in fractions[len(points) :]:
            part = Subset(train, order[: max(round(fraction * len(train)), 1)])
            scratch = config.work / "head" / f"fraction-{fraction:g}"
            metrics = fit(new_head(config, drafter), part, heldout, config, drafter, scratch)
            points.append({"fraction": fraction, "texts": len(part), **metrics})
            _save_points(points, path)
            shutil.rmtree(scratch, ignore_errors=True)
        points.append({"fraction": 1.0, "texts": len(train), **whole})
        _save_points(points, path)
    return points


def _save_points(points: list[dict[str, float]], path: Path) -> None:
    if process_state().is_main_process:
        save_text(json.dumps(points, indent=2) + "\n", path)


def load_data(config: TrainingConfig) -> tuple[Drafter, features.FeatureSet, features.FeatureSet]:
    """The draft, and the features of training and held-out texts."""
    target = load_target(config).to(process_state().device)
    drafter = load_assistant(config, target).ready_drafter()
    train, heldout = (features.build(config, split, drafter, target) for split in ("train", "heldout"))
    return drafter, train, heldout


def new_head(config: TrainingConfig, drafter: Drafter) -> AcceptanceHead:
    """An unfitted head for the draft, the same for the same seed."""
    set_seed(config.seed)
    head = config.head
    return AcceptanceHead(
        drafter.hidden_size, head.num_blocks, head.tied, head.inputs, drafter.embedding_size, head.rank,
        siblings=head.siblings if head.inputs == "before" else None,
    )  # fmt: skip


def fit(
    head: AcceptanceHead, train: Texts, heldout: Texts, config: TrainingConfig, drafter: Drafter, checkpoints: Path
) -> dict[str, float]:
    """Fit `head` in place with AdamW and a cosine schedule; metrics on `heldout`.

    Args:
        train, heldout: texts as in `features.text_features`.
        drafter: knows the embeddings of the candidates.
        checkpoints: where the Trainer keeps its state; a run that finds some goes on from the newest.

    Raises:
        ValueError: the loss is not a number.
    """
    options = config.head
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # a share of all steps
        weight_decay=0.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        logging_nan_inf_filter=False,
        label_names=["label", "mask"],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else it takes each process for the only one
        ddp_find_unused_parameters=False,
        report_to=config.report_to,
        seed=config.seed,
    )
    with tensorboard_in(config.work / LOGS / "head"):
        trainer = HeadTrainer(
            model=head,
            args=arguments,
            train_dataset=train,
            eval_dataset=heldout,
            data_collator=collate,
            compute_metrics=heldout_metrics,
            options=options,
            drafter=drafter,
        )
    with telling_of_full_disks(checkpoints):
        trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
    measured = trainer.evaluate()
    head.to("cpu").eval()
    rows = sum(int((train[index]["mask"] > 0).sum()) for index in range(len(train)))
    return {name: measured[f"eval_{name}"] for name in ("loss", "binary_kl", "auc")} | {"train_candidates": rows}


class HeadTrainer(Trainer):
    """A Trainer with the paper's loss."""

    def __init__(self, options: HeadConfig, drafter: Drafter, **arguments: Any) -> None:
        self.options, self.drafter = options, drafter
        super().__init__(**arguments)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW. At the rate of the rest, the network on the scalars would hardly have begun when a fit ends."""
        if self.optimizer is None:
            rate = self.args.learning_rate
            groups = [
                {"params": [parameter], "lr": rate * SCALARS_RATE if "from_scalars" in name else rate}
                for name, parameter in cast(nn.Module, model or self.model).named_parameters()
            ]
            self.optimizer = torch.optim.AdamW(groups, weight_decay=self.args.weight_decay)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002 - the loss has a normaliser of its own
    ) -> Any:
        if self.options.inputs == "before":
            hidden = F.dropout(inputs["hidden"].float(), self.options.dropout, training=model.training)
            inputs = {**inputs, "hidden": hidden}
        log_odds = batch_log_odds(model, inputs, self.drafter)
        loss = weighted_bce(log_odds, inputs["label"], self.options.rejection_weight, inputs["mask"])
        if not bool(loss.isfinite()):
            raise ValueError(
                f"The loss is {loss.item()} after {self.state.global_step} steps, so the head is lost. Lower "
                f"head.learning_rate (now {self.options.learning_rate:g}); the last checkpoint in "
                f"{self.args.output_dir} is from before."
            )
        return (loss, {"log_odds": log_odds}) if return_outputs else loss


def batch_log_odds(model: nn.Module, inputs: dict[str, Tensor], drafter: Drafter) -> Tensor:
    """The head's verdict `[..., n, s]` on features as in `features.text_features`, with or without a batch."""
    hidden = inputs["hidden"][..., None, :].float()
    if "scalars" not in inputs:
        return model(hidden)
    with torch.no_grad():
        embedding = drafter.embed(inputs["tokens"].long().to(drafter.device)).to(hidden.device)
    return model(hidden, embedding, inputs["scalars"])


def collate(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad texts to `[batch, n, ...]`; the mask is 0 on padding."""
    return {name: pad_sequence([text[name] for text in texts], batch_first=True) for name in texts[0]}


def heldout_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Unweighted binary KL and AUC over all candidates that count."""
    log_odds = torch.as_tensor(prediction.predictions).flatten()
    label, mask = (torch.as_tensor(values).flatten() for values in prediction.label_ids)
    counts = mask > 0  # the Trainer pads with -100
    estimate, label, weight = log_odds[counts].sigmoid(), label[counts], mask[counts]
    return {"binary_kl": binary_kl(estimate, label, weight), "auc": auc(estimate, label, weight)}
