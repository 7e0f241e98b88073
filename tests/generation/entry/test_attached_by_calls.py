"""`generate(assistant_model=assistant)` attaches an assistant that is not attached to the model, as `attach` would."""

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.devices.pretend_graph import pretend_graphs
from support.files.repos import WORDS, save_model
from support.targets.models import assistant_for, assistant_of, configured, prompt, tiny
from support.targets.snapshots import has_our_methods, of_own_class, snapshot
from support.targets.watchers import heard
from transformers import GenerationMixin

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.generation.entry.attached import Method
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 3}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")


def generate(target: Any, ids: torch.Tensor = PROMPT, **arguments: Any) -> torch.Tensor:
    text: torch.Tensor = target.generate(input_ids=ids, **{**GREEDY, **arguments})
    return text


def unmet(kind: str, target: CausalLM, **speculation: Any) -> SpecDecPPAssistant:
    """An assistant that is attached to nothing."""
    assistant = assistant_of(kind, target, **(speculation or FIXED))
    assistant.detach()
    return assistant


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "chain": (FIXED, 1),
    "tree": ({"tree": [2, 1], "rule": "fixed"}, 1),
    "throughput": ({"rule": "throughput"}, 1),
    "batch": (FIXED, 3),
}


@pytest.mark.daily("independent-batch", "early_exit-throughput", "conditioned-tree", "eagle3-chain")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_everything(kind: str, way: str) -> None:
    """Its text is plain's, it says how it was attached, and `detach` leaves no trace."""
    speculation, rows = WAYS[way]
    target = of_own_class(tiny("llama"))
    ids = torch.cat([prompt(12, seed=row) for row in range(rows)])
    plain, before = generate(target, ids), snapshot(target)
    assistant = unmet(kind, target, **speculation)
    assert not has_our_methods(target)
    assert "not attached" in repr(assistant)
    for _ in range(2):
        assert torch.equal(generate(target, ids, assistant_model=assistant), plain)
        assert assistant.stats.decided["attached"] == "by a call"
        assert assistant.stats.decided["rule"] == speculation["rule"]
        assert assistant.stats.drafted > 0 or way == "throughput"
    assert (way == "tree") == (assistant.stats.last_tree is not None)
    assert repr(assistant).endswith("attached to LlamaForCausalLM by a call)")
    assert attached.targets_of(assistant) == [target]
    assert torch.equal(generate(target, ids), plain), "it is no default"
    assistant.detach()
    assert "not attached" in repr(assistant)
    assert snapshot(target) == before
    assert not has_our_methods(target)


def test_its_rounds_are_captured() -> None:
    target = tiny("llama")
    plain, assistant = generate(target), unmet("early_exit", target)
    with pretend_graphs():
        assert torch.equal(generate(target, assistant_model=assistant), plain)
    assert assistant.stats.decided["rounds"] == "captured"


def test_attaching_it_says_so() -> None:
    """Also as the default, which further calls that name it leave alone."""
    target, assistant = tiny("llama"), None
    assistant = unmet("independent", target)
    generate(target, assistant_model=assistant)
    assistant.attach(target, default=True)
    for named in (None, assistant, None):
        generate(target, assistant_model=named)
        assert (assistant.stats.decided["attached"], assistant.stats.generated) == ("before", 20)
    assert "default of" in repr(assistant)


# What `attach` raises, the call raises, and nothing is attached. ------------------------------------------------------


def other_layers(target: CausalLM) -> SpecDecPPAssistant:
    return assistant_of("early_exit", tiny("llama"), **FIXED)


def too_many_layers(target: CausalLM) -> SpecDecPPAssistant:
    assistant = SpecDecPPAssistant.from_early_exit(tiny("llama", num_hidden_layers=4), 3)
    assistant.detach()
    return assistant


def loop_of_its_own(target: CausalLM) -> SpecDecPPAssistant:
    target.__class__ = type("Loops", (type(target),), {"_sample": lambda *_, **__: None})
    return assistant_for(target, attached=False)


def windows_in_the_cache_alone(target: CausalLM) -> SpecDecPPAssistant:
    target.config.sliding_window = 8
    return assistant_for(target, attached=False)


def other_words(target: CausalLM) -> SpecDecPPAssistant:
    draft = Path(target.config.name_or_path).with_name("draft")
    return SpecDecPPAssistant.from_draft(save_model(tiny("llama"), draft, WORDS[::-1]))


UNFIT = [other_layers, too_many_layers, windows_in_the_cache_alone, loop_of_its_own, other_words]


@pytest.mark.parametrize("unfit", UNFIT)
def test_refusals_are_those_of_attach(unfit: Any, tmp_path: Path) -> None:
    target = of_own_class(tiny("llama", num_hidden_layers=2))
    target.config.name_or_path = save_model(target, tmp_path / "target")
    assistant, messages = unfit(target), list[tuple[type, str]]()
    met = attached.targets_of(assistant)
    for act in (lambda: assistant.attach(target), lambda: generate(target, assistant_model=assistant)):
        try:
            act()
        except (ValueError, OSError) as error:
            messages.append((type(error), str(error)))
        assert attached.targets_of(assistant) == met
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert not has_our_methods(target)


def test_layers_of_another_model() -> None:
    """An independent draft serves both models; layers serve the model that they are of, until `detach`."""
    first, second = tiny("llama"), tiny("llama", seed=3)
    plains = [generate(each) for each in (first, second)]
    for kind in ("independent", "early_exit"):
        assistant = unmet(kind, first)
        assert torch.equal(generate(first, assistant_model=assistant), plains[0])
        if kind == "early_exit":
            with pytest.raises(ValueError, match="with the layers of the target that it is attached to. Call detach"):
                generate(second, assistant_model=assistant)
            assistant.detach()
        assert torch.equal(generate(second, assistant_model=assistant), plains[1])
        assert assistant.stats.drafted > 0
        assert len(attached.targets_of(assistant)) == 1 + (kind == "independent")
        assert torch.equal(generate(copy.deepcopy(second), assistant_model=unmet(kind, second)), plains[1])


# Ways to a call. ------------------------------------------------------------------------------------------------------


def test_by_position() -> None:
    target = tiny("llama")
    plain, assistant = generate(target), unmet("independent", target)
    assert torch.equal(target.generate(PROMPT, *[None] * 5, assistant, **GREEDY), plain)
    assert assistant.stats.drafted > 0


def test_through_peft() -> None:
    """The model inside the wrapper is attached, and its adapter is part of the text."""
    target = tiny("llama")
    wrapped: Any = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    plain = generate(wrapped)
    assistant = assistant_for(tiny("llama"), attached=False)
    assert torch.equal(generate(wrapped, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0
    assert attached.targets_of(assistant) == [target]
    assistant.detach(wrapped)
    assert "not attached" in repr(assistant)


def test_a_recipe_of_others(tmp_path: Path) -> None:
    """`custom_generate`, whose code hands the assistant on."""
    target = tiny("llama")
    plain, assistant = generate(target), unmet("independent", target)
    (tmp_path / "custom_generate").mkdir()
    recipe = "def generate(model, **arguments):\n    return model.generate(**arguments)\n"
    (tmp_path / "custom_generate" / "generate.py").write_text(recipe, encoding="utf-8")
    how: dict[str, Any] = {"custom_generate": str(tmp_path), "trust_remote_code": True, "assistant_model": assistant}
    assert torch.equal(generate(target, **how), plain)
    assert assistant.stats.drafted > 0


def test_in_inference_mode() -> None:
    """What is made for further calls is no tensor of that mode."""
    target = tiny("llama")
    plain, assistant = generate(target), unmet("conditioned", target)
    with torch.inference_mode():
        assert torch.equal(generate(target, assistant_model=assistant), plain)
    parts = [tensor for part in assistant.drafter.parts for tensor in (*part.parameters(), *part.buffers())]
    assert parts
    assert not any(tensor.is_inference() for tensor in parts)


# Lives and threads. ---------------------------------------------------------------------------------------------------


@pytest.mark.daily("independent", "eagle3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_not_kept(kind: str) -> None:
    target = tiny("llama")
    assistant = unmet(kind, target)
    generate(target, assistant_model=assistant)
    gone = weakref.ref(target)
    del target
    assistant.drafter = None  # which shares the target's tensors
    gc.collect()
    assert gone() is None
    assert attached.targets_of(assistant) == []


def test_transformers_has_its_own_methods_without_assistants(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> set[str]:
        return {name for name, each in vars(GenerationMixin).items() if isinstance(each, Method)}

    target, names = tiny("llama"), set(attached.METHODS)
    assistant = unmet("independent", target)
    assert ours() == names
    with monkeypatch.context() as patch:
        patch.setattr(attached, "_assistants", weakref.WeakSet([assistant]))  # others live in other tests
        patch.setattr(attached, "_attached", weakref.WeakKeyDictionary())
        generate(target, assistant_model=assistant)
        del assistant
        gc.collect()
        assert ours() == set()
    attached._put_on(GenerationMixin)
    assert ours() == names


def together(*acts: Any) -> list[Any]:
    """What each returns or raises, all at once in threads of their own."""
    start, found = threading.Barrier(len(acts), timeout=60), list[Any](acts)

    def work(place: int) -> None:
        start.wait()
        try:
            found[place] = acts[place]()
        except ValueError as error:
            found[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


def test_calls_of_one_target_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is attached once, and one that becomes the default meanwhile stays it."""
    target = tiny("llama")
    plain, assistant, made = generate(target), unmet("early_exit", target), []
    heard(monkeypatch, type(assistant), "_make_draft", lambda *_: made.append(1))
    acts = [lambda: generate(target, assistant_model=assistant)] * 3
    texts = together(*acts, lambda: assistant.attach(target, default=True))
    assert all(torch.equal(text, plain) for text in texts[:3])
    assert attached.default_of(target) is assistant
    assert len(made) == 1


def test_calls_of_two_targets_at_once() -> None:
    """Layers serve one of them, and the other's call says so."""
    targets = [tiny("llama"), tiny("llama", seed=3)]
    plains, assistant = [generate(each) for each in targets], unmet("early_exit", targets[0])
    texts = together(*[lambda each=each: generate(each, assistant_model=assistant) for each in targets])
    (served,) = attached.targets_of(assistant)
    for target, text, plain in zip(targets, texts, plains, strict=True):
        if target is served:
            assert torch.equal(text, plain)
        else:
            assert "Call detach() first" in str(text)


def test_models_of_transformers_draft_as_ever() -> None:
    """Assistants that are no assistant of ours go on to transformers."""
    target, theirs = tiny("llama"), tiny("llama", seed=1)
    plain, ours = generate(target, assistant_model=theirs), unmet("independent", target)
    assert torch.equal(generate(target, assistant_model=theirs), plain)
    assert attached.assistants_of(target) == []
    configured(ours, **FIXED).attach(target)
    assert torch.equal(generate(target, assistant_model=theirs), plain)
    assert ours.stats.rounds == 0
