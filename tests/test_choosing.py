"""`assist`: one line, and `model.generate()` is faster with the same output; whatever drafts is recognised."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import mtp_files
from support.hub_server import HubServer, point_client_at
from support.models import partly_agreeing, prompt, random_layer, tiny
from support.repos import save_model

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.hub.published import advice, published, table
from hf_specdecpp.models.causal_lm import CausalLM


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
    ("auto", {"treshold": 0.5}, "There is no option treshold. Did you mean threshold"),
    ("auto", {"pack_weights": True}, "pack_weights is no setting any more"),
    ("lookup", {"revision": "v1"}, "revision: no such option"),
    ("/nowhere/at/all", {}, "There is no folder '/nowhere/at/all'"),
    ("lookup", {"rule": "best"}, "rule='best' is not a stopping rule"),
])  # fmt: skip
def test_errors(target: CausalLM, draft: str, options: dict[str, Any], says: str) -> None:
    target.__class__ = type("Own", (type(target),), {})  # other tests' targets may have assistants still
    with pytest.raises((TypeError, ValueError, OSError), match=says):
        assist(target, draft, **options)
    assert "_sample" not in vars(type(target)) or type(vars(type(target))["_sample"]).__name__ != "Method"


# Drafts that others have published -----------------------------------------------------------------------------------


def test_the_table_has_one_form() -> None:
    for each in table():
        for name in (each.target, each.draft):
            assert len(name.split("/")) == 2
        assert each.form in ("EAGLE-3 draft", "DFlash draft", "Gemma 4 assistant")
        assert each.source.startswith("https://")
        assert each.file in ("safetensors", "pickle")
        assert (each.tokens_per_pass is None) == (each.measured_on is None)
        assert each.tokens_per_pass is None or 1.0 < each.tokens_per_pass < 16.0
    assert len({(each.target, each.draft) for each in table()}) == len(table()) > 50
    order = [each.target for each in table()]
    assert order == sorted(order, key=order.index), "drafts of a target stand together"


def test_drafts_are_found_by_the_name_of_a_model_or_its_folder() -> None:
    found = [each.draft for each in published("Qwen/Qwen3-8B")]
    assert found[0] == "z-lab/Qwen3-8B-DFlash-b16"
    assert found == [each.draft for each in published("/models/Qwen3-8B/")]
    assert (published("Qwen/Qwen3-8B-Base"), published("")) == ([], [])


def test_the_first_that_loads_is_named_once(target: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    target.config._name_or_path = "meta-llama/Llama-3.1-8B-Instruct"
    line = (
        "meta-llama/Llama-3.1-8B-Instruct has a published EAGLE-3 draft: "
        "assist(model, 'lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge')"
    )
    assert advice(target.config.name_or_path) == line
    for _ in range(2):
        assist(target)
    assert caplog.messages.count(line) == 1
    assert advice("lmsys/vicuna-13b-v1.3") is None  # a pickle only
