"""Attaching, detaching and assisted calls while other threads generate with the same models."""

import copy
import gc
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.devices.products import faster, products_of, use_copies
from support.targets.models import assistant_for, prompt, tiny
from support.targets.snapshots import has_our_methods, of_own_class, snapshot
from support.targets.watchers import runs_of
from torch import Tensor, nn
from transformers import LogitsProcessor

from hf_specdecpp.generation.entry import attached
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.products import has_int8, int8_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies

PROMPT = prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
# Of `generate()`: before its decoding method is looked up, before the mode is validated, and after that.
MOMENTS = ("_prepare_generation_config", "_validate_model_kwargs", "_prepare_special_tokens")


def generate(target: CausalLM, **arguments: Any) -> Tensor:
    return target.generate(PROMPT, **GREEDY, **arguments)


def in_a_thread(action: Callable[[], Any]) -> Any:
    """What it returns, or raises, elsewhere."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - raised below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Meanwhile(LogitsProcessor):
    """Has something done, once, while a text is generated; changes nothing."""

    reads_prefix_only = True

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action, self.found = action, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.found and input_ids.shape[1] > PROMPT.shape[1] + 3:
            self.found.append(self.action())
        return scores


def elsewhere(action: Callable[[], Any]) -> Meanwhile:
    """The same by another thread."""
    return Meanwhile(lambda: in_a_thread(action))


CALLS = ("plain", "another's", "by default", "by name")


@pytest.mark.daily(
    "attach-by default-_validate_model_kwargs", "detach-by name-_prepare_generation_config",
    "delete-another's-_validate_model_kwargs",
)  # fmt: skip
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("change", "call"), [*itertools.product(("attach", "detach"), CALLS), ("delete", "plain"), ("delete", "another's")]
)
def test_assistants_come_or_go_in_a_call(change: str, call: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = of_own_class(tiny("llama"))
    plain = generate(target)
    helpers: list[Any] = [assistant_for(target)]
    if call == "another's":
        helpers.append(assistant_for(target))
    helpers[0].attach(target, default=call == "by default")
    if change == "attach":
        helpers[0].detach()
    named = {"by name": helpers[0], "another's": helpers[-1]}.get(call)

    def changes(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        if change == "attach":
            helpers[0].attach(target, default=call == "by default")
        elif change == "detach":
            helpers[0].detach()
        else:
            helpers[0] = None
            gc.collect()
        return getattr(target, moment)(*args, **kwargs)

    monkeypatch.setattr(target, moment, changes, raising=False)
    more = {} if named is None else {"assistant_model": named}
    del named
    assert torch.equal(generate(target, **more), plain)
    more.clear()
    for helper in filter(None, helpers):
        helper.detach()
    helpers.clear()
    gc.collect()
    assert not has_our_methods(target)


@pytest.mark.parametrize("default", [True, False])
def test_detaching_in_the_middle_of_a_text(default: bool) -> None:
    """The call ends as it began."""
    target = of_own_class(tiny("llama"))
    plain, before = generate(target), snapshot(target)
    assistant = assistant_for(target)
    assistant.attach(target, default)
    detaches = elsewhere(assistant.detach)
    more = {} if default else {"assistant_model": assistant}
    assert torch.equal(generate(target, logits_processor=[detaches], **more), plain)
    assert assistant.stats.generated == GREEDY["max_new_tokens"]
    assert detaches.found
    assert snapshot(target) == before
    assert not has_our_methods(target)


def test_a_class_and_a_subclass_of_it() -> None:
    """Each assists its own models, once, and has its own methods back after the last of them."""
    target, other = of_own_class(tiny("llama")), of_own_class(tiny("llama"))
    name = "_validate_generation_mode"
    child: Any = type("Child", (type(target),), {name: lambda self, *args, **kwargs: taken(self, *args, **kwargs)})
    own, calls = vars(child)[name], []

    def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return getattr(super(child, self), name)(*args, **kwargs)

    other.__class__ = child
    plain = generate(target)
    parents, childs = assistant_for(target), assistant_for(other)
    parents.attach(target, default=True)
    childs.attach(other, default=True)
    assert torch.equal(generate(other), plain)
    assert (len(calls), childs.stats.drafted > 0, parents.stats.rounds) == (1, True, 0)
    vars(childs.speculation)["rule"] = "no such rule"  # past the check of settings
    assert torch.equal(generate(other), plain)
    assert len(calls) == 2
    assert "rule" in str(childs.stats.refusal)
    assert parents.stats.rounds == 0
    childs.detach()
    assert vars(child)[name] is own
    assert has_our_methods(target)
    parents.detach()
    assert not has_our_methods(target)


def test_another_default_for_this_thread_s_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    own, other = assistant_for(target), assistant_for(target)
    own.attach(target, default=True)
    plain, ran = generate(target, assistant_model=own), runs_of(monkeypatch)

    def drafter() -> Any:
        ran.clear()
        assert torch.equal(generate(target), plain)
        return [each for each, _ in ran]

    with other.as_default(target):
        assert (drafter(), in_a_thread(drafter)) == ([other.drafter], [own.drafter])
        with own.paused():
            assert drafter() == [other.drafter]
    with pytest.raises(KeyError), other.as_default(target):
        raise KeyError
    assert drafter() == [own.drafter]


def test_pauses_that_overlap() -> None:
    """The default is back when the last of them is over."""
    target = tiny("llama")
    assistant = assistant_for(target)
    assistant.attach(target, default=True)
    first, second = assistant.paused(), assistant.paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert attached.default_of(target) is None
    second.__exit__(None, None, None)
    assert attached.default_of(target) is assistant


# Modules that calls compute with --------------------------------------------------------------------------------------


@pytest.fixture
def all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_copies(monkeypatch)


needs_int8 = pytest.mark.skipif(not has_int8(), reason="this PyTorch has no int8 products")


@needs_int8
@pytest.mark.usefixtures("all_layers")
def test_products_are_this_thread_s() -> None:
    """Also of contexts that overlap, are left in any order, or are entered again."""
    layer, x = nn.Linear(64, 48), torch.randn(2, 64)
    with torch.no_grad():
        plain = layer(x)

    @torch.no_grad()
    def product() -> tuple[dict[str, int], bool]:
        return products_of(layer), torch.equal(layer(x), plain)

    own = {"own": 1}, True
    int8 = FasterProducts(draft=[layer], int8=WeightCopies(int8_copy))
    with int8:
        other = faster(layer)
        assert other.layers, "what another context does is no forward of a stranger"
        assert in_a_thread(product) == own
        with other:
            assert (product()[0], in_a_thread(product)) == ({"oneDNN": 1}, own)
        assert product() == ({"int8": 1}, False)
        with int8:
            pass
        assert product() == ({"int8": 1}, False), "it is left once"
        assert in_a_thread(lambda: in_context(int8, product)) == ({"int8": 1}, False)
        assert product() == ({"int8": 1}, False)
        twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))  # noqa: S301 - our own bytes
    assert product() == own
    assert "forward" not in vars(layer)
    for twin in twins:
        with torch.no_grad():
            twin.weight.zero_()
            assert torch.equal(twin(x), twin.bias.expand(2, -1)), "a copy computes with its own weights"


def in_context(context: Any, action: Callable[[], Any]) -> Any:
    with context:
        return action()
