"""Distillation: the right loss, a better draft, an untouched target, and runs that can be killed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.files.repos import WORDS, files_of, save_model
from support.runs.distillation_files import PROMPT_LENGTH, adapter_of, prepare, report_of, rows, write_rollouts
from support.targets.models import VOCAB_SIZE, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation.initialise import DistillationInputs, initial_draft
from hf_specdecpp.training.distillation.trainer import DistillationTrainer
from hf_specdecpp.training.models import load_assistant

TRAIN_STEPS = 48  # of `prepare`: 64 answers, 4 a step, 3 epochs
FEW: dict[str, Any] = {"answers": 20, "epochs": 2}  # ten steps
FEW_STEPS = 10


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def few_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "SAVE_EVERY", 0.5)


def run_and_be_killed(config: TrainingConfig) -> None:
    with pytest.raises(Killed):
        distillation.run(config)


def load_target(config: TrainingConfig) -> Any:
    return AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)


def trainer_of(config: TrainingConfig) -> DistillationTrainer:
    """The trainer of a run, before its first step."""
    inputs = DistillationInputs.load(config)
    return distillation._trainer(inputs, initial_draft(inputs, distillation._vocabulary(inputs)))


def by_hand(target: Any, draft: Drafter, answers: list[dict[str, Any]], kept: list[int]) -> tuple[float, float, float]:
    """Mean KL, acceptance and agreement, token by token from the definitions; no batch, no padding, no chunk."""
    divergence, accepted, agreed, count = 0.0, 0.0, 0, 0
    for row in answers:
        ids = row["input_ids"]
        for position in range(PROMPT_LENGTH, len(ids)):
            prefix = torch.tensor([ids[:position]])
            p = target(prefix).logits[0, -1].double().softmax(-1)
            q = draft.logits(draft.hidden_states(prefix)[0, -1], VOCAB_SIZE).double().softmax(-1)
            mass = p[kept].sum()
            divergence += sum(float(p[i] / mass * torch.log(p[i] / mass / q[i])) for i in kept)
            accepted += sum(min(float(p[i]), float(q[i])) for i in range(VOCAB_SIZE))
            agreed += int(p.argmax() == q.argmax())
            count += 1
    return divergence / count, accepted / count, agreed / count


@pytest.mark.daily("early_exit-20-7")
@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize(("kind", "vocab_size"), [("independent", None), ("early_exit", 20)])
def test_loss_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vocab_size: int | None, chunk: int
) -> None:
    monkeypatch.setattr("hf_specdecpp.training.distillation.trainer.CHUNK", chunk)
    config, answers = prepare(tmp_path, kind, draft_vocab_size=vocab_size), rows(5, seed=3)
    write_rollouts(config.work, rows(64, seed=1), answers)
    trainer = trainer_of(config)
    drafter = trainer.model.drafter
    torch.manual_seed(0)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    kept = list(range(VOCAB_SIZE)) if drafter.draft_vocab is None else drafter.draft_vocab.tolist()
    assert len(kept) == (vocab_size or VOCAB_SIZE)

    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(answers)).detach()
    with torch.no_grad():
        divergence, accepted, agreed = by_hand(load_target(config), drafter, answers, kept)
    assert float(loss) == pytest.approx(divergence, rel=1e-5)
    assert 0.05 < accepted < 0.95
    metrics = trainer.evaluate()
    assert metrics["eval_all/acceptance"] == pytest.approx(accepted, rel=1e-5)
    assert metrics["eval_all/agreement"] == pytest.approx(agreed, rel=1e-6)
    assert metrics["eval_code/tokens"] + metrics["eval_maths/tokens"] == metrics["eval_all/tokens"]


@pytest.mark.parametrize(("vocab_size", "loss"), [(None, "kl"), (20, "kl"), (20, "tv"), (20, "kl+tv")])
def test_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int | None, loss: str) -> None:
    """The chunked gradient is that of the loss written in one line over all positions."""
    monkeypatch.setattr("hf_specdecpp.training.distillation.trainer.CHUNK", 7)
    trainer = trainer_of(prepare(tmp_path, "early_exit", draft_vocab_size=vocab_size, loss=loss))
    model, drafter = trainer.model, trainer.model.drafter
    batch = trainer.data_collator(rows(5, seed=3))
    where = batch["labels"][:, 1:] != -100
    with torch.no_grad():
        p_logits = trainer.target.model(batch["input_ids"]).logits[:, :-1][where]
    kept = torch.arange(VOCAB_SIZE) if drafter.draft_vocab is None else drafter.draft_vocab
    hidden = drafter.hidden_states(batch["input_ids"])[:, :-1][where]
    p, log_q = p_logits[:, kept].softmax(-1), drafter.logits(hidden, VOCAB_SIZE)[:, kept].log_softmax(-1)
    divergence, variation = p * (p.log() - log_q), 0.5 * (p - log_q.exp()).abs()
    expected = {"kl": divergence, "tv": variation, "kl+tv": divergence + 2 * variation}[loss].sum(-1).mean()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(expected, list(trained.values()))
    trainer.compute_loss(model, batch).backward()
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6, msg=name)
        assert "lm_head" not in name
        assert "embed" not in name
    assert any(gradient.abs().max() > 1e-4 for gradient in gradients)
    decoder = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-4] for name in trained} == decoder, "all linear layers of the decoder"


@pytest.mark.daily("independent-llama-None-0.1", takes=3)
@pytest.mark.parametrize(
    ("kind", "family", "vocab_size", "gain"),
    [("independent", "llama", None, 0.1), ("early_exit", "llama", 40, 0.01), ("early_exit", "gemma2", None, 0.01)],
)
def test_draft_improves(tmp_path: Path, kind: str, family: str, vocab_size: int | None, gain: float) -> None:
    config = prepare(tmp_path, kind, family, draft_vocab_size=vocab_size)
    stored = files_of(config.target)
    distillation.run(config)
    report = report_of(config)
    before, after = report["before"], report["after"]
    assert after["all"]["acceptance"] > before["all"]["acceptance"] + gain, report
    assert set(before) == set(after) == {"all", "code", "maths"}
    assert (max(report["shares"].values()), report["steps"]) == (after["all"]["acceptance"], TRAIN_STEPS)
    assert report["tokens"] == sum(len(row["input_ids"]) - PROMPT_LENGTH for row in rows(64, seed=1))
    assert files_of(config.target) == stored
    assert {tensor.dtype for tensor in adapter_of(config).values()} == {torch.float16}
    assert sorted(path.name for path in config.work.iterdir() if path.name != "cache") == sorted(
        ["adapter", "distillation.json", "rollouts", *(["draft_vocab.safetensors"] if vocab_size else [])]
    )
    check_assistant(config, after["all"]["acceptance"], vocab_size)


def check_assistant(config: TrainingConfig, acceptance: float, vocab_size: int | None) -> None:
    """An assistant loads the adapter strictly, says what was reported, and leaves the target as it was."""
    target = load_target(config)
    probe = torch.tensor([row["input_ids"][:12] for row in rows(4, seed=5)])
    logits, flags = target(probe).logits, [p.requires_grad for p in target.parameters()]
    assistant = load_assistant(config, target)
    with torch.no_grad():
        vocab = assistant.parts.draft_vocab
        kept = list(range(VOCAB_SIZE)) if vocab is None else vocab.tolist()
        assert len(kept) == (vocab_size or VOCAB_SIZE)
        measured = by_hand(target, assistant.ready_drafter(), rows(16, seed=2), kept)[1]
    assert measured == pytest.approx(acceptance, abs=1e-4)
    assert torch.equal(target(probe).logits, logits)
    assert [p.requires_grad for p in target.parameters()] == flags


def test_an_update_that_does_not_help_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target itself can only become worse."""
    config = prepare(tmp_path, "independent", answers=8, learning_rate=0.05, epochs=1)
    config.draft = config.target
    warnings: list[str] = []
    monkeypatch.setattr(distillation.logger, "warning", warnings.append)
    distillation.run(config)
    report = report_of(config)
    assert not (config.work / "adapter").exists()
    assert report["after"] == report["before"]
    assert report["before"]["all"]["acceptance"] == pytest.approx(1.0, abs=1e-4)
    assert list(report["shares"])[-1] == "0.00"
    assert max(list(report["shares"].values())[:-1]) < 0.999, "or there is nothing to refuse"
    assert len(warnings) == 1
    assert "There is no adapter" in warnings[0]


@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    config = prepare(tmp_path, "early_exit", bf16=True)
    distillation.run(config)
    report = report_of(config)
    assert report["after"]["all"]["acceptance"] > report["before"]["all"]["acceptance"] + 0.01
    assert {tensor.dtype for tensor in adapter_of(config).values()} == {torch.bfloat16}


def test_not_enabled(tmp_path: Path) -> None:
    """A frozen draft is measured, and its vocabulary made."""
    config = prepare(tmp_path, "independent", answers=16, enabled=False, draft_vocab_size=20)
    (config.work / "adapter").mkdir()
    distillation.run(config)
    report = report_of(config)
    assert "after" not in report
    assert report["draft_vocab"]["size"] == 20
    assert 0.3 < report["draft_vocab"]["covered"] < 0.6
    assert not (config.work / "adapter").exists(), "of an earlier run with other settings"


@pytest.mark.slow
def test_gradient_accumulation(tmp_path: Path) -> None:
    """Answers count by their tokens, so two batches of two are one of four."""
    results = []
    for name, batch_size, accumulation in (("one", 4, 1), ("two", 2, 2)):
        config = prepare(tmp_path / name, "early_exit", answers=16, epochs=1)
        config.distill.batch_size, config.distill.gradient_accumulation_steps = batch_size, accumulation
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distillation, "by_length", lambda lengths, batch_size, seed: list(range(len(lengths))))
            distillation.run(config)
        results.append(adapter_of(config))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor.float(), results[1][name].float(), rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize("count", [1, 3, 4, 17, 450])
def test_order(count: int) -> None:
    lengths = [(37 * i) % 101 for i in range(count)]
    order = distillation.by_length(lengths, 4, seed=0)
    assert sorted(order) == list(range(count)), "each answer once"
    assert order == distillation.by_length(lengths, 4, seed=0)
    padded = sum(4 * max(lengths[i] for i in order[start : start + 4]) for start in range(0, count, 4))
    if count > 100:
        assert order != distillation.by_length(lengths, 4, seed=1)
        assert padded < 1.1 * sum(lengths)


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    compute = DistillationTrainer.compute_loss

    def compute_loss(trainer: DistillationTrainer, *arguments: Any, **named: Any) -> Tensor:
        if trainer.state.global_step == step:
            raise Killed
        return compute(trainer, *arguments, **named)

    patch.setattr(DistillationTrainer, "compute_loss", compute_loss)


@pytest.mark.takes(3)
def test_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in training (twice, once while writing a checkpoint) and in the last report: as if nothing had been."""
    monkeypatch.setattr(distillation, "SAVE_EVERY", 0.1)
    whole, config = (prepare(tmp_path / name, "early_exit", **FEW) for name in ("whole", "killed"))
    distillation.run(whole)
    for step in (2, 5):
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            run_and_be_killed(config)
        assert not (config.work / "adapter").exists()
    half = config.work / "distillation-checkpoints" / "checkpoint-6"
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"half of")

    steps, compute, measured = [], DistillationTrainer.compute_loss, []

    def compute_loss(trainer: DistillationTrainer, *arguments: Any, **named: Any) -> Tensor:
        steps.append(trainer.state.global_step)
        return compute(trainer, *arguments, **named)

    def evaluate(trainer: DistillationTrainer, *_: Any) -> None:
        measured.append(trainer.state.global_step)
        raise Killed

    monkeypatch.setattr(DistillationTrainer, "compute_loss", compute_loss)
    with monkeypatch.context() as patch:
        patch.setattr(DistillationTrainer, "evaluate", evaluate)
        run_and_be_killed(config)
    assert steps == list(range(5, FEW_STEPS)), "nothing twice"
    assert measured == [FEW_STEPS], "the report before training is of the first run"
    distillation.run(config)
    assert len(steps) == FEW_STEPS - 5
    for name, tensor in adapter_of(whole).items():
        torch.testing.assert_close(adapter_of(config)[name].float(), tensor.float(), rtol=0, atol=1e-3, msg=name)
    for stage in ("before", "after"):
        assert report_of(config)[stage]["all"] == pytest.approx(report_of(whole)[stage]["all"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "files"), [
    ("conditioned", ["fusion.safetensors", "adapter/adapter_model.safetensors"]),
    ("eagle3", ["eagle3.safetensors"]),
])  # fmt: skip
def test_killed_runs_of_drafts_that_read_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, files: list[str]
) -> None:
    whole, killed = (prepare(tmp_path / name, kind, answers=20, epochs=2, unroll=2) for name in ("whole", "killed"))
    distillation.run(whole)
    with monkeypatch.context() as patch:
        kill_at(patch, 6)
        run_and_be_killed(killed)
    distillation.run(killed)
    for name in files:
        ours, theirs = (load_file(config.work / name) for config in (whole, killed))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


def test_other_settings_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepare(tmp_path, "early_exit", answers=16, epochs=1)
    with monkeypatch.context() as patch:
        kill_at(patch, 2)
        run_and_be_killed(config)
    config.distill.rank = 4
    warnings: list[str] = []
    monkeypatch.setattr(distillation.logger, "warning", warnings.append)
    distillation.run(config)
    assert len(warnings) == 1
    assert "has other settings and is rebuilt: rank was 8 and is now 4" in warnings[0]
    assert {min(tensor.shape) for tensor in adapter_of(config).values()} == {4}


def test_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepare(tmp_path, "early_exit", answers=16, learning_rate=1e30, epochs=1)
    with pytest.raises(ValueError, match=r"loss is (nan|inf) at step \d+ of 4.*learning_rate=1e\+30"):
        distillation.run(config)
    assert not (config.work / "adapter").exists()
    assert not report_of(config)["complete"]
    config.distill.learning_rate = 5e-3
    distillation.run(config)
    assert math.isfinite(report_of(config)["after"]["all"]["acceptance"])


def test_rollouts_of_another_target(tmp_path: Path) -> None:
    config = prepare(tmp_path, "early_exit")
    write_rollouts(config.work, rows(8, 1, ids=2 * VOCAB_SIZE), rows(8, 2))
    with pytest.raises(ValueError, match=rf"token id \d+, and .* only {VOCAB_SIZE} ids: another model wrote them"):
        distillation.run(config)


def test_draft_with_padded_vocabulary(tmp_path: Path) -> None:
    """Fewer rows than the target's: q is zero on the others, and the loss stays finite."""
    config = prepare(tmp_path, "independent", answers=32, epochs=1)
    config.draft = save_model(tiny("llama", seed=1, vocab_size=40), tmp_path / "small", WORDS[:40])
    distillation.run(config)
    assert report_of(config)["after"]["all"]["acceptance"] > report_of(config)["before"]["all"]["acceptance"]


def test_answers_beyond_max_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepare(tmp_path, "early_exit", max_length=PROMPT_LENGTH)
    with pytest.raises(ValueError, match=r"64 of 64 rollouts .* first 4 tokens \(prompts have 4 to 4\)"):
        distillation.run(config)
    config.distill.max_length, config.distill.epochs = PROMPT_LENGTH + 3, 1
    write_rollouts(config.work, [{**rows(1, seed=9)[0], "prompt_length": 10}, *rows(7, 1)], rows(8, 2))
    warnings: list[str] = []
    monkeypatch.setattr("hf_specdecpp.training.distillation.initialise.logger.warning", warnings.append)
    distillation.run(config)
    assert ["1 of 8 rollouts" in warning for warning in warnings] == [True]
    assert report_of(config)["tokens"] == 7 * 3
