"""Stage `distill`: a LoRA adapter that makes the draft say what the target says, or a layer of its own; and its fusion.

The loss is KL(p || q), or their total variation, at the tokens that the target wrote, with p computed on the fly at
temperature 1 and without top-k: the plain distributions contain every warped one, so that one adapter serves all
settings of a generation. `accelerate launch` runs it in several processes, each with the whole target.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
from hf_specdecpp.training import models, trainers
from hf_specdecpp.training.configuration import DistillConfig, TrainingConfig, settings
from hf_specdecpp.training.distillation.start import Lesson, layer_from, student_of
from hf_specdecpp.training.distillation.students import Taught
from hf_specdecpp.training.distillation.trainer import (
    DistillationTrainer,
    answer_tokens,
    by_length,
    collate,
    lengths_of,
    summarise,
)
from hf_specdecpp.training.rollouts import training_prompts

logger = logging.get_logger("hf_specdecpp")

REPORT, CHECKPOINTS = "distillation.json", "distillation-checkpoints"
OWN = (CHECKPOINTS, ADAPTER_FOLDER, DRAFT_VOCAB)
SAVE_EVERY = 0.02  # of all steps: what a kill can cost
MEASURE = "eval_all/acceptance"
MEASURED = 200  # held-out answers that the reports before and after are of, evenly spaced
SHARES = (1.0, 2 / 3, 1 / 3)  # of the trained update, one of which is kept, or nothing
FUSION_PREFIX, LAYER_PREFIX = ".fusion.", "model."  # of the names of their tensors
TRAINED_COPY, ORIGINAL = "modules_to_save.default", "original_module"  # PEFT's names of the fusion's parameters
Report: TypeAlias = dict[str, dict[str, float]]  # metrics by source


def run(config: TrainingConfig) -> None:
    """Distil the draft, or only measure it where it stays as it is; build the draft vocabulary before. `ValueError` if
    there are no rollouts, they or the draft do not fit the target, or the loss is not finite."""
    work, state = config.work, trainers.process_state()
    answers.record(work)  # raises now, where there are none
    described = [str(Path(name).with_suffix(".json")) for name in config.own_files]
    made = [work / name for name in (*OWN, *config.own_files, *described)]
    record = trainers.Record(work / REPORT, _settings(config), made)
    if record.result() is not None:
        logger.info(f"{work / REPORT} is of these settings: the draft is distilled.")
        return
    lesson = Lesson.load(config)
    start = config.distill.start_from if config.trainable.own_layers else None
    earlier: Any = None if start is None else layer_from(config.kind, start)
    vocab = _vocabulary(lesson) if earlier is None else getattr(earlier, "token_ids", None)
    with state.main_process_first():
        record.begin()
    if vocab is not None and state.is_main_process:
        save_tensors({"token_ids": vocab}, work / DRAFT_VOCAB)

    with trainers.logging_to(work / trainers.LOGS / "distill"):
        set_seed(config.seed)  # the initial weights
        trainer = _trainer(lesson, student_of(lesson, vocab, earlier))
    report: dict[str, Any] = {"answers": len(lesson.train), "tokens": answer_tokens(lesson.train, lesson.limit)}
    report |= {"run": settings(config), "begun": _begun(config.distill)}
    if vocab is not None:
        report["draft_vocab"] = {"size": len(vocab), "covered": models.covered_mass(vocab, lesson.heldout)}
    report |= _distil(trainer, config) if config.distill.enabled else {"before": _by_source(trainer.evaluate())}
    if state.is_main_process:
        record.end(report)
        shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)
    state.wait_for_everyone()


def _distil(trainer: DistillationTrainer, config: TrainingConfig) -> dict[str, Any]:
    """Train, keep what helps, and store it; the draft `before` and `after` on the held-out answers."""
    # The report before training has to be made by `train`: after an `evaluate` of its own, Trainer 5.23 takes the model
    # for prepared and leaves DDP out. It goes into the checkpoints, too.
    trainer.args.eval_on_start = trainers.last_checkpoint(config.work / CHECKPOINTS) is None
    trainers.go_on(trainer)
    before = _by_source(next(log for log in trainer.state.log_history if MEASURE in log))
    reports = _keep_best_share(trainer, config, before)
    accepted = {share: report["all"]["acceptance"] for share, report in reports.items()}
    best = _best(accepted)
    if best == 0.0:
        kept = "The fitted fusion is kept."
        if not config.trains_module:
            kept = "Nothing of the update is kept, and there is no adapter."
        logger.warning(
            "Training did not help: on the held-out answers a candidate is accepted with probability "
            f"{accepted[0.0]:.3f} without the update, and with a share of it with at most "
            f"{max(accepted[share] for share in SHARES):.3f}. "
            f"{kept} More answers help, or a lower distill.learning_rate (now {config.distill.learning_rate:g})."
        )
    if best > 0.0 or config.trains_module:
        _save(trainer, config)
    shares = {f"{share:.2f}": value for share, value in accepted.items()}
    return {"before": before, "steps": trainer.state.global_step, "shares": shares, "after": reports[best]}


def _settings(config: TrainingConfig) -> dict[str, Any]:
    """All that decides what comes out."""
    names = {name: getattr(config, name) for name in ("target", "draft", "layers", "reads", "seed")}
    distill = asdict(config.distill)
    if config.distill.start_from is not None:
        folder = Path(config.distill.start_from)
        parts = [f"{ADAPTER_FOLDER}/{ADAPTER_FILES[1]}", DRAFT_VOCAB, *config.own_files]
        if any((folder / name).is_file() for name in parts):  # a run, and no repository
            distill["start_from"] = [models.digest(folder / name) for name in parts]
    return {**names, "rollouts": models.digest(config.work / answers.FOLDER / answers.RECORD), **distill}


def _begun(distill: DistillConfig) -> list[dict[str, Any]]:
    """The runs that this one goes on from, the latest first: what each was taught with, and its settings, if known."""
    if distill.start_from is None or not (report := Path(distill.start_from, REPORT)).is_file():
        return []
    earlier = read_json(report)
    taught = {"tokens": earlier["tokens"], "epochs": earlier["settings"]["epochs"], "run": earlier.get("run")}
    return [taught, *earlier.get("begun", [])]


def _vocabulary(lesson: Lesson) -> Tensor | None:
    """The most frequent tokens here, or those of the run that this one starts from, if they cover more."""
    config, target = lesson.config, lesson.target
    size = config.distill.draft_vocab_size
    if size is None:
        return None
    prompts = [item.input_ids for item in Codec.from_pretrained(config.target).encode_all(training_prompts(config))]
    always, num_ids = models.always_kept(target), models.most_ids(target, lesson.draft)
    chosen = models.choose_vocab(lesson.train, size, always, num_ids, prompts)
    earlier = models.load_draft_vocab(Path(config.distill.start_from)) if config.distill.start_from else None
    if earlier is None or len(earlier) != size or int(earlier.max()) >= num_ids:
        return chosen
    return max(chosen, earlier, key=lambda token_ids: models.covered_mass(token_ids, lesson.heldout))


# Training ------------------------------------------------------------------------------------------------------------


def _trainer(lesson: Lesson, student: Taught) -> DistillationTrainer:
    config, target, train, heldout = lesson.config, lesson.target, lesson.train, lesson.heldout
    distill = config.distill
    arguments = trainers.training_arguments(
        config,
        config.work / CHECKPOINTS,
        distill.batch_size,
        num_train_epochs=distill.epochs,
        learning_rate=distill.learning_rate,
        gradient_accumulation_steps=distill.gradient_accumulation_steps,
        bf16=distill.bf16,
        use_cpu=target.device.type == "cpu",  # else it refuses bfloat16
        train_sampling_strategy="sequential",  # `by_length` has shuffled
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=SAVE_EVERY,
        dataloader_pin_memory=False,  # a batch is a few kilobytes
        label_names=["labels"],
        ddp_broadcast_buffers=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer uses DataParallel; several GPUs are what `accelerate launch` is for
    sources = sorted(set(heldout["source"]))
    if distill.on_prompts:
        train = train.remove_columns("prompt_length").add_column("prompt_length", [0] * len(train))
    return DistillationTrainer(
        model=student,
        args=arguments,
        data_collator=partial(collate, max_length=lesson.limit, sources=sources),
        train_dataset=train.select(by_length(lengths_of(train), distill.batch_size, config.seed)),
        eval_dataset=heldout.select(range(0, len(heldout), -(-len(heldout) // MEASURED))),
        compute_metrics=partial(summarise, sources=sources),
        target=target,
        fusion_learning_rate=distill.fusion_learning_rate,
    )


def _keep_best_share(trainer: DistillationTrainer, config: TrainingConfig, before: Report) -> dict[float, Report]:
    """Shrink adapter and fusion to the share of their update that is accepted most on the held-out answers.

    What few tokens teach is partly noise. On the way back to the draft as it was, that fades before what was learnt
    does (Wortsman et al., Robust fine-tuning of zero-shot models, CVPR 2022). For a conditioned draft that may be all
    of the way: to the fusion that was fitted by least squares. What an earlier run or a layer's own weights have learnt
    is no such noise, and is kept whole.

    Returns:
        The report of each share, of the numbers as they are stored, in half precision.
    """
    whole = config.trainable.own_layers or config.distill.start_from is not None
    everything = dict(trainer.model.named_parameters())
    trained = {name: p.detach().clone() for name, p in everything.items() if p.requires_grad}

    @torch.no_grad()
    def keep(share: float) -> None:
        for name, after in trained.items():
            if "lora_B" in name:
                after = share * after
            elif TRAINED_COPY in name and not whole:
                after = torch.lerp(everything[name.replace(TRAINED_COPY, ORIGINAL)], after, share)
            everything[name].copy_(after.to(_stored_dtype(config)))

    reports = {}
    for share in SHARES[:1] if whole else (*SHARES, 0.0) if config.trains_module else SHARES:
        keep(share)
        reports[share] = _by_source(trainer.evaluate())
    if not (whole or config.trains_module):
        reports[0.0] = before  # an adapter that changes nothing
    keep(_best({share: report["all"]["acceptance"] for share, report in reports.items()}))
    return reports


def _best(accepted: dict[Any, float]) -> Any:
    """The share that is accepted most; of equal ones the smallest, which is listed last."""
    return max(reversed(accepted), key=accepted.__getitem__)


def _stored_dtype(config: TrainingConfig) -> torch.dtype:
    return torch.bfloat16 if config.distill.bf16 else torch.float16


def _save(trainer: DistillationTrainer, config: TrainingConfig) -> None:
    """Store adapter and fusion in half precision."""
    dtype = _stored_dtype(config)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # all processes together under FSDP
    if not trainer.is_world_process_zero():
        return
    student = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if config.trainable.own_layers:
        own = {name.removeprefix(LAYER_PREFIX): tensor for name, tensor in state.items()}
        tensors = models.own_file(config.kind).tensors(student.model, own, dtype)
        models.save_own(config.kind, student.model, tensors, config.work)
        return
    tensors = get_peft_model_state_dict(student, state_dict=state, save_embedding_layers=False)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder, temporary = config.work / ADAPTER_FOLDER, config.work / f"{ADAPTER_FOLDER}.tmp"
    check_finite(tensors, folder)
    if student.fusion is not None:
        own = {name: tensors.pop(name) for name in list(tensors) if FUSION_PREFIX in name}
        own = {name.rpartition(FUSION_PREFIX)[2]: tensor for name, tensor in own.items()}
        models.save_own(config.kind, student.fusion, own, config.work)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    lora = copy.copy(student.peft_config["default"])
    lora.modules_to_save = lora.exclude_modules = None  # the fusion has a file of its own
    lora.save_pretrained(str(temporary))
    save_tensors(tensors, temporary / ADAPTER_FILES[1])
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


# Reports -------------------------------------------------------------------------------------------------------------


def _by_source(metrics: dict[str, float]) -> Report:
    """Held-out acceptance, agreement and number of tokens of each source, from what the trainer logs."""
    report: Report = {}
    for name, value in metrics.items():
        source, _, metric = name.removeprefix("eval_").rpartition("/")
        if source:
            report.setdefault(source, {})[metric] = value
    return report
