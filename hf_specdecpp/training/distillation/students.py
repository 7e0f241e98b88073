"""Make the draft that a run teaches: with an adapter, with a fusion, or a layer of its own (`student_of`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.drafts.dflash.drafter import DFlashDraft
from hf_specdecpp.drafts.dflash.kind import meet as meet_block
from hf_specdecpp.drafts.dflash.model import DFlashModel
from hf_specdecpp.drafts.eagle3.meeting import meet, usual_reads
from hf_specdecpp.drafts.eagle3.model import Eagle3Drafter, Eagle3Model
from hf_specdecpp.files import load_tensors, save_tensors
from hf_specdecpp.models.causal_lm import CausalLM, num_embeddings
from hf_specdecpp.models.early_exit import check_layers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation.block_student import BlockStudent
from hf_specdecpp.training.distillation.initial import block as initial_block
from hf_specdecpp.training.distillation.initial import fusion as initial_fusion
from hf_specdecpp.training.distillation.initial import layer as initial_layer
from hf_specdecpp.training.distillation.start import start_from
from hf_specdecpp.training.distillation.student import LayerStudent, Student, Taught
from hf_specdecpp.training.models import layers_of, reads_of
from hf_specdecpp.training.processes import process_state
from hf_specdecpp.training.resuming import last_checkpoint

logger = logging.get_logger("hf_specdecpp")

CHECKPOINTS = "distillation-checkpoints"
FITTED_ON = 128  # answers, for what a draft that reads the target's states begins with
FITTED = "fitted-fusion.safetensors"  # beside the checkpoints: what the fusion was before training


def student_of(
    config: TrainingConfig,
    target: CausalLM,
    draft: CausalLM,
    vocab: Tensor | None,
    train: Dataset,
    earlier: Any = None,
) -> Taught:
    """The draft that a run teaches.

    Args:
        draft: whose adapter is trained; a layer of its own only begins like one of the target's.
        vocab: token ids that it may propose, or `None` for all.
        earlier: the layers that training goes on with, if it does.
    """
    if config.trains_block:
        distill, block = config.distill, _block(config, target, train, earlier)
        return BlockStudent(DFlashDraft(block, target), distill.block_anchors, distill.block_decay, distill.loss)
    if config.trains_layer:
        layer = _layer(config, target, vocab, train, earlier)
        return LayerStudent(Eagle3Drafter(layer, target), config.distill.unroll, config.distill.loss)
    return _adapted(config, target, draft, vocab, train)


def _adapted(
    config: TrainingConfig, target: CausalLM, draft: CausalLM, vocab: Tensor | None, train: Dataset
) -> Student:
    distill = config.distill
    lora = LoraConfig(
        r=distill.rank,
        lora_alpha=distill.alpha,
        lora_dropout=distill.dropout,
        target_modules="all-linear",  # of the decoder: PEFT leaves the LM head out
        exclude_modules=r"fusion\..*" if config.trains_module else None,
        modules_to_save=["fusion"] if config.trains_module else None,
        base_model_name_or_path=draft.config.name_or_path,
    )
    fusion = _initial_fusion(config, target, train) if config.trains_module else None
    student = Student(draft, lora, vocab, fusion, distill.unroll, distill.loss)
    if distill.start_from is not None:
        start_from(student, Path(distill.start_from))
    return student


def _layer(
    config: TrainingConfig, target: CausalLM, vocab: Tensor | None, train: Dataset, earlier: Eagle3Model | None
) -> Eagle3Model:
    """The layer that is trained: an earlier one, or like the target's last; a run that goes on reads its checkpoint."""
    depth, distill = target.config.get_text_config(decoder=True).num_hidden_layers, config.distill
    if earlier is not None:
        meet(earlier, target, repr(distill.start_from), torch.float32)
        return earlier
    reads = usual_reads(depth) if config.reads is None else config.reads
    settings = initial_layer.settings_for(target, reads, vocab)
    model = initial_layer.untrained(settings, target, vocab)
    if last_checkpoint(config.work / CHECKPOINTS) is None:
        logger.info(f"Fitting the layer's input on {min(len(train), FITTED_ON)} answers.")
        initial_layer.fit(model, target, _texts_to_fit_on(config, target, train))
    return model


def _block(config: TrainingConfig, target: CausalLM, train: Dataset, earlier: DFlashModel | None) -> DFlashModel:
    """The block draft that is trained: an earlier one, or one that begins by least squares; in float32."""
    distill = config.distill
    if earlier is not None:
        meet_block(earlier, target, repr(distill.start_from))
        return earlier.float()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    reads = [max(depth - 2, 0)] if config.reads is None else config.reads
    mask = _unused_token(target, train) if distill.mask_token is None else distill.mask_token
    settings = initial_block.settings_for(target, reads, distill.block_size, distill.block_layers, mask)
    model = initial_block.untrained(settings, target)
    if last_checkpoint(config.work / CHECKPOINTS) is None:
        logger.info(f"Fitting the first layer's attention on {min(len(train), FITTED_ON)} answers.")
        initial_block.fit(model, target, _texts_to_fit_on(config, target, train), distill.block_decay)
    return model


def _unused_token(target: CausalLM, train: Dataset) -> int:
    """The largest token id that no training text has; the last one where they have all."""
    count = num_embeddings(target)
    used = {token for ids in train["input_ids"] for token in ids}
    return next((token for token in reversed(range(count)) if token not in used), count - 1)


def _texts_to_fit_on(config: TrainingConfig, target: CausalLM, train: Dataset) -> Iterator[Tensor]:
    chosen = train.select(range(0, len(train), -(-len(train) // FITTED_ON)))
    for ids in chosen["input_ids"]:
        yield torch.tensor([ids[: config.distill.max_length]], device=target.device)


def _initial_fusion(config: TrainingConfig, target: CausalLM, train: Dataset) -> Fusion:
    fusion = Fusion.untrained(target, reads_of(config, target), config.distill.fusion_rank)
    fitted = config.work / CHECKPOINTS / FITTED
    if fitted.exists():
        fusion.load_state_dict(load_tensors(fitted))
    elif config.distill.start_from is None and last_checkpoint(config.work / CHECKPOINTS) is None:  # else it is read
        logger.info(f"Fitting the fusion on {min(len(train), FITTED_ON)} answers.")
        texts = _texts_to_fit_on(config, target, train)
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        initial_fusion.fit(fusion, target, check_layers(layers_of(config, target), depth)[0], texts)
        if process_state().is_main_process:
            fitted.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(fusion.state_dict(), fitted)
    return fusion
