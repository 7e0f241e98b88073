"""Settings are checked where they are set, by name and by value, and what was probably meant is said."""

import copy
import inspect
import pickle
import pydoc
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, prompt, tiny

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, assist
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.configuration import HeadConfig, TrainingConfig

# A field, a value that it cannot have, and what is said.
WRONG: list[tuple[str, Any, str]] = [
    ("rule", "treshold", "rule='treshold' must be one of threshold, throughput, fixed. Did you mean threshold?"),
    ("rule", "Throughput", "Did you mean throughput?"),
    ("rule", None, "rule=None must be one of threshold, throughput, fixed"),
    ("rule", ["fixed"], "rule=['fixed'] must be one of"),
    ("threshold", 7, "threshold=7 must be a number from 0 to 1"),
    ("threshold", -0.1, "must be a number from 0 to 1"),
    ("threshold", float("nan"), "threshold=nan must be a number"),
    ("threshold", "0.5", "threshold='0.5' must be a number"),
    ("threshold", None, "must be a number"),
    ("threshold", torch.tensor([0.5, 0.5]), "must be a number"),
    ("num_tokens", 0, "num_tokens=0 must be a whole number from 1 to 1024"),
    ("num_tokens", 5.0, "must be a whole number"),
    ("num_tokens", True, "must be a whole number"),
    ("max_tokens", 5000, "max_tokens=5000 must be a whole number from 1 to 1024"),
    ("max_tokens", "20", "must be a whole number"),
    ("tree_budget", 1, "tree_budget=1 must be a whole number from 2 to 1024"),
    ("tree", True, "tree=True is not a kind of tree. It can be 'auto', 'dyspec'"),
    ("tree", 4, "is not a kind of tree"),
    ("tree", {}, "is not a kind of tree"),
    ("tree", "dyspeck", "Did you mean dyspec?"),
    ("tree", "DySpec", "Did you mean dyspec?"),
    ("tree", [0], "must hold whole numbers of at least 1"),
    ("tree", ["4", 2], "tree="),
    ("tree", [40, 40, 40], "1024"),
    ("lookup", "histroy", "must be true or false or 'history'. Did you mean history?"),
    ("lookup", 1, "lookup=1 must be true or false"),
    ("lookup", None, "must be true or false"),
    ("costs", 7, "costs=7 must be a mapping"),
    ("costs", {"draft": 1.0}, "'block': candidates} in seconds; all but the first two may be missing"),
    ("costs", {"draft": 1.0, "verify": []}, "must list what target passes"),
    ("costs", {"draft": 1.0, "verify": [1.0], "verfiy": 1.0}, "must look like"),
    ("reproducible", "yes", "reproducible='yes' must be true or false"),
    ("cpu_products", "of", "must be one of auto, off. Did you mean off?"),
    ("cpu_products", False, "must be one of auto, off"),
    ("graphs", None, "must be one of auto, off"),
    ("compile", 1, "must be true or false"),
]


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny("llama")


@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=lambda value: str(value)[:30])
def test_values(name: str, value: Any, says: str, target: CausalLM) -> None:
    """Everywhere where one can be set; what was set before stays."""
    assistant = assistant_for(target, attached=False)
    before = getattr(assistant.speculation, name)
    for act in (
        lambda: setattr(assistant.speculation, name, value),
        lambda: SpeculationConfig(**{name: value}),
        lambda: replace(assistant.speculation, **{name: value}),
        lambda: assist(target, assistant, **{name: value}),
        lambda: SpeculationConfig.from_dict({name: value}),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - what it says is compared below
            act()
        assert says in str(refused.value)
        assert "Traceback" not in str(refused.value)
    assert getattr(assistant.speculation, name) == before
    assist(target, None)


def test_every_field_is_among_them() -> None:
    assert {name for name, *_ in WRONG} == {each.name for each in fields(SpeculationConfig)}


def test_what_was_changed_in_place_is_found_before_a_generation(target: CausalLM) -> None:
    assistant = assistant_for(target, rule="threshold", tree=[2, 1])
    assistant.speculation.tree.append(0)
    with pytest.raises(ValueError, match="must hold whole numbers of at least 1"):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=4)
    assistant.detach()


NAMES = [("treshold", "threshold"), ("num_token", "num_tokens"), ("look_up", "lookup"), ("Rule", "rule"), ("x", None)]


@pytest.mark.parametrize(("name", "meant"), NAMES)
def test_names(name: str, meant: str | None, target: CausalLM) -> None:
    given: Any = {name: 1}
    says = rf"{name}\.( Did you mean {meant}\?)" if meant else rf"{name}\.(?! Did you mean)"
    with pytest.raises(TypeError, match=f"There is no setting {says}"):
        SpeculationConfig(**given)
    with pytest.raises(AttributeError, match=f"There is no setting {says}"):
        setattr(SpeculationConfig(), name, 1)
    with pytest.raises(TypeError, match=f"There is no option {says}".replace(r"\.", " for draft='lookup'\\.", 1)):
        assist(target, "lookup", **given)
    meaning = rf"\. Did you mean {meant}\?" if meant else ""
    with pytest.raises(ValueError, match=rf"Unknown setting speculation\.{name}\. speculation takes .*{meaning}"):
        TrainingConfig(target="t", output="o", speculation={name: 1}).validate()
    with pytest.raises(ValueError, match=r"Unknown setting head.rnak\. .*\. Did you mean rank\?"):
        TrainingConfig.from_dict({"target": "t", "output": "o", "head": {"rnak": 4}})


@pytest.mark.parametrize(("name", "value", "error", "says"), [
    ("threshold", 0.5, AttributeError, r"threshold is a setting. Set assistant.speculation.threshold = 0.5"),
    ("tree", "dyspec", AttributeError, r"assistant.speculation.tree = 'dyspec'"),
    ("lookup", True, AttributeError, "is a setting"),
    ("speculation", {"rule": "fixed"}, TypeError, r"must be a SpeculationConfig, such as SpeculationConfig\(rule="),
    ("speculation", None, TypeError, "must be a SpeculationConfig"),
    ("decisions", {}, TypeError, "must be a Decisions"),
    ("decisions", SpeculationConfig(), TypeError, "must be a Decisions"),
    ("head", "org/head", TypeError, "head='org/head' must be an AcceptanceHead or left out"),
    ("memory", None, TypeError, "must be a Memory"),
])  # fmt: skip
def test_attributes_of_an_assistant(name: str, value: Any, error: type[Exception], says: str, target: CausalLM) -> None:
    assistant = assistant_for(target, attached=False)
    with pytest.raises(error, match=says):
        setattr(assistant, name, value)
    assistant.speculation, assistant.decisions, assistant.head = SpeculationConfig("fixed"), Decisions(), None
    assistant.head = AcceptanceHead(32, inputs="after")


# Arguments of what makes assistants. ---------------------------------------------------------------------------------


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"default": "yes"}, "default='yes' must be true or false"),
    ({"head": "x"}, "head='x' must be an AcceptanceHead"),
    ({"adapter": 5}, "adapter=5 must be text or a Path"),
    ({"draft_vocab": "x"}, "draft_vocab='x' must be"),
    ({"draft_vocab": [1.5]}, "draft_vocab="),
    ({"draft_vocab": [[1]]}, "draft_vocab="),
    ({"draft_vocab": torch.tensor([1.5])}, "draft_vocab must list distinct token ids"),
    ({"draft_vocab": torch.ones(2, 2).long()}, "draft_vocab must list distinct token ids"),
    ({"draft_vocab": [47, 48]}, "draft_vocab must list distinct token ids from 0 to 47"),
    ({"merge": "no"}, "merge='no' must be true or false"),
    ({"speculation": {}}, "speculation={} must be a SpeculationConfig"),
    ({"heaad": None}, "heaad.* Did you mean head?"),
    ({"revision": 3}, "revision"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("how", ["assist", "from_draft", "from_early_exit"])
def test_options(how: str, options: dict[str, Any], says: str, target: CausalLM) -> None:
    draft = tiny("llama", seed=1)
    make: Any = {
        "assist": lambda: assist(target, draft, **options),
        "from_draft": lambda: SpecDecPPAssistant.from_draft(draft, target, **options),
        "from_early_exit": lambda: SpecDecPPAssistant.from_early_exit(target, 1, **options),
    }[how]
    with pytest.raises((TypeError, ValueError), match=says.replace("?", r"\?")):
        make()


@pytest.mark.parametrize("draft", ["lookup", "auto"])
@pytest.mark.parametrize("options", [{"adapter": "org/x"}, {"draft_vocab": [1]}, {"merge": False}], ids=str)
def test_options_that_would_do_nothing(draft: str, options: dict[str, Any], target: CausalLM) -> None:
    with pytest.raises(TypeError, match=f"There is no option {next(iter(options))} for draft='{draft}'"):
        assist(target, draft, **options)


@pytest.mark.parametrize(("named", "says"), [
    ("lookups", "Did you mean lookup?"), ("Lookup", "Did you mean lookup?"), ("look-up", "Did you mean lookup?"),
    ("MTP", "Did you mean mtp?"), ("autoo", "Did you mean auto?"), ("None", "Pass None, without quotes"),
    ("early_exit", "This is a kind of draft"), ("eagle3", "This is a kind of draft"), ("", "It takes 'auto', 'mtp', "),
])  # fmt: skip
def test_words_in_the_place_of_drafts(named: str, says: str, target: CausalLM) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - what it says is compared below
        assist(target, named)
    assert f"draft={named!r} is not a folder" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("draft", [5, True, [], b"lookup", None])
def test_what_is_no_draft(draft: Any, target: CausalLM) -> None:
    with pytest.raises(TypeError, match=r"A model is needed here, and this is (an int|a bool|a list|a bytes|None)"):
        SpecDecPPAssistant.from_draft(draft, target) if draft is None else assist(target, draft)


@pytest.mark.parametrize("layers", ["4", "0,1", 1.5, True, None, [1.0], ["0"], {}, [], 0, 9, [0, 9]], ids=str)
def test_layers(layers: Any, target: CausalLM) -> None:
    for make in (SpecDecPPAssistant.from_early_exit, SpecDecPPAssistant.from_conditioned):
        with pytest.raises(ValueError, match=r"layers=.* must be a number from 1 to 2, or ascending layer indices"):
            make(target, layers)


@pytest.mark.parametrize("layers", [2, [0, 2], (0, 1), range(2), torch.tensor([0, 1])], ids=str)
def test_layers_that_are_right(layers: Any, target: CausalLM) -> None:
    assistant = SpecDecPPAssistant.from_early_exit(target, layers)
    assert [type(each) for each in assistant.config.draft_layers or []] == [int, int]
    assistant.detach()


@pytest.mark.parametrize("reads", ["4", [1.0], 3, None, ["1"]], ids=str)
def test_reads(reads: Any, target: CausalLM) -> None:
    with pytest.raises(TypeError, match=r"reads=.* must be a list, each item a whole number"):
        SpecDecPPAssistant.from_conditioned(target, 1, reads)
    with pytest.raises(TypeError, match="fusion='x' must be a Fusion"):
        SpecDecPPAssistant.from_conditioned(target, 1, fusion="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "says"), [
    ({"targt": None}, r"There is no option targt. Did you mean target\? There are target, speculation, default"),
    ({"revison": "v1"}, r"Did you mean revision\?"),
    ({"revision": 3}, "revision=3 must be text"),
    ({"local_files_only": "yes"}, "must be true or false"),
])  # fmt: skip
def test_loading_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        SpecDecPPAssistant.from_pretrained("org/x", **options)
    with pytest.raises(TypeError, match="repo_or_folder=5 must be text or a Path"):
        SpecDecPPAssistant.from_pretrained(5)  # type: ignore[arg-type]


# What help and editors show. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SpeculationConfig, Decisions, TrainingConfig, HeadConfig])
def test_signatures_name_the_fields(cls: Any) -> None:
    assert list(inspect.signature(cls).parameters) == [each.name for each in fields(cls)]
    shown = pydoc.plain(pydoc.render_doc(cls))
    without_spaces = "".join(shown.split())  # Python 3.14 gives each field a line
    assert f"{cls.__name__}({fields(cls)[0].name}:" in without_spaces or f"|{fields(cls)[0].name}:" in without_spaces
    assert "**given" not in shown.split("Methods defined here")[0]
    made = cls()
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == replace(made) == made  # noqa: S301 - our own
