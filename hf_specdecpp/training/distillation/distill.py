"""Stage `distill`: train a LoRA adapter of the draft (and a fusion), or an own layer, on the target's answers.

The loss is KL(p || q), the total variation, or both, at the tokens of the answers. p is computed on the fly at
temperature 1 and without top-k, so that one draft serves all settings of a generation. With `accelerate launch` each
process holds the whole target."""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from peft import get_peft_model_state_dict
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_specdecpp.files import check_finite, read_json, save_tensors
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, DRAFT_VOCAB
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.training import models, rollouts, trainers
from hf_specdecpp.training.configuration import DistillConfig, TrainingConfig, settings
from hf_specdecpp.training.distillation.initialise import DistillationInputs, initial_draft, lengths_of
from hf_specdecpp.training.distillation.trainer import (
    DistillationTrainer,
    DistilledDraft,
    by_length,
    collate,
    summarise,
)

logger = logging.get_logger("hf_specdecpp")

REPORT, CHECKPOINTS = "distillation.json", "distillation-checkpoints"
OWN = (CHECKPOINTS, ADAPTER_FOLDER, DRAFT_VOCAB)
SAVE_EVERY = 0.02  # share of all steps between checkpoints
MEASURE = "eval_all/acceptance"
MEASURED = 200  # held-out answers, evenly spaced, that the draft is evaluated on before and after training
SHARES = (1.0, 2 / 3, 1 / 3)  # scales of the trained update that are evaluated
STORED = {True: torch.bfloat16, False: torch.float16}  # dtype of weights on disk, by `distill.bf16`
FUSION_PREFIX, LAYER_PREFIX = ".fusion.", "model."  # in the names of tensors
TRAINED_COPY, ORIGINAL = "modules_to_save.default", "original_module"  # PEFT's names of the fusion's parameters
Report: TypeAlias = dict[str, dict[str, float]]  # metrics by source


def run(config: TrainingConfig) -> None:
    """Choose the draft vocabulary, and train the draft, or only evaluate it if `distill.enabled` is off. A published
    draft (`ready_made`) stays as it is. `ValueError` if there are no rollouts, rollouts or draft do not fit the target,
    or the loss is not finite."""
    work, state = config.work, trainers.process_state()
    answers.record(work)  # raises `ValueError` if there are no answers
    if config.ready_made is not None:
        return
    own = [work / name for name in config.own_files]
    made = [*(work / name for name in OWN), *own, *(path.with_suffix(".json") for path in own)]
    record = trainers.Record(work / REPORT, _settings(config), made)
    if record.result() is not None:
        logger.info(f"{work / REPORT} has the same settings: the draft is distilled already.")
        return
    inputs = DistillationInputs.load(config)
    vocab = _vocabulary(inputs)
    with state.main_process_first():
        record.begin()
    if vocab is not None and state.is_main_process:
        save_tensors({"token_ids": vocab}, work / DRAFT_VOCAB)
    with trainers.logging_to(work / trainers.LOGS / "distill"):
        set_seed(config.seed)  # the initial weights
        trainer = _trainer(inputs, initial_draft(inputs, vocab))
    lengths = np.minimum(lengths_of(inputs.train), inputs.limit)
    tokens = int((lengths - np.maximum(inputs.train["prompt_length"], 1)).sum())
    report = {"answers": len(inputs.train), "tokens": tokens, "run": settings(config), "begun": _begun(config.distill)}
    if vocab is not None:
        report["draft_vocab"] = {"size": len(vocab), "covered": models.covered_mass(vocab, inputs.heldout)}
    report |= _distil(trainer, config) if config.distill.enabled else {"before": _by_source(trainer.evaluate())}
    if state.is_main_process:
        record.end(report)
        shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)
    state.wait_for_everyone()


def _distil(trainer: DistillationTrainer, config: TrainingConfig) -> dict[str, Any]:
    """Train the draft and store it with the best share of the update (`_keep_best_share`), unless the share is 0 and it
    has no fusion. Returns the report, with the draft's metrics `before` and `after` on the held-out answers."""
    # `train` evaluates before the first step, since Trainer 5.23 does not wrap the model in DDP after a call of
    # `evaluate`. Checkpoints contain these metrics.
    checkpoint = trainers.last_checkpoint(config.work / CHECKPOINTS)
    trainer.args.eval_on_start = checkpoint is None
    trainer.train(resume_from_checkpoint=checkpoint)
    before = _by_source(next(log for log in trainer.state.log_history if MEASURE in log))
    reports, best = _keep_best_share(trainer, config, before)
    accepted = {share: report["all"]["acceptance"] for share, report in reports.items()}
    if best == 0.0:
        kept = "The fitted fusion is kept" if config.trains_module else "There is no adapter"
        logger.warning(
            f"Training did not help: held-out candidates are accepted with probability {accepted[0.0]:.3f} without the "
            f"update, with shares of it with at most {max(accepted[share] for share in SHARES):.3f}. {kept}. More "
            f"answers help, or a lower distill.learning_rate (now {config.distill.learning_rate:g})."
        )
    if best > 0.0 or config.trains_module:
        _save(trainer, config)
    shares = {f"{share:.2f}": value for share, value in accepted.items()}
    return {"before": before, "steps": trainer.state.global_step, "shares": shares, "after": reports[best]}


def _settings(config: TrainingConfig) -> dict[str, Any]:
    """All settings that the result depends on, and hashes of the rollouts' record and of the files in `start_from`."""
    names = {name: getattr(config, name) for name in ("target", "draft", "layers", "reads", "seed")}
    distill = asdict(config.distill)
    if config.distill.start_from is not None:
        folder = Path(config.distill.start_from)
        parts = [f"{ADAPTER_FOLDER}/{ADAPTER_FILES[1]}", DRAFT_VOCAB, *config.own_files]
        if any((folder / name).is_file() for name in parts):  # the `work_dir` of a run, not a repository
            distill["start_from"] = [models.digest(folder / name) for name in parts]
    return {**names, "rollouts": models.digest(config.work / answers.FOLDER / answers.RECORD), **distill}


def _begun(distill: DistillConfig) -> list[dict[str, Any]]:
    """Tokens, epochs and settings (if known) of the earlier runs that this run continues, the latest run first."""
    if distill.start_from is None or not (report := Path(distill.start_from, REPORT)).is_file():
        return []
    earlier = read_json(report)
    run = {"tokens": earlier["tokens"], "epochs": earlier["settings"]["epochs"], "run": earlier.get("run")}
    return [run, *earlier.get("begun", [])]


def _vocabulary(inputs: DistillationInputs) -> Tensor | None:
    """The draft's token ids `[n]`; `None` for all. Own layers that are trained further keep their vocabulary. Otherwise
    the most frequent tokens, or as many of the run in `start_from` if these cover more of held-out answers."""
    config, target, size = inputs.config, inputs.target, inputs.config.distill.draft_vocab_size
    if inputs.earlier is not None:
        return getattr(inputs.earlier, "token_ids", None)
    if size is None:
        return None
    every = replace(config, rollouts=replace(config.rollouts, max_prompts=None))  # also unanswered prompts
    asked = rollouts.all_prompts(every)["train"] if config.rollouts.data else []
    prompts = [item.input_ids for item in Codec.from_pretrained(config.target).encode_all(asked)]
    always, num_ids = models.always_kept(target), models.most_ids(target, inputs.draft)
    chosen = models.choose_vocab(inputs.train, size, always, num_ids, prompts)
    earlier = models.load_draft_vocab(Path(config.distill.start_from)) if config.distill.start_from else None
    if earlier is None or len(earlier) != size or int(earlier.max()) >= num_ids:
        return chosen
    return max(chosen, earlier, key=lambda token_ids: models.covered_mass(token_ids, inputs.heldout))


# Training ------------------------------------------------------------------------------------------------------------


def _trainer(inputs: DistillationInputs, draft: DistilledDraft) -> DistillationTrainer:
    config, train, heldout, distill = inputs.config, inputs.train, inputs.heldout, inputs.config.distill
    arguments = trainers.training_arguments(
        config,
        distill,
        config.work / CHECKPOINTS,
        gradient_accumulation_steps=distill.gradient_accumulation_steps,
        bf16=distill.bf16,
        use_cpu=inputs.target.device.type == "cpu",  # without this, Trainer refuses bfloat16 on a CPU
        train_sampling_strategy="sequential",  # `by_length` shuffles
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=SAVE_EVERY,
        dataloader_pin_memory=False,  # a batch is a few kilobytes
        label_names=["labels"],
        ddp_broadcast_buffers=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # no DataParallel: `accelerate launch` uses several GPUs
    sources = sorted(set(heldout["source"]))
    if distill.on_prompts:
        train = train.remove_columns("prompt_length").add_column("prompt_length", [0] * len(train))
    return DistillationTrainer(
        model=draft,
        args=arguments,
        data_collator=partial(collate, max_length=inputs.limit, sources=sources),
        train_dataset=train.select(by_length(lengths_of(train), distill.batch_size, config.seed)),
        eval_dataset=heldout.select(range(0, len(heldout), -(-len(heldout) // MEASURED))),
        compute_metrics=partial(summarise, sources=sources),
        target=inputs.target,
    )


def _keep_best_share(
    trainer: DistillationTrainer, config: TrainingConfig, before: Report
) -> tuple[dict[float, Report], float]:
    """Scale the update of adapter and fusion by the share with the highest acceptance on the held-out answers.

    After few training tokens an update is partly noise, which scaling down reduces more than the signal (Wortsman et
    al., Robust fine-tuning of zero-shot models, CVPR 2022). With share 0 the adapter has no effect, and a conditioned
    draft keeps the fusion fitted by least squares. Only share 1 is evaluated for own layers and with `start_from`.

    Returns:
        The metrics of each share, with weights rounded to half precision as they are stored, and the best share.
    """
    whole = config.kind.own_layers or config.distill.start_from is not None
    everything = dict(trainer.model.named_parameters())
    trained = {name: p.detach().clone() for name, p in everything.items() if p.requires_grad}

    @torch.no_grad()
    def keep(share: float) -> None:
        for name, after in trained.items():
            if "lora_B" in name:
                after = share * after
            elif TRAINED_COPY in name and not whole:
                after = torch.lerp(everything[name.replace(TRAINED_COPY, ORIGINAL)], after, share)
            everything[name].copy_(after.to(STORED[config.distill.bf16]))

    reports: dict[float, Report] = {}
    for share in SHARES[:1] if whole else (*SHARES, 0.0) if config.trains_module else SHARES:
        keep(share)
        reports[share] = _by_source(trainer.evaluate())
    if not (whole or config.trains_module):
        reports[0.0] = before  # without an adapter
    best = max(reversed(reports), key=lambda share: reports[share]["all"]["acceptance"])  # the smallest, if equal
    keep(best)
    return reports, best


def _save(trainer: DistillationTrainer, config: TrainingConfig) -> None:
    """Store the trained weights in half precision: adapter and fusion, or own layers."""
    dtype = STORED[config.distill.bf16]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # FSDP needs this call in all processes
    if not trainer.is_world_process_zero():
        return
    draft = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if config.kind.own_layers:
        own = {name.removeprefix(LAYER_PREFIX): tensor for name, tensor in state.items()}
        tensors = config.kind.own_tensors(draft.model, own, dtype)
        models.save_module(draft.model, tensors, config.work / config.kind.own_file)
        return
    tensors = get_peft_model_state_dict(draft, state_dict=state, save_embedding_layers=False)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder = config.work / ADAPTER_FOLDER
    check_finite(tensors, folder)
    if draft.fusion is not None:
        own = {name: tensors.pop(name) for name in list(tensors) if FUSION_PREFIX in name}
        own = {name.rpartition(FUSION_PREFIX)[2]: tensor for name, tensor in own.items()}
        models.save_module(draft.fusion, own, config.work / config.kind.own_file)
    lora = copy.copy(draft.peft_config["default"])
    lora.modules_to_save = lora.exclude_modules = None  # the fusion is in another file
    lora.save_pretrained(str(folder))
    save_tensors(tensors, folder / ADAPTER_FILES[1])  # last: marks the adapter as complete


def _by_source(metrics: dict[str, float]) -> Report:
    """Trainer's metrics by source: `{"eval_all/acceptance": 0.8}` becomes `{"all": {"acceptance": 0.8}}`."""
    report: Report = {}
    for name, value in metrics.items():
        source, _, metric = name.removeprefix("eval_").rpartition("/")
        if source:
            report.setdefault(source, {})[metric] = value
    return report
