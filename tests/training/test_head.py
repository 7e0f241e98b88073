"""Features, and the stage that fits the head on them: against generation's own path, resumed, killed, misled."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.devices.pretend_devices import DeviceTensor, on_device, pretend_devices
from support.runs.distillation_files import prepare, report_of
from support.runs.training_files import training_run
from support.targets.models import VOCAB_SIZE, partly_agreeing, prompt, quiet_later_layers, random_fusion, tiny
from torch import Tensor
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.drafting.drafter import Drafter, DraftSession
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.estimation.metrics import binary_kl
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.answers import load as load_answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import features
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import DistillConfig, HeadConfig, TrainingConfig, settings
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation.trainer import AdaptedDraft
from hf_specdecpp.training.features import Examples
from hf_specdecpp.training.models import Trained, answer_counts, load, load_assistant, load_head
from hf_specdecpp.training.recorded_chains import Recorder
from hf_specdecpp.training.trainers import last_checkpoint


def one_text(config: Any, **head: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
    target = load(config.target, config.dtype)
    drafter = load_assistant(config, target).ready_drafter()
    ids = torch.tensor([answers.load(config.work, "train")[0]["input_ids"]])
    generator = torch.Generator().manual_seed(0)
    item = features.Examples(HeadConfig(**head), drafter, target).of_text(ids, 5, Sampling(0.8, 20), generator)
    return drafter, ids, item


@pytest.mark.parametrize("early_exit", [False, True])
def test_features_are_what_the_head_sees_in_generation(tmp_path: Path, early_exit: bool) -> None:
    config = training_run(tmp_path, num_texts=2, early_exit=early_exit)
    drafter, ids, item = one_text(config, inputs="before", rank=8)
    head = head_fitting.new_head(config, drafter)
    torch.nn.init.normal_(head.output.weight)
    ours = head_fitting.batch_log_odds(head, item, drafter).sigmoid()
    session = DraftSession(drafter, VOCAB_SIZE)
    for row in range(ids.shape[1] - 5):
        session.read_verified(ids[:, :5] if row == 0 else ids[:, 4 + row : 5 + row], 0)
        with torch.inference_mode():
            logits, hidden = session.propose_next([])
            scores = Sampling(0.8, 20).scores(logits[None])[0]
            expected = head.estimate(DraftStep(0, scores, hidden, drafter.embed, token=item["tokens"][row, 0]))
        assert_close(ours[row, 0], expected, rtol=1e-4, atol=1e-5)


def test_each_text_is_labelled_at_its_own_temperature(tmp_path: Path) -> None:
    config = training_run(tmp_path, num_texts=4, mix=0.8, temperatures=(1.0, 0.5, 0.0))
    config.rollouts.top_k = 5
    models = Trained.load(config)
    target, drafter = models.target, models.drafter
    made, texts = features.build(models, "train"), answers.load(config.work, "train")
    assert len(made) == len(texts) == 4 + 4 + 2
    for row, text in enumerate(texts):
        ids, place = torch.tensor([text["input_ids"]]), torch.arange(len(text["input_ids"]) - 5)
        with torch.no_grad():
            p, q = (model(ids).logits[0, 4:-1].float() for model in (target, drafter.model))
        token = made[row]["tokens"][:, 0].long()
        if text["temperature"] == 0.0:
            confidence, expected = q, (p.argmax(-1) == q.argmax(-1)).float()
        else:
            p, confidence = (top_five(logits / text["temperature"]) for logits in (p, q))
            expected = (p.softmax(-1)[place, token] / confidence.softmax(-1)[place, token]).clamp_max(1.0)
        assert_close(made[row]["label"][:, 0], expected, rtol=1e-3, atol=1e-4)
        assert_close(made[row]["scalars"][:, 0, 0].exp(), confidence.softmax(-1)[place, token], rtol=1e-3, atol=1e-5)
        assert set(made[row]["scalars"][:, 0, 5].tolist()) == {float(text["temperature"] == 0.0)}


def top_five(logits: Tensor) -> Tensor:
    return logits.where(logits >= logits.topk(5).values[:, -1:], float("-inf"))


def load_data(config: TrainingConfig) -> tuple[Drafter, features.FeatureSet, features.FeatureSet]:
    """The draft, and the features of training and held-out texts."""
    made = Trained.load(config)
    return made.drafter, features.build(made, "train"), features.build(made, "heldout")


def test_a_head_may_be_for_some_of_the_texts(tmp_path: Path) -> None:
    config = training_run(tmp_path, temperatures=(1.0, 0.0), max_texts=3)
    _, train, heldout = load_data(config)
    assert (len(train), len(heldout)) == (3, len(answers.load(config.work, "heldout")))
    config.head.max_texts = None
    assert len(load_data(config)[1]) == len(answers.load(config.work, "train")) > 3


def test_fitting_beats_the_draft_probability(tmp_path: Path) -> None:
    """An unfitted head says q(y)."""
    config = training_run(tmp_path, num_texts=40, mix=0.9, rejection_weight=1.0, epochs=10.0, learning_rate=1e-2)
    drafter, train, heldout = load_data(config)
    head = head_fitting.new_head(config, drafter)
    items = [heldout[index] for index in range(len(heldout))]
    untrained = [head_fitting.batch_log_odds(head, item, drafter)[:, 0].detach() for item in items]
    label = torch.cat([item["label"][:, 0] for item in items])
    q_of = torch.cat([item["scalars"][:, 0, 0].exp() for item in items])
    assert_close(torch.cat(untrained).sigmoid(), q_of, atol=1e-4, rtol=1e-3)
    fitted = head_fitting.fit(head, train, heldout, config, drafter)
    assert fitted["binary_kl"] < 0.9 * binary_kl(q_of, label)


@pytest.mark.parametrize("inputs", ["before", "after"])
def test_hidden_states_are_dropped_only_while_a_before_head_is_fitted(tmp_path: Path, inputs: str) -> None:
    config = training_run(tmp_path, num_texts=2, inputs=inputs, dropout=0.9)
    drafter, train, _ = load_data(config)
    head, batch = head_fitting.new_head(config, drafter), head_fitting.collate([train[0]])
    torch.nn.init.normal_(head.output.weight)
    arguments = TrainingArguments(str(tmp_path / "none"), report_to="none")
    trainer = head_fitting.HeadTrainer(config.head, drafter, model=head, args=arguments)
    stored = batch["hidden"].clone()
    with torch.no_grad():
        fitting = [float(trainer.compute_loss(head.train(), batch)) for _ in range(2)]
        measuring = [float(trainer.compute_loss(head.eval(), batch)) for _ in range(2)]
    assert measuring[0] == measuring[1]
    assert (fitting[0] != fitting[1]) == (fitting[0] != measuring[0]) == (inputs == "before")
    assert torch.equal(batch["hidden"], stored)


def test_shards_of_features_are_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "TEXTS_PER_SHARD", 5)
    config = training_run(tmp_path)
    made = Trained.load(config)
    assert len(features.build(made, "train")) == 12
    shards = sorted((config.work / "features" / "train").glob("*.safetensors"))
    assert len(shards) == 3
    contents = shards[1].read_bytes()
    shards[1].unlink()  # killed before this one was written
    times = [path.stat().st_mtime_ns for path in (shards[0], shards[2])]
    features.build(made, "train")
    assert shards[1].read_bytes() == contents
    assert [path.stat().st_mtime_ns for path in (shards[0], shards[2])] == times


def test_features_of_other_settings_are_made_anew(tmp_path: Path) -> None:
    config = training_run(tmp_path, num_texts=4, temperatures=(1.0, 0.0))
    before = features.settings(config)
    for temperatures, top_k in (([0.0], 0), ([1.0], 0), ([1.0, 0.0], 7)):
        config.rollouts.temperatures, config.rollouts.top_k = temperatures, top_k
        assert features.settings(config) != before
    config.rollouts.top_k = 0
    assert features.settings(config) == before
    assert load_data(config)[1][0]["tokens"].shape[1] == config.head.siblings
    config.head.siblings += 1
    assert load_data(config)[1][0]["tokens"].shape[1] == config.head.siblings
    (config.work / "rollouts" / "rollouts.json").write_text(json.dumps({"complete": True, "seed": 7}))
    assert features.settings(config) != before


def test_a_head_of_other_settings_is_fitted_anew(tmp_path: Path) -> None:
    config = training_run(tmp_path)
    head_fitting.run(config)
    first = load_head(config.work / "head").state_dict()
    (config.work / "evaluation").mkdir()
    head_fitting.run(config)
    assert (config.work / "evaluation").is_dir()
    config.head.rejection_weight = 6.0
    head_fitting.run(config)
    assert not (config.work / "evaluation").exists(), "it was the earlier head's, and a card would show it"
    second = load_head(config.work / "head").state_dict()
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_killed_fit_goes_on_to_the_same_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = (training_run(tmp_path / name) for name in ("whole", "killed"))
    head_fitting.run(whole)

    evaluate, epochs = Trainer.evaluate, []

    def die_in_the_second_epoch(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        epochs.append(trainer.state.epoch)
        if trainer.state.epoch == 2:
            raise KeyboardInterrupt
        return evaluate(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "evaluate", die_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        head_fitting.run(killed)
    monkeypatch.undo()
    assert not (killed.work / "head" / "head.json").exists()
    assert last_checkpoint(killed.work / "head" / "checkpoints") is not None
    head_fitting.run(killed)
    assert len(epochs) == 2
    heads = [load_head(config.work / "head") for config in (whole, killed)]
    assert [head.siblings for head in heads] == [whole.head.siblings] * 2, "what trees may ask of it"
    expected, actual = (head.state_dict() for head in heads)
    for name, value in expected.items():
        assert_close(actual[name], value, rtol=0, atol=1e-6)


def test_a_loss_that_is_not_a_number_stops_the_fit(tmp_path: Path) -> None:
    config = training_run(tmp_path, learning_rate=1e35, epochs=4.0)
    with pytest.raises(ValueError, match=r"loss is (nan|inf).*learning_rate \(now 1e\+35\)"):
        head_fitting.run(config)
    assert not (config.work / "head" / "head.json").exists()


# A run that goes on from what another one trained. --------------------------------------------------------------------


def goes_on(config: TrainingConfig, first: TrainingConfig) -> TrainingConfig:
    """`config` of the first run's target, starting from what it trained."""
    shutil.copytree(first.target, config.target, dirs_exist_ok=True)
    config.distill.start_from = str(first.work)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conditioned", "early_exit", "eagle3"])
def test_a_second_run_begins_where_the_first_ended(tmp_path: Path, kind: str) -> None:
    vocab = 40 if kind == "eagle3" else None
    first, second = (prepare(tmp_path / n, kind, epochs=2, draft_vocab_size=vocab) for n in ("first", "second"))
    distillation.run(first)
    distillation.run(goes_on(second, first))
    ended, begun = report_of(first)["after"]["all"], report_of(second)["before"]["all"]
    assert begun["acceptance"] == pytest.approx(ended["acceptance"], abs=2e-3 if kind == "eagle3" else 1e-4)
    assert report_of(first)["before"]["all"]["acceptance"] < begun["acceptance"] - 0.01
    assert report_of(second)["after"]["all"]["acceptance"] > begun["acceptance"]
    learnt = {"tokens": report_of(first)["tokens"], "epochs": 2, "run": settings(first)}
    assert (report_of(first)["begun"], report_of(second)["begun"]) == ([], [learnt])
    assert yaml.safe_load(settings(second))["distill"]["start_from"] == first.work.name, "no folder of this machine"
    config = json.loads((first.work / distillation.REPORT).read_text())
    (first.work / distillation.REPORT).write_text(json.dumps({**config, "begun": [{"tokens": 5}]}))
    assert distillation._begun(second.distill) == [learnt, {"tokens": 5}], "the runs before that one, too"


@pytest.mark.daily("covers more-True")
@pytest.mark.parametrize(
    ("earlier", "kept"), [("covers more", True), ("covers less", False), ("of another size", False)]
)
def test_the_draft_vocabulary_that_covers_more_is_kept(tmp_path: Path, earlier: str, kept: bool) -> None:
    """The earlier run may have seen more text than the one that goes on from it."""
    first, second = (prepare(tmp_path / n, "early_exit", answers=16, epochs=1, draft_vocab_size=20) for n in "ab")
    distillation.run(first)
    if earlier == "of another size":
        second.distill.draft_vocab_size = 24
    else:
        by_frequency = answer_counts(load_answers(first.work, "heldout"), VOCAB_SIZE).argsort(kind="stable")
        ids = by_frequency[-20:] if earlier == "covers more" else by_frequency[:20]
        save_file({"token_ids": torch.as_tensor(np.sort(ids))}, first.work / "draft_vocab.safetensors")
    distillation.run(goes_on(second, first))
    theirs, ours = (load_file(config.work / "draft_vocab.safetensors")["token_ids"] for config in (first, second))
    assert torch.equal(theirs, ours) is kept
    assert len(ours) == second.distill.draft_vocab_size


def test_what_does_not_fit(tmp_path: Path) -> None:
    first = prepare(tmp_path / "first", "conditioned", epochs=1, answers=8)
    distillation.run(first)
    for name, message in (
        ("rank", "Set layers and distill.rank as in that run"),
        ("reads", "Set reads and distill.fusion_rank as in that run"),
    ):
        config = goes_on(prepare(tmp_path / name, "conditioned", answers=8), first)
        config.distill.rank, config.reads = (3, [0, 1]) if name == "rank" else (8, [1])
        with pytest.raises(ValueError, match=message):
            distillation.run(config)
    config = prepare(tmp_path / "nothing", "conditioned", answers=8)
    config.distill.start_from = str(tmp_path / "missing")
    with pytest.raises(ValueError, match="has no trained adapter"):
        distillation.run(config)


# What training computes of texts, on a pretended accelerator: the numbers of the host, on the right devices. ----------


KINDS, SAMPLINGS = ["independent", "early exit", "conditioned"], [Sampling(0.0), Sampling(0.8, 20)]


def made(kind: str, device: str | None = None) -> tuple[Any, SpecDecPPAssistant]:
    """A target and an assistant, the same ones at each call."""
    target = quiet_later_layers(tiny("llama"))
    draft, fusion = partly_agreeing(target, 0.9), random_fusion(target).double()
    if device:
        on_device(target, device), on_device(draft, device), on_device(fusion, device)
    if kind == "independent":
        return target, SpecDecPPAssistant.from_draft(draft, target)
    if kind == "early exit":
        return target, SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=range(3, 46))
    return target, SpecDecPPAssistant.from_conditioned(target, 2, fusion=fusion)


def on_host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor


@pytest.mark.daily(
    "before-greedy-independent", "before-sampled-conditioned", "after-sampled-early exit",
    "chains-sampled-independent",
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("what", ["before", "after", "chains"])
def test_features_of_the_head_and_chains_for_the_calibration(kind: str, sampling: Sampling, what: Any) -> None:
    def computed(device: str | None = None) -> dict[str, Tensor]:
        target, assistant = made(kind, device)
        generator = torch.Generator().manual_seed(0)
        if what == "chains":
            return Recorder(assistant, target, sampling, "before").of_text(prompt(14)[0].tolist(), [6, 9], generator)
        head = HeadConfig(inputs=what, siblings=3 if what == "before" else 1)
        return Examples(head, assistant.ready_drafter(), target).of_text(prompt(14), 5, sampling, generator)

    expected = computed()
    with pretend_devices(), torch.no_grad():
        found = computed("cuda:0")
    for name, value in found.items():
        assert isinstance(value, DeviceTensor) is (what != "chains"), "chains go to the disk"
        assert_close(on_host(value), expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_what_distillation_measures(kind: str) -> None:
    """Gradients are left out: torch's engine asks the device for streams, which a pretended one does not have."""

    def measured(device: str | None = None) -> Tensor:
        target, assistant = made(kind, device)
        drafter, ids = assistant.ready_drafter(), prompt(14)
        torch.manual_seed(0)
        draft = AdaptedDraft(drafter.model, drafter.draft_vocab, drafter.fusion, DistillConfig(unroll=3, rank=2))
        for name, weight in draft.named_parameters():
            if "lora_B" in name:  # zero at first
                weight.normal_()
        if device:
            ids = on_device(ids, device)
        answers = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        with TargetStates(target, drafter.fusion) as caught:
            logits, states = target(ids).logits[0, :-1], caught.states_of()
        found: Tensor = draft(ids, answers, lambda at: logits[at], states, measure=True)
        return found

    with torch.no_grad():
        expected = measured()
        with pretend_devices():
            found = measured("cuda:0")
    assert found.shape == (13, 3 if kind == "conditioned" else 1, 2)
    assert str(found.device) == "cuda:0"
    assert_close(on_host(found), expected)
