"""`generate(custom_generate="org/specdecpp")`: the repository hub_cards/custom_generate, loaded by transformers."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.hub_server import HubServer
from support.models import assistant_for, prompt, tiny
from support.mutants import accept_everything
from support.repos import files_of, publish_pair, save_assistant, save_model
from support.watchers import runs_of
from transformers import AutoModelForCausalLM, PreTrainedModel, dynamic_module_utils
from transformers.utils import hub as transformers_hub

from hf_specdecpp import SpecDecPPAssistant

RECIPE, PROMPT = Path(__file__).parents[2] / "hub_cards" / "custom_generate", prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code of a repository is copied here, and imported from here."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    return runs_of(monkeypatch)


def generate(model: PreTrainedModel, recipe: Any = RECIPE, **arguments: Any) -> Any:
    options = {"input_ids": PROMPT, "trust_remote_code": True, **GREEDY, **arguments}
    return model.generate(custom_generate=str(recipe), **options)  # type: ignore[operator]


def test_with_an_assistant_by_name(target: PreTrainedModel, tmp_path: Path, ran: list[Any]) -> None:
    kind, plain = type(target), target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    head = save_assistant(tmp_path / "head", speculation={"rule": "fixed", "num_tokens": 3})
    assert torch.equal(generate(target, assistant=str(head)), plain)
    [(_, stats)] = ran
    assert stats.drafted > 0
    assert len(stats.drafted_at) == 3
    assert type(target) is kind
    generate(target, assistant=str(head), speculation={"rule": "fixed", "num_tokens": 5})
    assert len(ran[1][1].drafted_at) == 5
    ran.clear()
    target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    assert ran == []


def test_wrong_verification_is_seen(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant accepts everything, so the text has to change."""
    plain = target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    accept_everything(monkeypatch)
    head = save_assistant(tmp_path / "head", speculation={"rule": "fixed"})
    assert not torch.equal(generate(target, assistant=str(head)), plain)


def test_without_one_candidates_are_looked_up(target: PreTrainedModel, ran: list[Any]) -> None:
    """A prompt that repeats itself; nothing drafts, so all candidates are found."""
    ids = PROMPT.repeat(1, 4)
    expected = target.generate(ids, **GREEDY)  # type: ignore[operator]
    speculation = {"rule": "fixed", "lookup": True}
    assert torch.equal(generate(target, input_ids=ids, speculation=speculation), expected)
    [(drafter, stats)] = ran
    assert drafter.model is None
    assert 0 < stats.looked_up == stats.drafted


def test_it_is_loaded_once_and_goes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=SpecDecPPAssistant.from_pretrained)
    monkeypatch.setattr(SpecDecPPAssistant, "from_pretrained", load)
    target, head = tiny("llama"), str(save_assistant(tmp_path / "head"))
    generate(target)
    for _ in range(2):
        generate(target, assistant=head)
    assert load.call_count == 1
    load.reset_mock()
    lives = weakref.ref(target)
    del target
    gc.collect()
    assert lives() is None


def test_errors_leave_the_model_as_it_was(target: PreTrainedModel) -> None:
    kind = type(target)
    with pytest.raises(ValueError, match="assistant_model= needs no custom_generate="):
        generate(target, assistant_model=assistant_for(tiny("llama"), attached=False))
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(target, max_new_tokens=-1)
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(target, trust_remote_code=False)
    assert type(target) is kind


def test_from_the_hub(hub: HubServer, tmp_path: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_hub, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    publish_pair(hub)
    hub.commit("org/specdecpp", files_of(RECIPE))
    hub.commit("org/head", files_of(save_assistant(tmp_path / "head", speculation={"rule": "fixed"})))
    target = AutoModelForCausalLM.from_pretrained("org/target")
    plain = target.generate(PROMPT, **GREEDY)
    assert torch.equal(generate(target, "org/specdecpp", assistant="org/head"), plain)
    assert ran[0][1].drafted > 0


def test_a_model_whose_repository_has_it(tmp_path: Path, ran: list[Any]) -> None:
    """transformers then puts it in the place of the model's own `generate`."""
    folder = tmp_path / "model"
    save_model(tiny("llama"), folder)
    for name, content in files_of(RECIPE).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    plain = AutoModelForCausalLM.from_pretrained(folder).generate(PROMPT, **GREEDY)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
    assert torch.equal(model.generate(input_ids=PROMPT, **GREEDY), plain)
    assert len(ran) == 2
