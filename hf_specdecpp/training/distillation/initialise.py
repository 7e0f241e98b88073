"""Inputs of distillation: models and rollouts (`DistillationInputs`), and the draft to train (`initial_draft`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.draft_kinds.draft_kind import DraftKind
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import usual_reads
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Drafter, Eagle3Model
from hf_specdecpp.draft_kinds.known import EAGLE3, kind_of
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, load_config
from hf_specdecpp.models.adapters import read_adapter
from hf_specdecpp.models.causal_lm import CausalLM, longest_text
from hf_specdecpp.models.early_exit import check_layers
from hf_specdecpp.texts import answers
from hf_specdecpp.training import models
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.training.distillation.trainer import AdaptedDraft, DistilledDraft, OwnLayersDraft

logger = logging.get_logger("hf_specdecpp")

FITTED_ON = 128  # answers for the least squares of `first_weights`


@dataclass(frozen=True)
class DistillationInputs:
    """The models and the rollouts of a distillation.

    Attributes:
        limit: maximum number of tokens per rollout; longer rollouts are truncated.
        earlier: the module of an earlier draft with own layers that is trained further, or `None`.
    """

    config: TrainingConfig
    target: CausalLM
    draft: CausalLM
    train: Dataset
    heldout: Dataset
    limit: int
    earlier: Any = None

    @classmethod
    def load(cls, config: TrainingConfig) -> DistillationInputs:
        """Load models and rollouts, without those whose answer begins after `limit` tokens. `ValueError` if none is
        left, or if rollouts or draft do not fit the target."""
        train, heldout = (answers.load(config.work, split) for split in ("train", "heldout"))
        dtype = torch.bfloat16 if config.distill.bf16 else torch.float32
        target = models.load(config.target, dtype)
        draft = models.draft_of(config, target, lambda name: models.load(name, dtype))
        limit = int(min(config.distill.max_length, longest_text(draft)))
        train, heldout = (_useful(texts, limit, target, config) for texts in (train, heldout))
        start = config.distill.start_from if config.kind.own_layers else None
        return cls(config, target, draft, train, heldout, limit, start and _layers_from(config.kind, start))

    def texts_to_fit_on(self, what: str) -> Iterator[Tensor]:
        """Yields at most 128 prompts with their answers, evenly spaced, `[1, n]` each; `what` is named in the log."""
        logger.info(f"Fitting {what} on {min(len(self.train), FITTED_ON)} answers.")
        chosen = self.train.select(range(0, len(self.train), -(-len(self.train) // FITTED_ON)))
        for ids in chosen["input_ids"]:
            yield torch.tensor([ids[: self.config.distill.max_length]], device=self.target.device)


def lengths_of(answers: Dataset) -> list[int]:
    """Number of tokens of each prompt with its answer."""
    return [len(ids) for batch in answers.select_columns("input_ids").iter(1000) for ids in batch["input_ids"]]


def _useful(answers: Dataset, limit: int, target: CausalLM, config: TrainingConfig) -> Dataset:
    """Return the rollouts whose answers begin within the first `limit` tokens; a warning counts the others.
    `ValueError` if none is left, or a token id shows that another model generated the rollouts."""
    begins, lengths = np.maximum(answers["prompt_length"], 1), np.minimum(lengths_of(answers), limit)
    kept = np.flatnonzero(begins < lengths)
    if len(kept) < len(answers):
        found = f"{len(answers) - len(kept)} of {len(answers)} rollouts in {config.work} have no answer within the "
        found += f"first {limit} tokens (prompts have {begins.min()} to {begins.max()})"
        if len(kept) == 0:
            raise ValueError(f"{found}, so there is nothing to train on. Raise distill.max_length.")
        logger.warning(f"{found} and are left out.")
    largest, num_ids = len(models.answer_counts(answers, 1)) - 1, target.get_output_embeddings().weight.shape[0]
    if largest >= num_ids:
        raise ValueError(
            f"The rollouts in {config.work} have token id {largest}, and {config.target!r} only {num_ids} ids: another "
            "model wrote them. Choose another work_dir for this target."
        )
    return answers.select(kept)


def _layers_from(kind: DraftKind, start: str) -> Any:
    """Load own layers of a run's `work_dir` or a repository. `ValueError` if they have another kind or are damaged."""
    if Path(start, kind.own_file).with_suffix(".json").is_file():
        return models.load_own(kind, Path(start))
    repository = Repository(start)
    config = load_config(repository)
    if (found := kind_of(config)) is not kind:
        raise ValueError(
            f"distill.start_from={start!r} has a draft of the kind {found.name}, and {kind.name} is trained. Name the "
            "work_dir of a run of the same kind, or the repository of such a draft."
        )
    return kind.load(config, repository)


# The draft ------------------------------------------------------------------------------------------------------------


def initial_draft(inputs: DistillationInputs, vocab: Tensor | None) -> DistilledDraft:
    """The draft to train, which proposes the tokens `vocab` `[n]` or all. `ValueError` if `start_from` does not fit."""
    config, distill, target = inputs.config, inputs.config.distill, inputs.target
    depth = models.depth_of(target)
    middle = sorted({min(2, depth - 1), depth // 2, max(depth - 2, 0)})  # of 30 layers 2, 15 and 28
    if config.kind.own_layers:
        model: Eagle3Model | None = inputs.earlier
        if model is not None:
            EAGLE3.bind(model, target, repr(distill.start_from), torch.float32)
        else:
            reads = config.reads if config.reads is not None else usual_reads(depth) or middle
            settings = first_weights.layer_settings(target, reads, vocab)
            model = first_weights.untrained_layer(settings, target, vocab)
            first_weights.fit_layer(model, target, inputs.texts_to_fit_on("the layer's input"))
        return OwnLayersDraft(Eagle3Drafter(model, target), distill)
    fusion = None
    if config.trains_module:
        fusion = Fusion.untrained(target, middle if config.reads is None else config.reads, distill.fusion_rank)
        if distill.start_from is None:
            first = check_layers(models.layers_of(config, target), depth)[0]
            first_weights.fit_fusion(fusion, target, first, inputs.texts_to_fit_on("the fusion"))
    adapted = AdaptedDraft(inputs.draft, vocab, fusion, distill)
    if distill.start_from is not None:
        _copy_weights(adapted, Path(distill.start_from), config.kind)
    return adapted


@torch.no_grad()
def _copy_weights(draft: AdaptedDraft, work: Path, kind: DraftKind) -> None:
    """Copy adapter and fusion of another run into `draft`. `ValueError` if one is missing or has another shape."""
    if not (work / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"distill.start_from={str(work)!r} has no trained adapter. Name the work_dir of a run.")
    theirs = read_adapter(work / ADAPTER_FOLDER).loras
    ours = {name: m for name, m in draft.get_base_model().named_modules() if hasattr(m, "lora_A")}
    halves = {name: (m.lora_A["default"].weight, m.lora_B["default"].weight) for name, m in ours.items()}
    shapes = {name: (ours[name].scaling["default"], a.shape, b.shape) for name, (a, b) in halves.items()}
    if shapes != {name: (lora.scaling, lora.a.shape, lora.b.shape) for name, lora in theirs.items()}:
        raise ValueError(
            f"The adapter in {work} is for {len(theirs)} modules and this draft's for {len(ours)}, or their rank or "
            "alpha differs. Set layers and distill.rank as in that run."
        )
    for name, (a, b) in halves.items():
        a.copy_(theirs[name].a)
        b.copy_(theirs[name].b)
    own: Any = draft.fusion
    if own is not None:
        fusion = models.load_own(kind, work)
        if fusion.to_config() != own.to_config():
            raise ValueError(
                f"The fusion in {work} has the settings {fusion.to_config()}, this draft's {own.to_config()}. Set "
                "reads and distill.fusion_rank as in that run."
            )
        own.load_state_dict(fusion.state_dict())
