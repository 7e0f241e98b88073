"""A conversation reads only what is new, and says what plain generation says after the whole of it."""

from typing import Any

import pytest
import torch
from support.models import quiet_later_layers, tiny
from support.repos import chat_tokenizer
from support.zoo import tiny_of

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.terminal import conversation as conversations
from hf_specdecpp.terminal.conversation import Conversation, Stop

MESSAGES = ["w1 w2 w3", "w4 w5 w6 w7", "w8", "w9 w1 w2"]
FIXED = SpeculationConfig("fixed", num_tokens=3)
RECURRENT = ("granitemoehybrid", "falcon_h1", "mamba2")  # layers of either kind, of both at once, of states alone
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in RECURRENT[1:]]
FORGETS = (  # the first three words of each answer, its thoughts, say
    "{% for message in messages %}{% set words = message['content'].split() %}"
    "{{ (words[3:] if message['role'] == 'assistant' else words) | join(' ') }} {% endfor %}"
)


def model_of(family: str) -> Any:
    ends: dict[str, Any] = {"eos_token_id": 47, "pad_token_id": 47}
    model = tiny_of(family, **ends).double() if family in RECURRENT else quiet_later_layers(tiny(family, **ends))
    model.generation_config.suppress_tokens = [0]  # which a tokenizer leaves out of the text
    return model


def conversation(model: Any, tree: bool = False, template: str | None = None, **how: Any) -> Conversation:
    words = chat_tokenizer()
    words.chat_template = template or words.chat_template
    if model.config.model_type in RECURRENT:
        assistant = assist(model, "lookup", speculation=FIXED, default=True)
    else:
        own = SpeculationConfig("fixed", tree="dyspec", tree_budget=6) if tree else FIXED
        assistant = SpecDecPPAssistant.from_early_exit(model, 2, speculation=own, default=True)
    return Conversation(model, words, assistant, **{"max_new_tokens": 14, "temperature": 0.0, **how})


def said(talk: Conversation, message: str, stop: Stop | None = None) -> tuple[list[int], str]:
    """An answer's tokens, and what of it was shown."""
    shown: list[str] = []
    return talk.answer(message, stop or Stop(), shown.append).tokens, "".join(shown)


def plainly(talk: Conversation, message: str) -> list[int]:
    """What plain generation says to a message, after reading all of the conversation."""
    messages = [*talk.messages, {"role": "user", "content": message}]
    how: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs: Any = talk.tokenizer.apply_chat_template(messages, **how)
    with talk.assistant.paused():
        output = talk.model.generate(**inputs, do_sample=False, max_new_tokens=14)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def carried_of(talk: Conversation) -> list[int]:
    """How many tokens each answer took over, while each is what plain generation says."""
    for message in MESSAGES:
        expected = plainly(talk, message)
        tokens, shown = said(talk, message)
        assert tokens == expected
        assert shown == talk.tokenizer.decode(tokens, skip_special_tokens=True) == talk.messages[-1]["content"]
    return [answer.carried for answer in talk.answers]


@pytest.mark.every(3)
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_cache_is_carried_on(family: str, tree: bool) -> None:
    """All of the text but the last token of each answer; mistral's windows have dropped most of it."""
    talk = conversation(model_of(family), tree)
    carried = carried_of(talk)
    lengths = [len(talk.tokenizer(message["content"]).input_ids) for message in talk.messages]
    ended = [answer.tokens[-1] == 47 for answer in talk.answers]
    assert carried == [0, *(sum(lengths[: 2 * n]) - (not ended[n - 1]) for n in (1, 2, 3))]
    assert sum(answer.stats.accepted for answer in talk.answers) > 0
    assert all(answer.stats.refusal is None for answer in talk.answers)


@pytest.mark.parametrize("family", ["granitemoehybrid", *SLOW])
def test_states_that_cannot_drop_tokens_are_carried_on(family: str) -> None:
    """Where the cache knows how many tokens it has read: Mamba2's does not."""
    carried = carried_of(conversation(model_of(family)))
    if family == "mamba2":
        assert set(carried) == {0}
    else:
        assert carried[0] == 0 < carried[1] < carried[2] < carried[3]


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "granitemoehybrid", SLOW[0]])
def test_a_template_that_drops_earlier_thoughts(family: str) -> None:
    """The text is another one from there on: what a cache cannot drop is read anew."""
    talk = conversation(model_of(family), template=FORGETS)
    carried, first = carried_of(talk), len(talk.tokenizer(MESSAGES[0]).input_ids)
    assert carried[1] == (first if family == "llama" else 0)


def test_rows_that_stay_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes nothing back, though the text is another one."""
    monkeypatch.setattr(conversations, "roll_back", lambda cache, kept: None)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        carried_of(conversation(model_of("llama"), template=FORGETS))


def test_an_answer_that_is_stopped_stays_as_far_as_it_was_said() -> None:
    talk, stop = conversation(model_of("llama"), max_new_tokens=40), Stop()
    whole = plainly(talk, MESSAGES[0])
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 3:
            stop.ask()

    tokens = talk.answer(MESSAGES[0], stop, show).tokens
    assert stop.is_asked
    assert tokens == whole[: len(tokens)]
    assert 3 <= len(tokens) < len(whole)
    assert talk.messages[-1]["content"] == talk.tokenizer.decode(tokens, skip_special_tokens=True)
    expected = plainly(talk, MESSAGES[1])
    assert said(talk, MESSAGES[1])[0][:14] == expected
    assert talk.answers[-1].carried > 0


def test_an_exception_leaves_the_conversation_as_it_was() -> None:
    talk = conversation(model_of("llama"))
    said(talk, MESSAGES[0])
    before = list(talk.messages)

    def fail(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.answer(MESSAGES[1], Stop(), fail)
    assert talk.messages == before
    expected = plainly(talk, MESSAGES[1])
    assert said(talk, MESSAGES[1])[0] == expected
    assert talk.answers[-1].carried == 0  # the cache may have been anywhere


def test_reset_and_system() -> None:
    talk = conversation(model_of("llama"), system="w40 w41")
    first = said(talk, MESSAGES[0])
    said(talk, MESSAGES[1])
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "w40 w41"}]
    assert said(talk, MESSAGES[0]) == first
    assert talk.answers[-1].carried == 0


def test_a_conversation_that_is_too_long() -> None:
    talk = conversation(tiny("gpt2", n_positions=20, eos_token_id=47))
    assert len(said(talk, MESSAGES[0])[0]) in range(1, 15)
    with pytest.raises(ValueError, match="tokens long, and the model reads 20. /reset begins a new one"):
        talk.answer("w1 " * 30, Stop(), print)
    assert len(talk.messages) == 2
    talk.reset()
    talk.max_new_tokens = 40
    assert len(said(talk, MESSAGES[0])[0]) <= 17


def test_temperature_and_the_models_own_config() -> None:
    model = model_of("llama")
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
    own, greedy, hot = (conversation(model, temperature=given).config for given in (None, 0.0, 1.5))
    assert (own.do_sample, own.temperature) == (True, 0.7)
    assert greedy.do_sample is False
    assert (hot.do_sample, hot.temperature) == (True, 1.5)
    talk = conversation(model, temperature=1.5)
    torch.manual_seed(0)
    said(talk, "w1")
    assert talk.assistant.stats.generated > 0


def test_a_cache_of_the_models_own_choice_is_not_carried() -> None:
    model = model_of("llama")
    model.generation_config.cache_implementation = "static"
    talk = conversation(model)
    said(talk, MESSAGES[0])
    said(talk, MESSAGES[1])
    assert [answer.carried for answer in talk.answers] == [0, 0]
    assert all(answer.stats.refusal is None for answer in talk.answers)
