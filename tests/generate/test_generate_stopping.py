"""Where a text ends: criteria, stop strings, end-of-sequence ids, lengths. Also streamers, which see it end."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE, Rounds, assistant_for, prompt, tiny
from support.watchers import Collector, Recorder, tokenizer
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(10)
LENGTH = PROMPT.shape[1]


@lru_cache
def target() -> CausalLM:
    return tiny("llama", seed=3, num_hidden_layers=2)


@lru_cache
def greedy() -> list[int]:
    """60 tokens of the greedy continuation."""
    return generate(max_new_tokens=60)[0, LENGTH:].tolist()


@lru_cache
def blocks() -> list[list[int]]:
    """The same tokens as an attached assistant emits them: the prompt's own, then a block a round."""
    collector, assistant = Collector(), assistant_for(target())
    generate(assistant_model=assistant, max_new_tokens=60, streamer=collector)
    assistant.detach()
    assert sum(collector.puts[1:], []) == greedy()
    return collector.puts[1:]


def generate(**arguments: Any) -> Tensor:
    return target().generate(PROMPT, **{"do_sample": False, **arguments})


@pytest.fixture(params=[True, False], ids=["attached", "unattached"])
def assistant(request: pytest.FixtureRequest) -> Any:
    assistant = assistant_for(target(), attached=request.param)
    yield assistant
    assistant.detach()


@pytest.fixture
def attached() -> Any:
    assistant = assistant_for(target())
    yield assistant
    assistant.detach()


# Criteria -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [False, True])
def test_criteria_are_asked_token_by_token(attached: Any, scores: bool) -> None:
    arguments = {"max_new_tokens": 30, "return_dict_in_generate": scores, "output_scores": scores}
    plain, ours = Recorder(), Recorder()
    generate(stopping_criteria=StoppingCriteriaList([plain]), **arguments)
    generate(stopping_criteria=StoppingCriteriaList([ours]), assistant_model=attached, **arguments)
    assert (len(ours.asked), ours.asked) == (30, plain.asked)
    assert ours.scores == plain.scores


@pytest.mark.every(3)
@pytest.mark.parametrize("index", range(1, 12))
def test_a_criterion_stops_anywhere_in_a_block(attached: Any, index: int) -> None:
    """A user's, and transformers' own that a user passes."""
    token = greedy()[index]
    for criterion in (Recorder(token), EosTokenCriteria(token), MaxLengthCriteria(LENGTH + index + 1)):
        criteria = StoppingCriteriaList([criterion])
        plain = generate(stopping_criteria=criteria, max_new_tokens=60, pad_token_id=0)
        ours = generate(stopping_criteria=criteria, assistant_model=attached, max_new_tokens=60, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert plain.shape[1] <= LENGTH + index + 1


def test_max_time(assistant: Any) -> None:
    text = generate(assistant_model=assistant, max_new_tokens=1000, max_time=0.05)
    assert LENGTH < text.shape[1] < LENGTH + 1000
    assert text[0, LENGTH:].tolist()[:60] == greedy()[: text.shape[1] - LENGTH]
    if assistant.stats.complete:  # transformers' loop finishes the round
        assert generate(assistant_model=assistant, max_new_tokens=1000, max_time=0.0).shape[1] == LENGTH + 1


@pytest.mark.parametrize("index", range(8))
def test_stop_strings(attached: Any, index: int) -> None:
    """Also where the string is complete in the middle of a block, and where it spans two blocks."""
    arguments = {
        "stop_strings": [tokenizer().decode(greedy()[index : index + 2])],
        "tokenizer": tokenizer(),
        "max_new_tokens": 60,
        "pad_token_id": 0,
    }
    plain = generate(**arguments)
    assert plain.shape[1] < LENGTH + 60
    assert torch.equal(generate(assistant_model=attached, **arguments), plain)


def test_a_block_is_long_enough_for_these_tests() -> None:
    assert max(len(block) for block in blocks()[:6]) >= 3


def test_criteria_are_refused_without_attaching() -> None:
    assistant = assistant_for(target(), attached=False)
    with pytest.raises(ValueError, match="Recorder: transformers asks stopping criteria once a round.*Attach"):
        generate(assistant_model=assistant, stopping_criteria=StoppingCriteriaList([Recorder()]), max_new_tokens=5)
    with pytest.raises(ValueError, match="StopStringCriteria: .*Attach"):
        generate(assistant_model=assistant, stop_strings=["x"], tokenizer=tokenizer(), max_new_tokens=5)
    # These two are heeded within a round, but with transformers' own numbers only.
    for criterion in (MaxLengthCriteria(LENGTH + 3), EosTokenCriteria(greedy()[2])):
        with pytest.raises(ValueError, match=f"{type(criterion).__name__}: .*Attach"):
            generate(assistant_model=assistant, stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=9)


# End of sequence and lengths ------------------------------------------------------------------------------------------


def eos_case(kind: str) -> int:
    """Index of a token in the greedy text whose first occurrence is at that place of a block."""
    text, index = greedy(), 0
    for block in blocks():
        for place in range(len(block)):
            first = text[index] not in text[:index]
            kinds = {
                "first": index == 0,
                "candidate": index > 0 and place < len(block) - 1,
                "bonus": len(block) == 5 and place == 4,
                "correction": index > 0 and 1 < len(block) < 5 and place == len(block) - 1,
            }
            if first and kinds[kind]:
                return index
            index += 1
    raise AssertionError(f"no token of the text is a {kind}: take another model")


@pytest.mark.parametrize("kind", ["first", "candidate", "bonus", "correction"])
def test_eos(assistant: Any, kind: str) -> None:
    index, unseen = eos_case(kind), sorted(set(range(VOCAB_SIZE)) - set(greedy()))[:2]
    for eos in (greedy()[index], [*unseen, greedy()[index]]):
        text = generate(assistant_model=assistant, max_new_tokens=60, eos_token_id=eos, pad_token_id=0)
        assert text[0, LENGTH:].tolist() == greedy()[: index + 1]


def test_several_eos_ids_in_one_block(assistant: Any) -> None:
    """The first one ends the text, in the order of the text and not of the ids."""
    index = eos_case("candidate")
    for ids in (greedy()[index : index + 2], greedy()[index : index + 2][::-1]):
        text = generate(assistant_model=assistant, max_new_tokens=60, eos_token_id=ids, pad_token_id=0)
        assert text[0, LENGTH:].tolist() == greedy()[: index + 1]


def test_ids_of_another_type(assistant: Any) -> None:
    plain = target().generate(PROMPT.int(), max_new_tokens=10, do_sample=False)
    text = target().generate(PROMPT.int(), assistant_model=assistant, max_new_tokens=10, do_sample=False)
    assert text.dtype == plain.dtype
    assert torch.equal(text, plain)


def test_a_prompt_of_one_token(assistant: Any) -> None:
    ids = PROMPT[:, :1]
    plain = target().generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(target().generate(ids, assistant_model=assistant, max_new_tokens=30, do_sample=False), plain)


@pytest.mark.every(3)
@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "unattached"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_up_to_the_end_of_the_position_table(family: str, is_attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {"n_positions" if family == "gpt2" else "max_position_embeddings": 40}
    model = tiny(family, **table)
    longest = 41 if is_attached else 40  # the last token is read by nobody
    plain = model.generate(PROMPT, max_length=longest, do_sample=False)
    assert plain.shape[1] == longest
    rounds, assistant = Rounds(monkeypatch), assistant_for(model, is_attached)
    assert torch.equal(model.generate(PROMPT, assistant_model=assistant, max_length=longest, do_sample=False), plain)
    assert rounds.outcomes


@pytest.mark.every(3)
@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "unattached"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_draft_with_a_shorter_position_table(family: str, is_attached: bool) -> None:
    """The draft falls silent at the end of its own table; the target goes on alone."""
    from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

    table = "n_positions" if family == "gpt2" else "max_position_embeddings"
    lengths: list[dict[str, Any]] = [{table: 64}, {table: 24}]
    model, draft = tiny(family, **lengths[0]), tiny(family, seed=1, **lengths[1])
    plain = model.generate(PROMPT, max_length=64, do_sample=False)
    assistant = SpecDecPPAssistant.from_draft(
        draft, model if is_attached else None, speculation=SpeculationConfig("fixed", num_tokens=4)
    )
    assert torch.equal(model.generate(PROMPT, assistant_model=assistant, max_length=64, do_sample=False), plain)
    long_prompt = prompt(30)
    plain = model.generate(long_prompt, max_length=64, do_sample=False)
    assert torch.equal(model.generate(long_prompt, assistant_model=assistant, max_length=64, do_sample=False), plain)
    assert assistant.stats.drafted == 0


# Streamers ------------------------------------------------------------------------------------------------------------


def test_a_streamer_gets_the_tokens_once_and_in_order(assistant: Any) -> None:
    collector = Collector()
    text = generate(assistant_model=assistant, max_new_tokens=40, streamer=collector)
    assert (collector.puts[0], sum(collector.puts, [])) == (PROMPT[0].tolist(), text[0].tolist())
    assert collector.ends == 1
    assert all(0 < len(block) <= 5 for block in collector.puts[1:])


def test_a_streamer_sees_nothing_after_the_stop(attached: Any) -> None:
    collector, token = Collector(), greedy()[eos_case("candidate")]
    criteria = StoppingCriteriaList([Recorder(token)])
    text = generate(assistant_model=attached, max_new_tokens=40, streamer=collector, stopping_criteria=criteria)
    assert (sum(collector.puts, []), collector.puts[-1][-1]) == (text[0].tolist(), token)
