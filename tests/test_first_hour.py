"""What a new user gets wrong in the first hour, and what is said; and what looks unusual and works."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_server import HubServer, point_client_at
from support.models import assistant_for, partly_agreeing, prompt, tiny
from support.repos import save_model, tokenizer
from transformers import AutoModelForCausalLM, pipeline

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist

PROMPT, FIXED = prompt(12), SpeculationConfig("fixed", num_tokens=4)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@dataclass
class Place:
    """A folder with models and assistants in it.

    `target`: for which `head` (an independent draft) and `early` (its own layers) were made. `smaller`: has the same
    tokens and another shape."""

    folder: Path
    target: Any
    smaller: Any

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    def early(self) -> SpecDecPPAssistant:
        """Without `target=`."""
        return SpecDecPPAssistant.from_pretrained(self / "early")

    def generate(self, assistant: Any) -> Any:
        return self.target.generate(PROMPT, assistant_model=assistant, **GREEDY)

    def with_one(self, use: Callable[[Any], Any]) -> Any:
        """Use an attached assistant."""
        assistant = assistant_for(self.target)
        try:
            return use(assistant)
        finally:
            assistant.detach()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("first_hour")

    def saved(name: str, **sizes: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(save_model(tiny("llama", **sizes), folder / name))

    target = saved("target")
    made = Place(folder, target, saved("smaller", num_hidden_layers=2))
    draft = save_model(partly_agreeing(target), folder / "draft")
    for name, assistant in (
        ("head", SpecDecPPAssistant.from_draft(draft, target, speculation=FIXED)),
        ("early", SpecDecPPAssistant.from_early_exit(target, 2, speculation=FIXED)),
    ):
        assistant.save_pretrained(folder / name)
        assistant.detach()
    return made


load, draft_with = SpecDecPPAssistant.from_pretrained, SpecDecPPAssistant.from_draft

# What is done, and the error.
MISTAKES: dict[str, tuple[Callable[[Place], Any], type[Exception], str]] = {
    # the wrong model
    "the layers of another model": (
        lambda p: load(p / "early", target=p.smaller),
        ValueError,
        r"keeps all 2 layers.*This assistant was made for '.*target', and the target is '.*smaller'",
    ),
    # names in the place of objects
    "the target's name, to load": (
        lambda p: load(p / "head", target=p / "target"),
        TypeError,
        r"A model is needed here, and this is the name '.*target'. Load the model that it names: AutoModelForCausalLM",
    ),
    "the target's name, for a draft": (lambda p: draft_with(p / "draft", p / "target"), TypeError, "this is the name"),
    "the target's name, conditioned": (
        lambda p: SpecDecPPAssistant.from_conditioned(p / "target", 2),
        TypeError,
        "this is the name",
    ),
    "a tokenizer": (lambda p: p.early().attach(tokenizer()), TypeError, "this is a (Tokenizers|PreTrainedTokenizer)"),
    "nothing": (lambda p: p.early().attach(None), TypeError, "A model is needed here, and this is None"),
    "a pipeline": (
        lambda p: p.early().attach(pipeline("text-generation", model=p.target, tokenizer=tokenizer())),
        TypeError,
        r"this is a TextGenerationPipeline. Pass the model that it has: pipe\.model",
    ),
    "the assistant's name, to generate": (
        lambda p: p.with_one(lambda _: p.generate("org/head")),
        TypeError,
        r"assistant_model='org/head' is not an assistant but its name or class.*assist\(model, 'org/head'\)",
    ),
    "the assistant's class": (
        lambda p: p.with_one(lambda _: p.generate(SpecDecPPAssistant)),
        TypeError,
        "assistant_model=SpecDecPPAssistant is not an assistant but its name or class",
    ),
    "the constructor": (
        lambda p: SpecDecPPAssistant(p / "head"),  # type: ignore[arg-type]
        TypeError,
        r"use `model = SpecDecPPAssistant.from_pre",
    ),
    # without its target
    "target= forgotten": (
        lambda p: p.generate(p.early()),
        ValueError,
        r"drafts with layers 0, 1 of '.*target', so it must be attached to it: assist\(model, repo\)",
    ),
    "asked itself": (
        lambda p: p.early().generate(PROMPT),
        ValueError,
        "does not answer by itself. Pass it to its target",
    ),
    "a default of nobody": (lambda p: load(p / "head", default=True), ValueError, "none was given. Pass target=model"),
    # folders that are not there
    "no such folder": (
        lambda p: load("./my-head"),
        FileNotFoundError,
        r"There is no folder './my-head', and it cannot",
    ),
    # settings
    "settings as a dict": (
        lambda p: draft_with(p / "draft", p.target, speculation={"rule": "fixed"}),  # type: ignore[arg-type]
        TypeError,
        r"speculation=\{'rule': 'fixed'\} must be a SpeculationConfig, such as SpeculationConfig\(rule=",
    ),
    # processes
    "pickled": (
        lambda p: pickle.dumps(p.early()),
        TypeError,
        r"cannot be pickled.*assistant.save_pretrained\(folder\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, place: Place) -> None:
    make, kind, message = MISTAKES[name]
    original = type(place.target)
    with pytest.raises(kind, match=f"(?s){message}"):
        make(place)
    assert type(place.target) is original, "a mistake leaves the target as it was"


NO_PROMPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one dimension": (PROMPT[0], {}),
    "numbers with a point": (PROMPT.float(), {}),
    "a list": (PROMPT.tolist(), {}),
    "ids that are none": (PROMPT + 1000, {}),
    "a mask that is too short": (PROMPT, {"attention_mask": torch.ones(1, 5, dtype=torch.long)}),
    "no new tokens": (PROMPT, {"max_new_tokens": 0}),
    "a shorter max_length": (PROMPT, {"max_new_tokens": None, "max_length": 5}),
}


@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_plain_generation_does_not_take_fails_as_it_does_there(name: str, place: Place) -> None:
    """The assistant adds no error of its own in front: whoever looks the message up finds transformers'."""
    ids, options = NO_PROMPTS[name]
    errors = []
    for way in ("plain", "named", "default"):
        assistant = None if way == "plain" else assist(place.target, place / "draft", default=way == "default")
        named = {"assistant_model": assistant} if way == "named" else {}
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one is what is compared
            place.target.generate(ids, **{**GREEDY, **options, **named})
        errors.append((error.type, str(error.value)))
        assist(place.target, None)
    assert errors == [errors[0]] * 3


def test_no_network(hub: HubServer, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_client_at(monkeypatch, hub, tmp_path / "cache", offline=True)
    for target in (place.target, None):
        with pytest.raises(OSError, match="'org/head' is no folder here, and as a Hub id it is neither in the local"):
            load("org/head", target=target)
    with pytest.raises(OSError, match="couldn't find them in the cached files|offline"):
        draft_with("org/draft", target=place.target)
    assistant = load(place / "head", target=place.target)  # from a folder, with a draft in a folder
    assert hub.requests == []
    plain = place.target.generate(PROMPT, **GREEDY)
    assert torch.equal(place.generate(assistant), plain)
    assistant.detach()


def test_statistics_before_any_call(place: Place) -> None:
    says = "Nothing was generated with this assistant yet: model.generate(**inputs, assistant_model=assistant)."
    assert str(place.early().stats) == says
    assert place.with_one(lambda assistant: assistant.stats.verdict) == says
    assert "tokens per pass" in place.with_one(lambda assistant: [place.generate(assistant), str(assistant.stats)][1])


@pytest.mark.usefixtures("assumed_costs")
def test_device_map_auto(place: Place) -> None:
    target = AutoModelForCausalLM.from_pretrained(place / "target", device_map="auto")
    plain = target.generate(PROMPT, **GREEDY)
    for name in ("head", "early"):
        assistant = load(place / name, target=target)
        assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **GREEDY), plain)
        assert assistant.stats.drafted > 0
