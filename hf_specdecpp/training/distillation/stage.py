"""Stage `distill`: a LoRA adapter that makes the draft say what the target says, or a layer of its own; and its fusion.

The loss is KL(p || q), or their total variation, at the tokens that the target wrote, with p computed on the fly at
temperature 1 and without top-k, however the rollouts were drawn: the plain distributions contain every warped one, so
that one adapter serves all settings of a generation. `accelerate launch` runs it in several processes, each with the
whole target.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from hf_specdecpp.drafts.conditioned import FUSION
from hf_specdecpp.files import check_finite, save_tensors
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, DRAFT_VOCAB
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM, longest_text
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.training import draft_vocab
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation.data import answer_tokens, by_length, collate, lengths_of, useful
from hf_specdecpp.training.distillation.start import layer_from
from hf_specdecpp.training.distillation.state_cache import StateCache
from hf_specdecpp.training.distillation.student import Taught
from hf_specdecpp.training.distillation.students import CHECKPOINTS, student_of
from hf_specdecpp.training.distillation.trainer import DistillationTrainer, summarise, with_final
from hf_specdecpp.training.models import (
    FUSION_CONFIG,
    LAYER_CONFIG,
    digest,
    draft_of,
    load,
    load_draft_vocab,
    save_fusion,
    save_layer,
)
from hf_specdecpp.training.processes import process_state
from hf_specdecpp.training.resuming import Record, last_checkpoint, telling_of_full_disks
from hf_specdecpp.training.rollouts.prompts import training_prompts
from hf_specdecpp.training.trackers import LOGS, tensorboard_in

logger = logging.get_logger("hf_specdecpp")

REPORT = "distillation.json"
STATES = "target-states"
OWN = (CHECKPOINTS, STATES, ADAPTER_FOLDER, DRAFT_VOCAB, FUSION, FUSION_CONFIG, LAYER_CONFIG)
SAVE_EVERY = 0.02  # of all steps: what a kill can cost
MEASURE = "eval_all/acceptance"
MEASURED = 200  # held-out answers that the reports before and after are of, evenly spaced
SHARES = (1.0, 2 / 3, 1 / 3)  # of the trained update, one of which is kept, or nothing
NOTHING = "0.00"
FUSION_PREFIX, LAYER_PREFIX = ".fusion.", "model."  # of the names of their tensors
TRAINED_COPY, ORIGINAL = "modules_to_save.default", "original_module"  # PEFT's names of the fusion's parameters


def run(config: TrainingConfig) -> None:
    """Distil the draft, or only measure it where it stays as it is; build the draft vocabulary before.

    Done if the report in `work` is of the same settings; a killed run goes on from its newest checkpoint.

    Raises:
        ValueError: there are no rollouts, they or the draft do not fit the target, or the loss is not finite.
    """
    work, state = config.work, process_state()
    train, heldout = (answers.load(work, split) for split in ("train", "heldout"))
    made = [work / name for name in (*OWN, *config.own_files)]
    record = Record(work / REPORT, _settings(config), made)
    if record.result() is not None:
        logger.info(f"{work / REPORT} is of these settings: the draft is distilled.")
        return
    dtype = torch.bfloat16 if config.distill.bf16 else torch.float32
    target = load(config.target, dtype)
    draft = draft_of(config, target, lambda name: load(name, dtype))
    limit = int(min(config.distill.max_length, longest_text(draft)))
    train, heldout = (useful(texts, limit, target, config) for texts in (train, heldout))
    earlier: Any = None
    if config.trains_layer and config.distill.start_from is not None:
        earlier = layer_from(config.kind, config.distill.start_from)
    if earlier is not None and not config.trains_block:
        vocab = earlier.token_ids
    else:
        vocab = _vocabulary(config, target, draft, train, heldout)
    with state.main_process_first():
        record.begin()
    if vocab is not None and state.is_main_process:
        save_tensors({"token_ids": vocab}, work / DRAFT_VOCAB)

    with tensorboard_in(work / LOGS / "distill"):
        set_seed(config.seed)  # the initial weights
        student = student_of(config, target, draft, vocab, train, earlier)
        trainer = _trainer(config, target, student, train, heldout, limit)
    report: dict[str, Any] = {"answers": len(train), "tokens": answer_tokens(train, limit)}
    if vocab is not None:
        report["draft_vocab"] = {"size": len(vocab), "covered": draft_vocab.covered_mass(vocab, heldout)}
    report |= _distil(trainer, config) if config.distill.enabled else {"before": _by_source(trainer.evaluate())}
    if state.is_main_process:
        record.end(report)
        _show(report)
        for folder in (CHECKPOINTS, STATES):
            shutil.rmtree(work / folder, ignore_errors=True)
    state.wait_for_everyone()


def _distil(trainer: DistillationTrainer, config: TrainingConfig) -> dict[str, Any]:
    """Train, keep what helps, and store it; the draft `before` and `after` on the held-out answers."""
    folder = config.work / CHECKPOINTS
    checkpoint = last_checkpoint(folder)
    # The report before training has to be made by `train`: after an `evaluate` of its own, Trainer 5.23 takes the model
    # for prepared and leaves DDP out. It goes into the checkpoints, too.
    trainer.args.eval_on_start = checkpoint is None
    trained = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
    with telling_of_full_disks(folder, 4 * trained):  # the parameters, two moments of each, and the rest
        trainer.train(resume_from_checkpoint=checkpoint)
    before = _by_source(next(log for log in trainer.state.log_history if MEASURE in log))
    shares, after = _keep_best_share(trainer, config)
    if config.trains_module and NOTHING in shares and max(shares.values()) == shares[NOTHING]:
        logger.warning(
            f"Training did not help: on the held-out answers a candidate is accepted with probability "
            f"{shares[NOTHING]:.3f} where the fusion is fitted by least squares only, after training with at most "
            f"{max(value for share, value in shares.items() if share != NOTHING):.3f}. The fitted fusion is kept. More "
            f"answers help, or a lower distill.learning_rate (now {config.distill.learning_rate:g})."
        )
    has_begun = not (config.trains_module or config.trains_layer or _keeps_all(config))  # with a draft of use
    if not has_begun or max(shares.values()) > before["all"]["acceptance"]:
        _save(trainer, config)
    else:
        # Listed last, so that of equals it is the one that is kept.
        shares, after = {**shares, NOTHING: before["all"]["acceptance"]}, before
        logger.warning(
            f"Distillation did not help: on the held-out answers a candidate of the draft as it was is accepted with "
            f"probability {before['all']['acceptance']:.3f}, after training with at most {max(shares.values()):.3f}. "
            "Nothing of the update is kept, and there is no adapter. More answers help, or a lower "
            f"distill.learning_rate (now {config.distill.learning_rate:g})."
        )
    return {"before": before, "steps": trainer.state.global_step, "shares": shares, "after": after}


def _settings(config: TrainingConfig) -> dict[str, Any]:
    """All that decides what comes out."""
    names = {"target": config.target, "draft": config.draft, "layers": config.layers, "seed": config.seed}
    rollouts = digest(config.work / answers.FOLDER / answers.RECORD)
    distill = asdict(config.distill)
    del distill["cache_states"], distill["start_from"]
    if config.distill.loss == "kl":  # runs that were begun before there was a choice go on
        del distill["loss"]
    if config.distill.start_from is not None:
        folder = Path(config.distill.start_from)
        parts = [Path(ADAPTER_FOLDER) / ADAPTER_FILES[1], Path(FUSION), Path(DRAFT_VOCAB)]
        parts += map(Path, config.own_files) if config.trains_layer else []
        is_run = any((folder / name).is_file() for name in parts)
        distill["start_from"] = [digest(folder / name) for name in parts] if is_run else config.distill.start_from
    if config.trains_module or config.trains_layer:
        names["reads"] = config.reads
    for name in _of_no_use(config):
        del distill[name]
    return {**names, "rollouts": rollouts, **distill}


def _of_no_use(config: TrainingConfig) -> set[str]:
    """Settings of `distill` that are of other kinds of draft."""
    of_adapters = {"rank", "alpha", "dropout", "fusion_rank"}
    of_states = {"unroll", "fusion_rank", "fusion_learning_rate"}
    of_blocks = {name for name in asdict(config.distill) if name.startswith("block_")} | {"mask_token"}
    if config.trains_block:
        return of_adapters | {"unroll"}
    if config.trains_layer:
        return of_adapters | of_blocks
    return of_blocks | (set() if config.trains_module else of_states)


# Models and data -----------------------------------------------------------------------------------------------------


def _vocabulary(
    config: TrainingConfig, target: CausalLM, draft: CausalLM, train: Dataset, heldout: Dataset
) -> Tensor | None:
    """The most frequent tokens here, or those of the run that this one starts from, if they cover more."""
    size = config.distill.draft_vocab_size
    if size is None:
        return None
    prompts = [item.input_ids for item in Codec.from_pretrained(config.target).encode_all(training_prompts(config))]
    always, num_ids = draft_vocab.always_kept(target), draft_vocab.most_ids(target, draft)
    chosen = draft_vocab.choose(train, size, always, num_ids, prompts)
    earlier = load_draft_vocab(Path(config.distill.start_from)) if config.distill.start_from else None
    if earlier is None or len(earlier) != size or int(earlier.max()) >= num_ids:
        return chosen
    return max(chosen, earlier, key=lambda token_ids: draft_vocab.covered_mass(token_ids, heldout))


# Training ------------------------------------------------------------------------------------------------------------


def _trainer(
    config: TrainingConfig, target: CausalLM, student: Taught, train: Dataset, heldout: Dataset, limit: int
) -> DistillationTrainer:
    distill = config.distill
    arguments = TrainingArguments(
        output_dir=str(config.work / CHECKPOINTS),
        num_train_epochs=distill.epochs,
        learning_rate=distill.learning_rate,
        per_device_train_batch_size=distill.batch_size,
        per_device_eval_batch_size=distill.batch_size,
        gradient_accumulation_steps=distill.gradient_accumulation_steps,
        bf16=distill.bf16,
        use_cpu=target.device.type == "cpu",  # else it refuses bfloat16
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        train_sampling_strategy="sequential",  # `by_length` has shuffled
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=SAVE_EVERY,
        report_to=config.report_to,
        seed=config.seed,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # a batch is a few kilobytes
        label_names=["labels"],
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer uses DataParallel; several GPUs are what `accelerate launch` is for
    sources = sorted(set(heldout["source"]))
    if distill.on_prompts:
        train = train.remove_columns("prompt_length").add_column("prompt_length", [0] * len(train))
    train = train.add_column("row", list(range(len(train))))
    measured = heldout.select(range(0, len(heldout), -(-len(heldout) // MEASURED)))
    return DistillationTrainer(
        model=student,
        args=arguments,
        data_collator=partial(collate, max_length=limit, sources=sources),
        train_dataset=train.select(by_length(lengths_of(train), distill.batch_size, config.seed)),
        eval_dataset=measured,
        compute_metrics=partial(summarise, sources=sources),
        target=target,
        fusion_learning_rate=distill.fusion_learning_rate,
        cache=_state_cache(config, target, student.fusion, train, limit),
    )


def _state_cache(
    config: TrainingConfig, target: CausalLM, reader: StateReader | None, train: Dataset, limit: int
) -> StateCache | None:
    if reader is None or not config.distill.cache_states:
        return None
    lengths = [min(length, limit) for length in lengths_of(train)]
    with process_state().main_process_first():
        width = with_final(reader, target.config.get_text_config(decoder=True).hidden_size).width
        return StateCache(config.work / STATES, lengths, width, target.dtype)


def _keep_best_share(
    trainer: DistillationTrainer, config: TrainingConfig
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Shrink adapter and fusion to the share of their update that is accepted most on the held-out answers.

    What few tokens teach is partly noise. On the way back to the draft as it was, that fades before what was learnt
    does (Wortsman et al., Robust fine-tuning of zero-shot models, CVPR 2022). For a conditioned draft that may be all
    of the way: to the fusion that was fitted by least squares.

    Returns:
        Mean acceptance by share, and the report of the best one: of the numbers as they are stored, in half precision.
    """
    dtype = _stored_dtype(config)
    everything = dict(trainer.model.named_parameters())
    trained = {name: p.detach().clone() for name, p in everything.items() if p.requires_grad}

    @torch.no_grad()
    def keep(share: float) -> None:
        for name, after in trained.items():
            if "lora_B" in name:
                after = share * after
            elif TRAINED_COPY in name and not _keeps_all(config):
                after = torch.lerp(everything[name.replace(TRAINED_COPY, ORIGINAL)], after, share)
            everything[name].copy_(after.to(dtype))

    shares: tuple[float, ...] = (*SHARES, 0.0) if config.trains_module else SHARES
    if _keeps_all(config) or config.trains_layer:
        shares = SHARES[:1]
    reports = {}
    for share in shares:
        keep(share)
        reports[share] = _by_source(trainer.evaluate())
    best = max(shares, key=lambda share: reports[share]["all"]["acceptance"])
    keep(best)
    return {f"{share:.2f}": reports[share]["all"]["acceptance"] for share in shares}, reports[best]


def _keeps_all(config: TrainingConfig) -> bool:
    """What was trained before is not noise."""
    return config.distill.start_from is not None


def _stored_dtype(config: TrainingConfig) -> torch.dtype:
    return torch.bfloat16 if config.distill.bf16 else torch.float16


def _save(trainer: DistillationTrainer, config: TrainingConfig) -> None:
    """Store adapter and fusion in half precision."""
    dtype = _stored_dtype(config)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # all processes together under FSDP
    if not trainer.is_world_process_zero():
        return
    student = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if config.trains_layer:
        own = {name.removeprefix(LAYER_PREFIX): tensor for name, tensor in state.items()}
        save_layer(config.kind, student.model, own, dtype, config.work)
        return
    tensors = get_peft_model_state_dict(student, state_dict=state, save_embedding_layers=False)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder, temporary = config.work / ADAPTER_FOLDER, config.work / f"{ADAPTER_FOLDER}.tmp"
    check_finite(tensors, folder)
    if student.fusion is not None:
        own = {name: tensors.pop(name) for name in list(tensors) if FUSION_PREFIX in name}
        save_fusion(student.fusion, {name.rpartition(FUSION_PREFIX)[2]: own[name] for name in own}, config.work)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    lora = copy.copy(student.peft_config["default"])
    lora.modules_to_save = lora.exclude_modules = None  # the fusion has a file of its own
    lora.save_pretrained(str(temporary))
    save_tensors(tensors, temporary / ADAPTER_FILES[1])
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


# Reports -------------------------------------------------------------------------------------------------------------


def _by_source(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Held-out acceptance, agreement and number of tokens of each source, from what the trainer logs."""
    report: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, metric = name.removeprefix("eval_").rpartition("/")
        if source:
            report.setdefault(source, {})[metric] = value
    return report


def _show(report: dict[str, Any]) -> None:
    shares = report.get("shares")
    kept = f"; share of the update that is kept: {max(reversed(shares), key=shares.get)}" if shares else ""
    table = Table(title=f"Held-out answers, temperature 1{kept}")
    for column in ("source", "tokens", "acceptance before", "after", "top-1 agreement before", "after"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, before in report["before"].items():
        after = report.get("after", {}).get(source, {})
        pairs = [stage.get(name) for name in ("acceptance", "agreement") for stage in (before, after)]
        table.add_row(source, str(before["tokens"]), *("" if value is None else f"{value:.3f}" for value in pairs))
    Console().print(table)
