"""All that a `generate()` call may ask for and meet where its passes are captured; on pretended graphs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN, SETTINGS, Waiting, assert_captured_as_uncaptured, generate
from support.targets.families import informed_draft
from support.targets.models import assistant_of, configured, prompt, quiet_later_layers, tiny
from support.targets.multimodal import multimodal
from support.targets.outputs import assert_same, assert_same_cache, prefill
from support.targets.static_caches import static_cache
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cuda_graphs import captured_target
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs
from hf_specdecpp.drafting.draft import logger
from hf_specdecpp.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("pretended")

TREE = SETTINGS["static"]


def made(family: str = "llama", kind: str = "early_exit", **settings: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = quiet_later_layers(tiny(family))
    return target, assistant_of(kind, target, **(settings or CHAIN))


def passes_of(target: CausalLM) -> CapturedTarget:
    return captured_target._known[target][1]


def assert_captured(assistant: SpecDecPPAssistant) -> None:
    stats = assistant.stats
    assert stats.uncaptured is None
    assert stats.graphs > 0
    assert stats.graph_bytes > 0
    assert stats.accepted > 0


@pytest.mark.daily("llama-chain", "gemma3_text-tree")
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_records_and_a_cache_to_go_on_with(family: str, settings: dict[str, Any]) -> None:
    target, assistant = made(family, **settings)
    how = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, ours = (generate(target, each, temperature=None, **how) for each in (None, assistant))
    assert_captured(assistant)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same((ours.scores, ours.logits), (plain.scores, plain.logits))
    assert_same_cache(ours.past_key_values, plain.past_key_values)
    further = [
        target.generate(each.sequences, past_key_values=each.past_key_values, max_new_tokens=9, pad_token_id=0)
        for each in (ours, plain)
    ]
    assert torch.equal(*further)


def test_images_and_positions_in_three_dimensions() -> None:
    """A prompt with an image is not captured, text alone is."""
    target, inputs = multimodal("qwen2.5 vl")
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = target.generate(**inputs, **how)
    draft = informed_draft(plain, target.config.get_text_config().vocab_size)
    assistant = configured(SpecDecPPAssistant.from_draft(draft, target), **CHAIN)
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, **how), plain)
    assert "its forward is given" in str(assistant.stats.uncaptured)
    assert torch.equal(generate(target, assistant, eos_token_id=None), generate(target, None, eos_token_id=None))
    assert (assistant.stats.uncaptured, assistant.stats.graphs > 0) == (None, True)


@pytest.mark.daily("gemma3_text-tree", takes=2)
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_static_cache_that_generate_makes(family: str, settings: dict[str, Any]) -> None:
    """Gives way to captured passes; texts of other lengths capture nothing again."""
    target, assistant = made(family, **settings)
    before = None
    for count in (12, 20, 30):
        how: dict[str, Any] = {"cache_implementation": "static", "max_new_tokens": count}
        assert torch.equal(generate(target, assistant, **how), generate(target, None, **how))
        assert_captured(assistant)
        assert before in (None, passes_of(target))
        before = passes_of(target)


def test_a_static_cache_of_the_users_own() -> None:
    """Holds the text afterwards, which captured passes have read."""
    target, assistant = made()
    cache = static_cache(target)
    text = generate(target, assistant, past_key_values=cache)
    assert torch.equal(text, generate(target, None))
    assert_captured(assistant)
    assert int(cache.get_seq_length()) == text.shape[1] - 1


def other_weights(target: CausalLM) -> None:
    for layer in target.model.layers:
        layer.mlp.down_proj.weight = nn.Parameter(3.0 * layer.mlp.down_proj.weight.detach())


def weights_in_place(target: CausalLM) -> None:
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight *= 3.0


@pytest.mark.daily("other_weights")
@pytest.mark.takes(3)
@pytest.mark.parametrize("change", [other_weights, weights_in_place])
def test_a_changed_target_is_captured_anew(change: Callable[[CausalLM], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for weights that are written to in place, which graphs read. Unnoticed, the text would be the old one's.

    `tests/captured/test_capture.py` has all changes that are noticed."""
    for looks in (True, False):
        target, assistant = made(kind="independent", **CHAIN)
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr(captured_target, "identity", lambda _: [])
            before = generate(target, assistant)
            assert torch.equal(before, generate(target, None))
            passes = passes_of(target)
            change(target)
            plain, ours = generate(target, None), generate(target, assistant)
        assert not torch.equal(plain, before)
        in_place = change is weights_in_place
        assert (passes_of(target) is passes) == (in_place or not looks)
        assert torch.equal(plain, ours) == (looks or in_place)


@pytest.mark.parametrize("length", [12, 20])  # after the prompt's own pass, and in a later round
def test_an_exception_gives_the_passes_back(length: int) -> None:
    target, assistant = made()
    generate(target, assistant)
    cache, text = DynamicCache(config=target.config), prompt()

    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= length:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        generate(target, assistant, past_key_values=cache, logits_processor=[fails])
    assert not passes_of(target).busy
    emitted = assistant.stats.generated
    read = 12 + emitted - 1 if emitted else 0
    assert cache.get_seq_length() == read
    whole = generate(target, None)
    if emitted:
        assert_same_cache(cache, prefill(target, whole[:, :read]))
        ours = target.generate(
            whole[:, : read + 1], past_key_values=cache, do_sample=False, pad_token_id=0, max_length=whole.shape[1]
        )
        assert torch.equal(ours, whole)
    assert torch.equal(generate(target, assistant), whole)
    assert assistant.stats.uncaptured is None
    assert text.shape[1] == 12


def test_a_target_that_cannot_be_captured_says_so() -> None:
    target, assistant = made(kind="independent", **CHAIN)
    target.model.layers[1].mlp = Waiting(target.model.layers[1].mlp)
    plain = generate(target, None)
    for _ in range(2):
        assert torch.equal(generate(target, assistant), plain)
        assert "its pass cannot be captured (aten._local_scalar_dense.default waits" in str(assistant.stats.uncaptured)
        assert not passes_of(target).busy
    ours = generate(target, assistant, return_dict_in_generate=True)
    assert_same_cache(ours.past_key_values, prefill(target, plain[:, :-1]))


def test_a_width_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text, as where memory ends: the text goes on uncaptured."""
    target, assistant = made(kind="independent", **TREE)
    plain, capture = generate(target, None), Graphs._capture

    def fails(graphs: Any, function: Any, changes: Any) -> Any:
        if len(graphs) > 0:
            raise CannotCaptureError("OutOfMemoryError: no memory")
        return capture(graphs, function, changes)

    monkeypatch.setattr(Graphs, "_capture", fails)
    for _ in range(2):
        ours = generate(target, assistant, return_dict_in_generate=True)
        assert torch.equal(ours.sequences, plain)
        assert_same_cache(ours.past_key_values, prefill(target, plain[:, :-1]))
        assert assistant.stats.accepted > 0
        assert assistant.stats.uncaptured == "its pass cannot be captured (OutOfMemoryError: no memory)"


def test_a_draft_that_cannot_be_captured_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(logger, "warning", told.append)
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, **CHAIN)
    model: Any = assistant.ready_drafter().model
    model.model.layers[0].mlp = Waiting(model.model.layers[0].mlp)
    assistant.speculation.graphs = "off"
    expected, accepted = generate(target, assistant), assistant.stats.accepted
    assistant.speculation.graphs = "auto"
    for _ in range(2):
        assert torch.equal(generate(target, assistant), expected)
        assert assistant.stats.accepted == accepted > 0, "its cache is intact after the capture that failed"
    assert len(told) == 1
    assert "cannot be captured as CUDA graphs here (aten._local_scalar_dense.default waits" in told[0]


def test_two_texts_at_once() -> None:
    """The second goes uncaptured, says so, and is right; then a third is captured again."""
    target, assistant = made()
    other, plain = configured(SpecDecPPAssistant.from_early_exit(target, 2), **CHAIN), generate(target, None)
    begun, go_on = threading.Event(), threading.Event()
    found: list[Tensor] = []

    class Waits(BaseStreamer):
        def put(self, value: Tensor) -> None:
            if target in captured_target._known and passes_of(target).busy:
                begun.set()
                go_on.wait(60)

        def end(self) -> None:
            pass

    def first() -> None:
        found.append(generate(target, assistant, streamer=Waits()))

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    second = generate(target, other)
    go_on.set()
    thread.join()
    assert torch.equal(second, plain)
    assert torch.equal(found[0], plain)
    assert other.stats.uncaptured == "another text is using the captured passes of this target"
    assert assistant.stats.uncaptured is None
    generate(target, other)
    assert other.stats.uncaptured is None


def test_states_that_are_asked_for_are_a_reason() -> None:
    target, assistant = made(kind="independent", **CHAIN)
    plain, ours = (generate(target, each, output_hidden_states=True) for each in (None, assistant))
    assert torch.equal(ours, plain)
    assert "the states" in str(assistant.stats.uncaptured)
    assert assistant.stats.graphs == 0


def test_a_captured_pass_is_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = made()
    forward = CapturedTarget.forward

    def off(passes: CapturedTarget, *arguments: Any) -> list[Tensor]:
        logits, *states = forward(passes, *arguments)
        return [logits.roll(1, dims=-1), *states]

    monkeypatch.setattr(CapturedTarget, "forward", off)
    assert torch.equal(generate(target, assistant), generate(target, None))
    assert "a captured pass of width 1 is off by" in str(assistant.stats.uncaptured)
    assert not passes_of(target).busy


# Captured texts are plain generation's, and the same is drafted as uncaptured; on pretended graphs. -------------------


FAMILIES = ("llama", "gemma3_text", "mistral", "gpt2", "granite", "phi3")
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
SEEDS = {("gemma3_text", "conditioned"): 4, ("granite", "eagle3"): 1}  # else their random drafts are never right


@pytest.mark.daily("gpt2-independent-threshold", takes=4)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("pretended")
def test_captured_as_uncaptured(family: str, kind: str, name: str) -> None:
    """From a prompt of 3 tokens, and from a padded one whose text outgrows a room; texts longer than windows."""
    seed = SEEDS.get((family, kind), 0)
    assert_captured_as_uncaptured(kind, quiet_later_layers(tiny(family, seed)), **SETTINGS[name])
