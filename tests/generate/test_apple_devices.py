"""On Apple's devices, pretended: no float64, and the operations alone that torch has kernels for there. Texts are those
of plain generation, and what training computes is what the host computes. Every kind of draft is tried in
`tests/draft_kinds/test_draft_kind.py`."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.devices.apple_operations import AsOnApple
from support.devices.pretend_devices import DeviceTensor, on_device, pretend_devices
from support.files.repos import head_for
from support.runs.distillation_files import prepare
from support.runs.training_files import training_run
from support.targets.models import configured, partly_agreeing, prompt, quiet_later_layers, random_fusion, tiny
from support.targets.zoo import tiny_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import Trainer

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.models.causal_lm import keeping_generators
from hf_specdecpp.sampling.randomness import widest
from hf_specdecpp.texts.sampling import Sampling, draw_rows
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training import recorded_chains
from hf_specdecpp.training.configuration import HeadConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.training.features import Examples

TEXT = prompt()
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
COSTS = {"draft": 0.1, "branch": 0.02, "verify": [1.0]}
CHAINS: dict[str, dict[str, Any]] = {
    "fixed": FIXED, "threshold": {"rule": "threshold", "threshold": 0.9},
    "throughput": {"rule": "throughput", "costs": COSTS},
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6},
    "static": {"tree": [3, 1, 1]},
    "throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 8, "costs": COSTS},
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
SAMPLED: dict[str, Any] = {**OPTIONS, "do_sample": True, "top_k": 6}


def check_text(target: Any, make: Any, ids: Tensor = TEXT, **options: Any) -> Any:
    """Greedy text on the device is that of plain generation on the host; the statistics. `make`: of the target there,
    makes the assistant."""
    how = {**OPTIONS, **options}
    plain = target.generate(ids, **how)
    with pretend_devices("mps"), torch.no_grad():
        assistant = make(on_device(target))
        given = {name: on_device(value) if isinstance(value, Tensor) else value for name, value in how.items()}
        text = target.generate(on_device(ids), assistant_model=assistant, **given)
        assert isinstance(text, DeviceTensor)
        assert text.shape == plain.shape if how["do_sample"] else text.tolist() == plain.tolist()
        return assistant.stats


def early_exit(**settings: Any) -> Any:
    return lambda target: configured(SpecDecPPAssistant.from_early_exit(target, [0, 2]), **settings)


@pytest.mark.daily(
    "{'rule': 'fixed', 'num_tokens': 4}-greedy",
    "{'rule': 'throughput', 'costs': {'draft': 0.1, 'branch': 0.02, 'verify': [1.0]}}-sampled",
    "{'tree': 'dyspec-exact', 'tree_budget': 6}-penalty",
    "{'rule': 'fixed', 'num_tokens': 4, 'verification': 'token'}-greedy", takes=2,
)  # fmt: skip
@pytest.mark.parametrize(
    "options", [OPTIONS, SAMPLED, {**SAMPLED, "repetition_penalty": 1.2}], ids=["greedy", "sampled", "penalty"]
)
@pytest.mark.parametrize("settings", [*CHAINS.values(), *TREES.values(), {**FIXED, "verification": "token"}], ids=str)
def test_every_rule_and_tree(settings: dict[str, Any], options: dict[str, Any]) -> None:
    stats = check_text(quiet_later_layers(tiny("llama")).float(), early_exit(**settings), **options)
    assert stats.drafted > 0


@pytest.mark.daily("before", "path", "tree")
@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ("before", CHAINS["threshold"]),
        ("after", CHAINS["threshold"]),
        ("path", CHAINS["threshold"]),
        ("before", TREES["dyspec"]),
    ],
    ids=["before", "after", "path", "tree"],
)
def test_an_acceptance_head(inputs: Any, settings: dict[str, Any]) -> None:
    def make(target: Any) -> SpecDecPPAssistant:
        head = on_device(head_for(target, inputs=inputs, embedding_size=32 if inputs == "before" else None))
        return configured(SpecDecPPAssistant.from_early_exit(target, [0, 2], head=head), **settings)

    stats = check_text(quiet_later_layers(tiny("llama")).float(), make, **SAMPLED)
    assert stats.drafted > 0
    assert stats.uncaptured == "there are no CUDA graphs on mps"


@pytest.mark.daily("throughput-greedy", "threshold-greedy", takes=2)
@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", [CHAINS["throughput"], CHAINS["threshold"]], ids=["throughput", "threshold"])
def test_a_padded_batch(settings: dict[str, Any], options: dict[str, Any]) -> None:
    ids = torch.cat((prompt(), prompt(seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    target = quiet_later_layers(tiny("llama")).float()
    stats = check_text(target, early_exit(**settings), ids, attention_mask=mask, **options)
    assert stats.accepted > 0


@pytest.mark.daily("['lookup']", takes=5)
@pytest.mark.parametrize("draft", [["lookup"], []], ids=str)
def test_a_hybrid_target_and_lookups(draft: list[Any]) -> None:
    """Whether its states can be taken back is tried there, the first time an assistant is made for it."""
    ids = (1 + prompt(12)).repeat(1, 3)
    stats = check_text(tiny_of("qwen3_5_text").float(), lambda target: assist(target, *draft), ids, max_new_tokens=12)
    assert (stats.drafted > 0, stats.refusal) == (True, None)


# Training -------------------------------------------------------------------------------------------------------------

KINDS = ["independent", "conditioned"]


def pair(kind: str, place: Any) -> tuple[SpecDecPPAssistant, Any]:
    target = quiet_later_layers(tiny("llama")).float()
    draft, fusion = partly_agreeing(target, 0.9), random_fusion(target)
    for each in (target, draft, fusion):
        place(each)
    if kind == "independent":
        return SpecDecPPAssistant.from_draft(draft, target), target
    return SpecDecPPAssistant.from_conditioned(target, 2, fusion=fusion), target


def numbers(kind: str, what: Any, place: Any) -> list[Tensor]:
    """What a stage makes of a text with models at a place."""
    assistant, target = pair(kind, place)
    ids, sampling, generator = prompt(14), Sampling(0.8), torch.Generator().manual_seed(0)
    if what == "chains":
        recorder = recorded_chains.Recorder(assistant, target, sampling, "before")
        return list(recorder.of_text(ids[0].tolist(), [6, 9], generator).values())
    if what == "fusion":
        fusion: Any = random_fusion(target)
        first_weights.fit_fusion(fusion, target, 1, [on_device(ids) if place is on_device else ids])
        return [fusion.fuse.weight.detach()]
    head = HeadConfig(inputs=what, siblings=3 if what == "before" else 1)
    return list(Examples(head, assistant.ready_drafter(), target).of_text(ids, 5, sampling, generator).values())


def check_numbers(kind: str, what: str) -> None:
    with torch.no_grad():
        expected = numbers(kind, what, lambda each: each)
        with pretend_devices("mps"):
            found = [each.host if isinstance(each, DeviceTensor) else each for each in numbers(kind, what, on_device)]
    assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.daily("before-independent", "after-conditioned", "fusion-independent", takes=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["before", "after", "chains", "fusion"])
def test_what_training_computes(kind: str, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as on the host, drawn from the same seeds."""
    monkeypatch.setattr(recorded_chains, "MAX_TOKENS", 3)
    check_numbers(kind, what)


def stage(name: str, folder: Path) -> None:
    if name == "head":
        head_fitting.run(training_run(folder, num_texts=4, epochs=1.0))
    else:
        distillation.run(prepare(folder, name, answers=4, epochs=1))


@pytest.mark.daily("head", takes=4)
@pytest.mark.parametrize("name", ["head", "independent", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_training_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, real = [], Trainer.training_step

    def step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with AsOnApple(), sdpa_kernel(SDPBackend.MATH):  # a CPU's own kernels of attention are no device's
            steps.append(real(self, *args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(Trainer, "training_step", step)
    stage(name, tmp_path)
    assert steps


# What a device can ----------------------------------------------------------------------------------------------------


def test_devices_are_asked_once() -> None:
    """By trying, whatever they are called."""
    with pretend_devices("mps") as counts:
        assert widest(torch.device("mps:0")) == torch.float32
    with pretend_devices("cuda") as counts:
        assert widest(torch.device("cuda:0")) == torch.float64
        before = counts["launch"]
        assert (widest(torch.device("cuda:0")), counts["launch"]) == (torch.float64, before)
        assert widest(torch.device("cuda:1")) == torch.float64
        assert counts["read"] == 0, "nothing waits, so a capture may ask"


@pytest.mark.parametrize("refusal", [TypeError("as on Apple's"), RuntimeError("as on some of Intel's")])
def test_every_way_to_say_no(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_devices("cuda"):
        monkeypatch.setattr(torch, "ones", Mock(side_effect=refusal))
        assert widest(torch.device("cuda:0")) == torch.float32


def test_memory_that_is_short_for_a_moment_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("for now")

    with pretend_devices("cuda"):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", full)
            with pytest.raises(torch.OutOfMemoryError):
                widest(torch.device("cuda:0"))
        assert widest(torch.device("cuda:0")) == torch.float64


def test_what_has_no_probability_is_not_drawn_without_float64() -> None:
    """In float32 the sums of a large vocabulary may fall; there too an index is drawn as the host draws it."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(64, 5000, generator=generator).where(torch.rand(64, 5000, generator=generator) < 0.1, 0.0)
    expected = draw_rows(probs, torch.Generator().manual_seed(1))
    with pretend_devices("mps"):
        found = draw_rows(on_device(probs), torch.Generator().manual_seed(1))
        assert str(found.device) == "mps:0"
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_generators_of_a_device_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.zeros(1)]
    with pretend_devices(kind):
        monkeypatch.setattr(f"torch.{kind}.get_rng_state", lambda *_: states[-1])
        monkeypatch.setattr(f"torch.{kind}.set_rng_state", lambda state, *_: states.append(state))
        with keeping_generators(torch.device(kind, 0)):
            states.append(torch.ones(1))
    assert states[-1] is states[0]


WIDE = {  # where float64 on the device is a fault, and what finds it
    "caches.states": lambda: test_a_hybrid_target_and_lookups(["lookup"]),
    "drafting.chain": lambda: test_every_rule_and_tree(CHAINS["threshold"], SAMPLED),
    "trees.verification": lambda: test_every_rule_and_tree(FIXED, SAMPLED),
    "trees.attention": lambda: test_every_rule_and_tree(TREES["dyspec"], OPTIONS),
    "texts.sampling": lambda: check_numbers("independent", "before"),
}


@pytest.mark.daily("caches.states", "trees.attention", takes=3)
@pytest.mark.parametrize("where", WIDE)
def test_mutants_with_float64(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same everywhere: what is computed in `widest` is put in float64."""
    wide: Any = lambda _device: torch.float64  # noqa: E731 - short enough
    wide.cache_clear = lambda: None
    monkeypatch.setattr(f"hf_specdecpp.{where}.widest", wide)
    with pytest.raises((TypeError, ValueError), match="float64"):
        WIDE[where]()


@pytest.mark.takes(3)
def test_a_mutant_that_trains_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = head_fitting.weighted_bce
    monkeypatch.setattr(head_fitting, "weighted_bce", lambda log_odds, *rest: real(log_odds.double(), *rest))
    with pytest.raises(TypeError, match="float64"):
        test_a_training_step("head", tmp_path, monkeypatch)
