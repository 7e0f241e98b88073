"""What a run begins with: the draft that it teaches (`student_of`), made anew or of what was trained before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.drafts.eagle3.meeting import meet, usual_reads
from hf_specdecpp.drafts.eagle3.model import Eagle3Drafter, Eagle3Model
from hf_specdecpp.drafts.kind import Kind, Loading, Parts
from hf_specdecpp.drafts.known import kind_of
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, load_config
from hf_specdecpp.models.adapters import read_adapter
from hf_specdecpp.models.causal_lm import CausalLM, longest_text
from hf_specdecpp.models.early_exit import check_layers
from hf_specdecpp.texts import answers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import initial_layer, least_squares
from hf_specdecpp.training.distillation.students import LayerStudent, Student, Taught
from hf_specdecpp.training.distillation.trainer import useful
from hf_specdecpp.training.models import depth_of, draft_of, layers_of, load, load_own, own_file, reads_of

logger = logging.get_logger("hf_specdecpp")

FITTED_ON = 128  # answers, for what a draft that reads the target's states begins with


@dataclass(frozen=True)
class Lesson:
    """What a draft is taught with: both models, and the rollouts to learn from, each cut off after `limit` tokens."""

    config: TrainingConfig
    target: CausalLM
    draft: CausalLM
    train: Dataset
    heldout: Dataset
    limit: int

    @classmethod
    def load(cls, config: TrainingConfig) -> Lesson:
        """Load models and rollouts; `ValueError` if there are none, or they or the draft do not fit the target."""
        train, heldout = (answers.load(config.work, split) for split in ("train", "heldout"))
        dtype = torch.bfloat16 if config.distill.bf16 else torch.float32
        target = load(config.target, dtype)
        draft = draft_of(config, target, lambda name: load(name, dtype))
        limit = int(min(config.distill.max_length, longest_text(draft)))
        train, heldout = (useful(texts, limit, target, config) for texts in (train, heldout))
        return cls(config, target, draft, train, heldout, limit)

    def texts_to_fit_on(self, what: str) -> Iterator[Tensor]:
        """Some of the texts `[1, n]`, for what a draft that reads the target's states begins with."""
        logger.info(f"Fitting {what} on {min(len(self.train), FITTED_ON)} answers.")
        chosen = self.train.select(range(0, len(self.train), -(-len(self.train) // FITTED_ON)))
        for ids in chosen["input_ids"]:
            yield torch.tensor([ids[: self.config.distill.max_length]], device=self.target.device)


def student_of(lesson: Lesson, vocab: Tensor | None, earlier: Any = None) -> Taught:
    """The draft that a run teaches, of all tokens or of `vocab`, begun anew or with the layers of an `earlier` run."""
    distill = lesson.config.distill
    if lesson.config.ready_made is not None:
        described = SpecDecPPConfig(draft_kind=lesson.config.kind.name, draft_id=lesson.config.ready_made)
        draft: Any = lesson.config.kind.draft(described, Parts(module=earlier), Loading(target=lesson.target))
        return LayerStudent(draft, distill.unroll if draft.blocks_after is None else draft.places)
    if lesson.config.trainable.own_layers:
        return LayerStudent(Eagle3Drafter(_layer(lesson, vocab, earlier), lesson.target), distill.unroll, distill.loss)
    return _adapted(lesson, vocab)


def _adapted(lesson: Lesson, vocab: Tensor | None) -> Student:
    distill, has_fusion = lesson.config.distill, lesson.config.trains_module
    lora = LoraConfig(
        r=distill.rank,
        lora_alpha=2 * distill.rank,
        target_modules="all-linear",  # of the decoder: PEFT leaves the LM head out
        exclude_modules=r"fusion\..*" if has_fusion else None,
        modules_to_save=["fusion"] if has_fusion else None,
        base_model_name_or_path=lesson.draft.config.name_or_path,
    )
    fusion = _initial_fusion(lesson) if has_fusion else None
    student = Student(lesson.draft, lora, vocab, fusion, distill.unroll, distill.loss)
    if distill.start_from is not None:
        start_from(student, Path(distill.start_from), lesson.config.kind)
    return student


def _layer(lesson: Lesson, vocab: Tensor | None, earlier: Eagle3Model | None) -> Eagle3Model:
    """The layer that is trained: an earlier one, or like the target's last."""
    config, target = lesson.config, lesson.target
    if earlier is not None:
        meet(earlier, target, repr(config.distill.start_from), torch.float32)
        return earlier
    reads = usual_reads(depth_of(target)) if config.reads is None else config.reads
    model = initial_layer.untrained(initial_layer.settings_for(target, reads, vocab), target, vocab)
    initial_layer.fit(model, target, lesson.texts_to_fit_on("the layer's input"))
    return model


def _initial_fusion(lesson: Lesson) -> Fusion:
    config, target = lesson.config, lesson.target
    fusion = Fusion.untrained(target, reads_of(config, target), config.distill.fusion_rank)
    if config.distill.start_from is None:
        first = check_layers(layers_of(config, target), depth_of(target))[0]
        least_squares.fit(fusion, target, first, lesson.texts_to_fit_on("the fusion"))
    return fusion


@torch.no_grad()
def start_from(student: Student, work: Path, kind: Kind) -> None:
    """Copy what another run has trained in its `work` into a draft; `ValueError` where that is of another shape."""
    if not (work / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"distill.start_from={str(work)!r} has no trained adapter. Name the work_dir of a run.")
    theirs = read_adapter(work / ADAPTER_FOLDER).loras
    ours = {name: m for name, m in student.get_base_model().named_modules() if hasattr(m, "lora_A")}
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
    if student.fusion is not None:
        fusion = load_own(kind, work)
        if fusion.to_config() != student.fusion.to_config():
            raise ValueError(
                f"The fusion in {work} is of {fusion.to_config()}, this draft's of {student.fusion.to_config()}. Set "
                "reads and distill.fusion_rank as in that run."
            )
        student.fusion.load_state_dict(fusion.state_dict())


def layer_from(kind: Kind, start: str) -> Any:
    """Layers of another run's `work_dir`, or of a repository; errors as in `SpecDecPPAssistant.from_pretrained`."""
    if Path(start, own_file(kind).name).with_suffix(".json").is_file():
        return load_own(kind, Path(start))
    repository = Repository(start)
    config = load_config(repository)
    if (found := kind_of(config)) is not kind:
        raise ValueError(
            f"distill.start_from={start!r} has a draft of the kind {found.name}, and {kind.name} is trained. Name the "
            "work_dir of a run of the same kind, or the repository of such a draft."
        )
    return kind.load(config, repository)
