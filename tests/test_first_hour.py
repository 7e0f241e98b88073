"""What a new user gets wrong in the first hour, and what is said; what looks unusual and works; and `assist`."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import mtp_files
from support.files.repos import save_model, tokenizer
from support.runs.hub_server import HubServer, point_client_at
from support.targets.models import assistant_for, partly_agreeing, prompt, random_layer, tiny
from transformers import AutoModelForCausalLM, pipeline

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.hub.published import Published, advice, published, table
from hf_specdecpp.models.causal_lm import CausalLM

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
        r"keeps all 2 layers.*This assistant was made for '.*target', the target is '.*smaller'",
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
    "asked itself": (
        lambda p: p.early().generate(PROMPT),
        ValueError,
        "does not answer by itself. Pass it to its target",
    ),
    "lookups, called": (
        lambda _: assist(tiny("llama"))(PROMPT),
        ValueError,
        r"Pass it to its target: model\.generate\(\*\*inputs, assistant_model=assistant\)",
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
        with pytest.raises(
            OSError, match="There is no folder 'org/head', and the Hub id 'org/head' is not in the local"
        ):
            load("org/head", target=target)
    with pytest.raises(OSError, match="couldn't find them in the cached files|offline"):
        draft_with("org/draft", target=place.target)
    assistant = load(place / "head", target=place.target)  # from a folder, with a draft in a folder
    assert hub.requests == []
    plain = place.target.generate(PROMPT, **GREEDY)
    assert torch.equal(place.generate(assistant), plain)
    assistant.detach()


@pytest.mark.usefixtures("assumed_costs")
def test_device_map_auto(place: Place) -> None:
    target = AutoModelForCausalLM.from_pretrained(place / "target", device_map="auto")
    plain = target.generate(PROMPT, **GREEDY)
    for name in ("head", "early"):
        assistant = load(place / name, target=target)
        assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **GREEDY), plain)
        assert assistant.stats.drafted > 0


# `assist`: one line, and `model.generate()` is faster with the same output; whatever drafts is recognised. ------------


@pytest.fixture
def target() -> Iterator[CausalLM]:
    model = tiny("llama").float()
    yield model
    assist(model, None)


def text(model: CausalLM, **arguments: Any) -> list[int]:
    tokens: list[int] = model.generate(1 + prompt(9) % 11, max_new_tokens=12, do_sample=False, **arguments)[0].tolist()
    return tokens


def test_none_takes_every_assistant_away(target: CausalLM) -> None:
    methods = dict(vars(type(target)))
    kept = [assist(target), assist(target, partly_agreeing(target), default=False)]
    assert assist(target, None) is None
    assert dict(vars(type(target))) == methods
    text(target)
    assert [each.stats.generated for each in kept] == [0, 0]


def test_a_copy_of_the_draft_that_a_repository_names(target: CausalLM, tmp_path: Path) -> None:
    save_model(partly_agreeing(target), tmp_path / "draft")
    SpecDecPPAssistant.from_draft(tmp_path / "draft", target).save_pretrained(tmp_path / "assistant")
    (tmp_path / "draft").rename(tmp_path / "copy")
    assist(target, None)
    plain = text(target)
    assistant = assist(target, tmp_path / "assistant", draft=tmp_path / "copy", rule="fixed")
    assert text(target) == plain
    assert assistant.stats.drafted > 0
    assert assist(target, draft="lookup").kind.name == "lookup"


def test_settings_replace_those_of_a_draft(target: CausalLM, tmp_path: Path) -> None:
    assistant = assist(target, partly_agreeing(target), rule="fixed", num_tokens=3, tree="dyspec")
    assert (assistant.speculation.rule, assistant.speculation.num_tokens) == ("fixed", 3)
    stored = assist(target, SpecDecPPAssistant.from_early_exit(target, 1), rule="fixed", num_tokens=4)
    stored.save_pretrained(tmp_path)
    again = assist(target, tmp_path, num_tokens=2)
    assert (again.speculation.rule, again.speculation.num_tokens) == ("fixed", 2)


def test_lookups_are_added_to_drafts_where_the_rule_can_choose(target: CausalLM, tmp_path: Path) -> None:
    assert assist(target, partly_agreeing(target)).speculation.lookup is True
    made = SpecDecPPAssistant.from_early_exit(target, 1)
    assert assist(target, made).speculation.lookup is False, "its settings are the user's"
    made.save_pretrained(tmp_path)
    assert assist(target, tmp_path).speculation.lookup is True
    for options in ({"lookup": False}, {"rule": "fixed"}, {"rule": "threshold"}, {"tree": "dyspec"}):
        assert assist(target, tmp_path, **options).speculation.lookup is False
    made.speculation.lookup = "history"
    made.save_pretrained(tmp_path)
    assert assist(target, tmp_path).speculation.lookup == "history"


def named(what: str, folder: Path) -> tuple[CausalLM, Any]:
    """A target, and what is named as its draft."""
    if what in ("mtp", "auto"):
        return mtp_files.dense().load(folder), what
    target = tiny("llama").float()
    if what == "an assistant's folder":
        SpecDecPPAssistant.from_early_exit(target, 1).save_pretrained(folder)
        return target, folder
    drafts: dict[str, Callable[[], Any]] = {
        "a model's folder": lambda: save_model(partly_agreeing(target), folder),
        "a model": lambda: partly_agreeing(target),
        "an assistant": lambda: SpecDecPPAssistant.from_draft(random_layer(target).float(), target),
    }
    return target, drafts[what]() if what in drafts else what


@pytest.mark.parametrize(("what", "kind"), [
    ("an assistant's folder", "early_exit"), ("a model's folder", "independent"), ("a model", "independent"),
    ("an assistant", "eagle3"), ("mtp", "mtp"), ("auto", "mtp"), ("lookup", "lookup"),
])  # fmt: skip
def test_whatever_is_named_drafts(what: str, kind: str, tmp_path: Path) -> None:
    target, draft = named(what, tmp_path)
    plain, assistant = text(target), assist(target, draft)
    assert (text(target), assistant.kind.name, assistant.stats.generated) == (plain, kind, 12)
    assist(target, None)


def test_nothing_is_downloaded_by_default(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_client_at(monkeypatch, hub, tmp_path / "cache")
    target = tiny("llama").float()
    target.config._name_or_path = "org/target"
    assert (assist(target).kind.name, hub.requests) == ("lookup", [])


@pytest.mark.parametrize(("draft", "options", "says"), [
    ("auto", {"treshold": 0.5}, "There is no option treshold for draft='auto'. Did you mean threshold"),
    ("auto", {"pack_weights": True}, "There is no option pack_weights for .*threshold, .*source"),
    ("lookup", {"revision": "v1"}, "There is no option revision for draft='lookup'. There are rule, .*, speculation"),
    ("auto", {"layers": 4}, r"no option layers. For an early exit: SpecDecPPAssistant.from_early_exit\(model, l"),
    ("/nowhere/at/all", {}, "There is no folder '/nowhere/at/all'"),
    ("lookup", {"rule": "best"}, "rule='best' must be one of"),
])  # fmt: skip
def test_errors(target: CausalLM, draft: str, options: dict[str, Any], says: str) -> None:
    target.__class__ = type("Own", (type(target),), {})  # other tests' targets may have assistants still
    with pytest.raises((TypeError, ValueError, OSError), match=says):
        assist(target, draft, **options)
    assert "_sample" not in vars(type(target)) or type(vars(type(target))["_sample"]).__name__ != "Method"


@pytest.mark.parametrize(("what", "options", "says"), [
    ("a model", {"dtype": "auto"}, "There is no option dtype for draft=LlamaForCausalLM. There are .*adapter, "),
    ("a model's folder", {"eagle3": {}}, "There is no option eagle3 for draft=.*. There are .*adapter, "),
    ("an assistant's folder", {"adapter": "org/x"}, "There is no option adapter for draft=.*. There are .*cache_dir"),
])  # fmt: skip
def test_options_of_other_drafts(what: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    target, draft = named(what, tmp_path)
    with pytest.raises(TypeError, match=says):
        assist(target, draft, **options)


# Drafts that others have published -----------------------------------------------------------------------------------


def test_the_table_has_one_form() -> None:
    for each in table():
        for name in (each.target, each.draft):
            assert len(name.split("/")) == 2
        forms = ("EAGLE-3", "DFlash", "DSpark", "JetSpec", "PARD")
        assert each.form in (*(f"{form} draft" for form in forms), "Gemma 4 assistant")
        assert each.source.startswith("https://")
        assert each.file in ("safetensors", "pickle")
        figures = [figure for figure in (each.tokens_per_pass, each.speedup) if figure is not None]
        assert len(figures) == bool(each.measured_on)
        assert all(1.0 < figure < 16.0 for figure in figures)
    assert len({(each.target, each.draft) for each in table()}) == len(table()) > 50
    order = [each.target for each in table()]
    assert order == sorted(order, key=order.index), "drafts of a target stand together"


def test_drafts_are_found_by_the_name_of_a_model_or_its_folder() -> None:
    found = [each.draft for each in published("Qwen/Qwen3-8B")]
    assert found == [each.draft for each in published("/models/Qwen3-8B/")]
    assert (published("Qwen/Qwen3-8B-Base"), published("")) == ([], [])


def test_the_table_has_the_best_first() -> None:
    for target in {each.target for each in table()}:
        found = [each for each in table() if each.target == target]
        compared = Counter((each.source, each.measured_on) for each in found)

        def place(each: Published, compared: Counter[Any] = compared) -> tuple[bool, int, float]:
            if not each.measured_on:
                return True, 0, 0.0
            together = compared[each.source, each.measured_on]
            return False, -together, -(each.speedup or each.tokens_per_pass or 0.0) if together > 1 else 0.0

        assert found == sorted(found, key=place)


def test_figures_are_compared_within_one_source_and_set_up_only() -> None:
    """Drafts that were compared with the most others come first, then other figures, as high as they are."""
    found = published("Qwen/Qwen3-8B")
    assert [each.form for each in found[:3]] == ["DSpark draft", "DFlash draft", "EAGLE-3 draft"]
    assert len({(each.source, each.measured_on) for each in found[:3]}) == 1
    figures = [each.tokens_per_pass or 0.0 for each in found]
    assert figures[0] < 9.6 == max(figures[3:])
    measured = [each.measured_on is not None for each in found]
    assert measured == sorted(measured, reverse=True)
    speeds = [each.speedup for each in published("meta-llama/Llama-3.1-8B-Instruct")]
    assert speeds == [3.83, 2.71, None, None]


def test_the_first_that_loads_is_named_once(target: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    target.config._name_or_path = "meta-llama/Llama-3.1-8B-Instruct"
    line = (
        "meta-llama/Llama-3.1-8B-Instruct has a published PARD draft: assist(model, 'amd/PARD-Llama-3.2-1B'). "
        "Published: 3.83 times the speed (HumanEval, GSM8K and MT-bench in vLLM, A100)."
    )
    assert advice(target.config.name_or_path) == line
    for _ in range(2):
        assist(target)
    assert caplog.messages.count(line) == 1
    assert advice("lmsys/vicuna-13b-v1.3") is None  # a pickle only
