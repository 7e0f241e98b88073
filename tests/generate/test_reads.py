"""How often verification reads from the device: once a round."""

from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt, tiny
from support.reads import pretend_that_reads_are_slow, reads

from hf_specdecpp.generation.text import Text

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
TREES: list[dict[str, Any]] = [{"tree": "dyspec", "tree_budget": 16, "tree_depth": 4}, {"tree": [3, 2, 1]}]
# Without temperature and top-k, with processors that see no prefix, and with one that does.
PROCESSING: list[dict[str, Any]] = [{"top_k": 0}, {"temperature": 0.7, "top_k": 20}, {"repetition_penalty": 1.2}]


def reads_of_rounds(monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], **options: Any) -> set[int]:
    """The numbers of reads by which the rounds of a generation choose what to emit."""
    found, verify = set(), Text.verify

    def counted(text: Text, *args: Any) -> Any:
        with reads() as counter:
            result = verify(text, *args)
        found.add(counter.count)
        return result

    monkeypatch.setattr(Text, "verify", counted)
    target = tiny("llama")
    assistant = assistant_for(target, mix=0.9, **speculation)
    torch.manual_seed(0)
    target.generate(prompt(12), assistant_model=assistant, max_new_tokens=30, pad_token_id=0, **options)
    assert assistant.stats.accepted > 0
    assert assistant.stats.accepted < assistant.stats.drafted
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize("speculation", [CHAIN, *TREES])
def test_a_sampled_round_is_verified_with_one_read(
    speculation: dict[str, Any], processing: dict[str, Any], verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_that_reads_are_slow(monkeypatch)
    settings = {**speculation, "verification": verification}
    assert reads_of_rounds(monkeypatch, settings, do_sample=True, **processing) == {1}


@pytest.mark.parametrize("speculation", [CHAIN, *TREES])
def test_a_greedy_round_is_verified_with_one_read(speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_that_reads_are_slow(monkeypatch)
    assert reads_of_rounds(monkeypatch, speculation, do_sample=False) == {1}


def test_the_counter_counts() -> None:
    """The readable versions read at every test, so a wrong counter would be seen."""
    numbers = torch.arange(3.0)
    with reads() as counter:
        assert bool(numbers[0] < 1.0)
        assert (int(numbers[1]) + float(numbers[2]), numbers.tolist()) == (3.0, numbers.numpy().tolist())
    assert counter.count == 5


@pytest.mark.parametrize("speculation", [CHAIN, *TREES])
def test_on_a_cpu_rounds_read_where_they_need_to(speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(reads_of_rounds(monkeypatch, speculation, do_sample=True, top_k=0)) > 1


@pytest.mark.parametrize("speculation", [CHAIN, *TREES])
def test_rounds_on_a_device_are_right(speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed gives the same text again; greedy text is that of plain generation."""
    pretend_that_reads_are_slow(monkeypatch)
    target = tiny("llama")
    assistant, texts = assistant_for(target, mix=0.9, **speculation), []
    for _ in range(2):
        torch.manual_seed(3)
        assistant.memory.clear()
        texts.append(target.generate(prompt(12), assistant_model=assistant, max_new_tokens=30, do_sample=True))
    assert torch.equal(*texts)
    greedy = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(prompt(12), **greedy)
    assert torch.equal(target.generate(prompt(12), assistant_model=assistant, **greedy), plain)
