"""TRL's trainers with a default assistant: the policy changes with every step, and its texts stay those of plain
generation.

Compared are greedy texts, since a sampled one differs from call to call. The two answers to a prompt are then the same,
so that neither reward is above the other: GRPO's entropy bonus and, in online DPO, weight decay move the policy.

It is no dependency: `make test-integrations` installs it beside this package."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.enumeration.mutants import accept_everything
from support.files.repos import WORDS, ending_tokenizer
from support.targets.models import partly_agreeing, prompt, quiet_later_layers, random_fusion, random_layer, tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models import early_exit
from hf_specdecpp.models.causal_lm import base_model

pytest.importorskip("trl", minversion="1.16", reason="make test-integrations installs it")

from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

# The second of how it calls transformers.
pytestmark = [pytest.mark.takes(60), pytest.mark.filterwarnings("ignore::FutureWarning")]

FIXED = SpeculationConfig("fixed", num_tokens=3)
QUESTIONS = [" ".join(WORDS[start : start + length]) for start, length in ((3, 4), (21, 7))]
STEPS = 3
LORA: dict[str, Any] = {"learning_rate": 0.1}  # an adapter of a tiny model moves slowly
Make = Callable[[Any], SpecDecPPAssistant]

MAKERS: dict[str, Make] = {
    "independent": lambda _: SpecDecPPAssistant.from_draft(partly_agreeing(policy()), speculation=FIXED),
    "early_exit": lambda model: SpecDecPPAssistant.from_early_exit(model, 2, speculation=FIXED),
    "part": lambda model: SpecDecPPAssistant.from_early_exit(model, 2, draft_vocab=range(5, 47), speculation=FIXED),
    "conditioned": lambda model: SpecDecPPAssistant.from_conditioned(
        model, 2, fusion=random_fusion(base_model(model)), speculation=FIXED
    ),
    "eagle3": lambda model: SpecDecPPAssistant.from_draft(random_layer(base_model(model)), model, speculation=FIXED),
    "lookup": lambda model: assist(model, "lookup", default=False, rule="fixed"),
}
OWN_LAYERS = ("early_exit", "part", "conditioned")


@dataclass
class Run:
    """What a training brought.

    `texts`: by step and prompt, the tokens of the two answers, which decide the rewards. `weights`: of the policy after
    it. `accepted`: candidates of each step. `errors`: by step, how far the logits of a draft of the policy's own layers
    are from those of these layers now."""

    texts: list[dict[str, list[list[int]]]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def note(self, prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
        """Take note of a step's answers, and reward them."""
        pairs = sorted(zip(prompts, completion_ids, strict=True))
        self.texts.append({each: [list(ids) for prompt, ids in pairs if prompt == each] for each in QUESTIONS})
        return [sum(token % 5 for token in ids) / 10 for ids in completion_ids]

    def assert_same_as(self, other: "Run") -> None:
        assert self.texts == other.texts
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name])


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def policy() -> Any:
    return quiet_later_layers(tiny("llama", eos_token_id=47, pad_token_id=47)).float()


def train(
    folder: Path, make: Make | None = None, *, trainer: str = "grpo", before: bool = False,
    peft: LoraConfig | None = None, **settings: Any,
) -> Run:  # fmt: skip
    """Train a policy.

    `make`: makes an assistant, which becomes the policy's default. `before`: whether it is attached before the trainer
    is made."""
    run, model, helpers = Run(), policy(), []

    def attach(model: Any) -> None:
        if make is not None:
            helpers.append(make(model))
            helpers[0].attach(model, default=True)

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        for helper in helpers:
            assert helper.stats.refusal is None
            run.accepted.append(helper.stats.accepted)
            if helper.config.draft_layers is not None:
                run.errors.append(out_of_date(helper, base_model(made.model)))
        return run.note(prompts, completion_ids)

    if before:
        attach(model)
    made = TRAINERS[trainer](model, reward, folder, peft, settings)
    if not before:
        attach(made.model)
    made.train()
    run.weights = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Trains a policy without an assistant, once for each of the arguments: a trainer, and whether PEFT's."""

    @cache
    def run(trainer: str, has_peft: bool = False) -> Run:
        settings: dict[str, Any] = LORA if has_peft else {}
        return train(tmp_path_factory.mktemp(trainer), trainer=trainer, peft=lora() if has_peft else None, **settings)

    return run


COMMON: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 0.02,
    "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def grpo(model: Any, reward: Any, folder: Path, peft: LoraConfig | None, settings: dict[str, Any]) -> GRPOTrainer:
    settings = {**COMMON, "generation_kwargs": {"do_sample": False}, "entropy_coef": 0.1, **settings}
    args = GRPOConfig(str(folder), num_generations=2, max_completion_length=16, beta=0.0, **settings)
    prompts = Dataset.from_dict({"prompt": QUESTIONS})
    return GRPOTrainer(model, reward, args, prompts, processing_class=ending_tokenizer(), peft_config=peft)


def online_dpo(
    model: Any, reward: Any, folder: Path, peft: LoraConfig | None, settings: dict[str, Any]
) -> OnlineDPOTrainer:
    greedy = {"generation_kwargs": {"do_sample": False}, "weight_decay": 5.0}
    # With activation checkpointing, its default, it generates without a cache.
    common = COMMON | {"per_device_train_batch_size": 2, "gradient_checkpointing": False}
    args = OnlineDPOConfig(str(folder), max_new_tokens=16, max_length=64, **{**common, **greedy, **settings})
    arguments = {"train_dataset": Dataset.from_dict({"prompt": QUESTIONS}), "peft_config": peft}
    return OnlineDPOTrainer(model, reward_funcs=reward, args=args, processing_class=ending_tokenizer(), **arguments)


TRAINERS: dict[str, Callable[..., Any]] = {"grpo": grpo, "online_dpo": online_dpo}


@torch.no_grad()
def out_of_date(helper: SpecDecPPAssistant, model: Any) -> float:
    """How far the logits of a draft of the policy's own layers are from those of these layers as they are now."""
    ids, drafter = prompt(6), helper.ready_drafter()
    now = Drafter(early_exit.early_exit(copy.deepcopy(model), 2), drafter.draft_vocab)
    logits = [each.head_logits(each.hidden_states(ids)) for each in (drafter, now)]
    return float((logits[0] - logits[1]).abs().max())


@pytest.mark.parametrize(
    ("trainer", "kind"), [*(("grpo", kind) for kind in MAKERS), ("online_dpo", "independent"), ("online_dpo", "part")]
)
def test_greedy_training_is_the_same(trainer: str, kind: str, tmp_path: Path, plain: Any) -> None:
    expected = plain(trainer)
    assert len(expected.texts) == STEPS
    assert expected.texts[0] != expected.texts[-1], "the policy has changed"
    assisted = train(tmp_path, MAKERS[kind], trainer=trainer)
    assisted.assert_same_as(expected)
    assert len(assisted.accepted) == STEPS
    assert sum(assisted.accepted) > 0
    assert len(assisted.errors) == (STEPS if kind in OWN_LAYERS else 0)
    assert max(assisted.errors, default=0.0) < 1e-5


@pytest.mark.parametrize("trainer", TRAINERS)
def test_wrong_verification_is_seen(trainer: str, tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant accepts everything."""
    expected = plain(trainer)
    accept_everything(monkeypatch)
    assert train(tmp_path, MAKERS["early_exit"], trainer=trainer).texts[0] != expected.texts[0]


def test_copied_layers_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant copies tensors in the place of sharing them: the texts are right, and the draft is of the past."""
    monkeypatch.setattr(early_exit, "copy_sharing", copy.deepcopy)
    errors = train(tmp_path, MAKERS["early_exit"]).errors
    assert errors[0] < 1e-5 < 1e-2 < errors[1] < errors[2]


def test_rows_that_stay_behind_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the LM head a draft with its own vocabulary has rows of its own."""
    monkeypatch.setattr(Drafter, "renew", lambda drafter: None)
    errors = train(tmp_path, MAKERS["part"]).errors
    assert errors[0] < 1e-5 < 1e-2 < errors[1] < errors[2]


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("trainer", "kind"), [("grpo", "independent"), ("grpo", "part"), ("grpo", "conditioned"), ("online_dpo", "part")]
)
def test_a_peft_policy(trainer: str, kind: str, tmp_path: Path, plain: Any) -> None:
    """A draft of its own layers has its adapter, too."""
    expected = plain(trainer, has_peft=True)
    assert expected.texts[0] != expected.texts[-1]
    assisted = train(tmp_path, MAKERS[kind], trainer=trainer, peft=lora(), **LORA)
    assisted.assert_same_as(expected)
    assert sum(assisted.accepted) > 0
    assert max(assisted.errors, default=0.0) < 1e-5


def test_a_peft_policy_made_after_it(tmp_path: Path, plain: Any) -> None:
    """The trainer puts the adapter into the policy's layers, which the draft's are copies of: the texts stay right."""
    assisted = train(tmp_path, MAKERS["early_exit"], peft=lora(), before=True, **LORA)
    assisted.assert_same_as(plain("grpo", has_peft=True))
    assert assisted.errors[0] < 1e-5 < 1e-2 < assisted.errors[-1], "this is why one attaches afterwards"
