"""Stage `head`: fit the acceptance head on cached features with `transformers.Trainer`."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, Trainer, set_seed

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.metrics import auc, binary_kl
from hf_specdecpp.training import features, trainers
from hf_specdecpp.training.configuration import HeadConfig, TrainingConfig
from hf_specdecpp.training.features import FeatureSet, weighted_bce
from hf_specdecpp.training.models import EVALUATION_FOLDER, HEAD, HEAD_WEIGHTS, Trained, save_module

RECORD, CHECKPOINTS = "fit.json", "checkpoints"
SCALARS_RATE = 10.0  # learning rate of the network that reads the scalars, relative to that of other weights


def run(config: TrainingConfig) -> dict[str, float]:
    """Fit the head and write it to `work/head`, unless the same settings were fitted before. Returns the held-out
    metrics. `ValueError` if there are no rollouts, a shard of features is damaged, or the loss is not finite."""
    folder = config.work / HEAD
    wanted = {"head": asdict(config.head), "features": features.settings(config)}
    record = trainers.Record(folder / RECORD, wanted, [folder, config.work / EVALUATION_FOLDER])
    if record.result() is None:
        with trainers.process_state().main_process_first():
            record.begin()
            made = Trained.load(config)
            train, heldout = (features.build(made, split) for split in ("train", "heldout"))
        head = new_head(config, made.drafter)
        if head.inputs == "path" and (published := made.assistant.published_head) is not None:
            head.load_state_dict(published.state_dict())
        metrics = fit(head, train, heldout, config, made.drafter)
        if trainers.process_state().is_main_process:
            save_module(head, head.state_dict(), folder / HEAD_WEIGHTS)
            record.end({"texts": len(train), **metrics})
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        trainers.process_state().wait_for_everyone()
    return record.result() or {}


def new_head(config: TrainingConfig, drafter: Drafter) -> AcceptanceHead:
    """Return an untrained head for the draft. Equal seeds give equal heads."""
    set_seed(config.seed)
    head = config.head
    return AcceptanceHead(
        drafter.hidden_size, head.num_blocks, head.tied, head.inputs, drafter.embedding_size, head.rank,
        siblings=head.siblings if head.inputs == "before" else None,
    )  # fmt: skip


def fit(
    head: AcceptanceHead, train: FeatureSet, heldout: FeatureSet, config: TrainingConfig, drafter: Drafter
) -> dict[str, float]:
    """Train `head` in place, from the latest checkpoint if any. Returns `loss`, `binary_kl` and `auc` on `heldout`, and
    the number of `train_candidates`. `ValueError` if the loss is not finite."""
    options, checkpoints = config.head, config.work / HEAD / CHECKPOINTS
    arguments = trainers.training_arguments(
        config,
        options,
        checkpoints,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        logging_nan_inf_filter=False,
        label_names=["label", "mask"],
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # otherwise processes on a CPU do not find each other
    )
    with trainers.logging_to(config.work / trainers.LOGS / "head"):
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
    trainer.train(resume_from_checkpoint=trainers.last_checkpoint(checkpoints))
    measured = trainer.evaluate()
    head.to("cpu").eval()
    if head.inputs == "path":  # weighted, the log-odds are too low by the logarithm of the weight
        head.output.bias.data += math.log(options.rejection_weight)
    rows = sum(int((train[index]["mask"] > 0).sum()) for index in range(len(train)))
    return {name: measured[f"eval_{name}"] for name in ("loss", "binary_kl", "auc")} | {"train_candidates": rows}


class HeadTrainer(Trainer):
    """A Trainer with the paper's loss, and dropout of the hidden states of `"before"` and `"path"` heads."""

    def __init__(self, options: HeadConfig, drafter: Drafter, **arguments: Any) -> None:
        self.options, self.drafter = options, drafter
        super().__init__(**arguments)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW, with a higher learning rate for the network that reads the scalars."""
        if self.optimizer is None:
            rate = self.args.learning_rate
            groups = [
                {"params": [parameter], "lr": rate * SCALARS_RATE if "from_scalars" in name else rate}
                for name, parameter in cast(nn.Module, model or self.model).named_parameters()
            ]
            self.optimizer = torch.optim.AdamW(groups, weight_decay=self.args.weight_decay)
        return self.optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.options.inputs != "after":
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
    """The head's log-odds `[..., n, s]` for features as of `Examples.of_text`, with or without a batch dimension."""
    hidden = inputs["hidden"][..., None, :].float()
    if "scalars" not in inputs:
        return model(hidden)
    with torch.no_grad():
        embedding = drafter.embed(inputs["tokens"].long().to(drafter.device)).to(hidden.device)
    return model(hidden, embedding, inputs["scalars"])


def collate(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad the rollouts of a batch to `[batch, n, ...]`; the mask is 0 on padding."""
    return {name: pad_sequence([text[name] for text in texts], batch_first=True) for name in texts[0]}


def heldout_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return binary KL and AUC of all candidates, weighted by the mask, without the weight of rejections."""
    log_odds = torch.as_tensor(prediction.predictions).flatten()
    label, mask = (torch.as_tensor(values).flatten() for values in prediction.label_ids)
    counts = mask > 0  # the Trainer pads with -100
    estimate, label, weight = log_odds[counts].sigmoid(), label[counts], mask[counts]
    return {"binary_kl": binary_kl(estimate, label, weight), "auc": auc(estimate, label, weight)}
