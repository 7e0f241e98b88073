"""What training computes of texts, on a pretended accelerator: the numbers of the host, on the right devices."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.models import partly_agreeing, prompt, quiet_later_layers, random_fusion, tiny
from support.pretend_devices import DeviceTensor, on_device, pretend_devices
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.chains import Recorder
from hf_specdecpp.training.configuration import HeadConfig
from hf_specdecpp.training.distillation.students import Student
from hf_specdecpp.training.features import Examples

KINDS = ["independent", "early exit", "conditioned"]
SAMPLINGS = [Sampling(0.0), Sampling(0.8, 20)]
PROMPT_LENGTH = 5


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


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("inputs", ["before", "after"])
def test_features_of_the_head(kind: str, sampling: Sampling, inputs: Any) -> None:
    head = HeadConfig(inputs=inputs, siblings=3 if inputs == "before" else 1)

    def features(device: str | None = None) -> dict[str, Tensor]:
        target, assistant = made(kind, device)
        drafter, generator = assistant.ready_drafter(), torch.Generator().manual_seed(0)
        return Examples(head, drafter, target).of_text(prompt(14), PROMPT_LENGTH, sampling, generator)

    expected = features()
    with pretend_devices():
        found = features("cuda:0")
    for name, value in found.items():
        assert str(value.device) == "cuda:0"
        assert_close(on_host(value), expected[name])


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_chains_for_the_calibration(kind: str, sampling: Sampling) -> None:
    def chains(device: str | None = None) -> dict[str, Tensor]:
        target, assistant = made(kind, device)
        ids, generator = prompt(14)[0].tolist(), torch.Generator().manual_seed(0)
        return Recorder(assistant, target, sampling, "before").of_text(ids, [6, 9], generator)

    expected = chains()
    with pretend_devices(), torch.no_grad():
        found = chains("cuda:0")
    for name, value in found.items():
        assert not isinstance(value, DeviceTensor), "what is kept goes to the disk"
        assert_close(value, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_what_distillation_measures(kind: str) -> None:
    """Gradients are left out: torch's engine asks the device for streams, which a pretended one does not have."""

    def measured(device: str | None = None) -> Tensor:
        target, assistant = made(kind, device)
        drafter, ids = assistant.ready_drafter(), prompt(14)
        torch.manual_seed(0)
        modules = ["fusion"] if drafter.fusion is not None else None
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=modules)
        student = Student(drafter.model, lora, drafter.draft_vocab, drafter.fusion, unroll=3)
        if device:
            ids = on_device(ids, device)
        answers = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        with TargetStates(target, drafter.fusion) as caught:
            logits, states = target(ids).logits[0, :-1], caught.take()
        found: Tensor = student(ids, answers, lambda at: logits[at], states, measure=True)
        return found

    with torch.no_grad():
        expected = measured()
        with pretend_devices():
            found = measured("cuda:0")
    assert found.shape == (13, 3 if kind == "conditioned" else 1, 2)
    assert str(found.device) == "cuda:0"
    assert_close(on_host(found), expected)
