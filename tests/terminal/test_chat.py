"""`specdecpp chat`, driven through its standard input; and its conversation, which reads only what is new and says what
plain generation says after the whole of it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import quiet_later_layers, tiny
from support.mutants import accept_everything
from support.repos import chat_tokenizer, save_chat_model, tokenizer
from support.zoo import tiny_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.cli import app
from hf_specdecpp.terminal import conversation as conversations
from hf_specdecpp.terminal.chat import Chat, without_controls
from hf_specdecpp.terminal.conversation import Conversation, Stop

FIXED = SpeculationConfig("fixed", num_tokens=3)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_chat_model(tmp_path / "target")


@pytest.fixture
def assistant(target: str, tmp_path: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(target)
    SpecDecPPAssistant.from_early_exit(model, 2, speculation=FIXED).save_pretrained(tmp_path / "assistant")
    return str(tmp_path / "assistant")


def chat(target: str, *lines: str, options: tuple[object, ...] = ()) -> Result:
    words = ["chat", "--target", target, "--max-new-tokens", "12", "--temperature", "0", *map(str, options)]
    result = CliRunner().invoke(app, words, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result


def answers_of(result: Result) -> list[str]:
    """The line after each message, and none of what follows it."""
    return re.findall(r"^> (?!/).+\n(.*)\n\d+ tokens? in ", result.stdout, flags=re.MULTILINE)


def plain(target: str, *messages: str) -> list[str]:
    """The answers of plain generation."""
    model, words = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    said: list[str] = []
    talk: list[dict[str, str]] = []
    for message in messages:
        talk.append({"role": "user", "content": message})
        inputs: Any = words.apply_chat_template(talk, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        said.append(str(words.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)))
        talk.append({"role": "assistant", "content": said[-1]})
    return said


@pytest.mark.parametrize("tree", [(), ("--tree",)], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["lookups", "assistant"])
def test_a_conversation(kind: str, tree: tuple[str, ...], target: str, assistant: str) -> None:
    given = ("--assistant", assistant) if kind == "assistant" else ()
    result = chat(target, "w1 w2 w3", "", "w4 w5", options=(*given, *tree))
    assert answers_of(result) == plain(target, "w1 w2 w3", "w4 w5")
    output = result.stdout
    assert output.startswith(f"target     {target} (float32 on cpu)\nassistant  ")
    assert f"assistant  {assistant}\n" in output or kind == "lookups"
    assert "Type a message, or /help." in output
    assert re.search(r"12 tokens in \d+\.\d s, \d+\.\d tokens/s, \d\.\d\d tokens per target pass$", output, re.M)
    assert re.search(r"tokens per target pass, \d+ tokens carried over$", output, re.M)
    *_, verdict, measure = output.splitlines()
    assert verdict.startswith("verdict     ")
    how = f"--assistant {assistant}" if kind == "assistant" else "--lookup"
    assert measure == f"measure it  specdecpp bench --target {target} {how} --quick"


def test_a_wrong_verification_would_be_seen(target: str, assistant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    assert answers_of(chat(target, "w1 w2 w3", options=("--assistant", assistant))) != plain(target, "w1 w2 w3")


def test_commands(target: str, assistant: str) -> None:
    lines = ("/tree", "/stats", "w1 w2 w3", "/tree", "/stats", "/nonsense now", "/help", "/reset", "/tree", "/stats",
             "w1 w2 w3", "/quit", "w9")  # fmt: skip
    output = chat(target, *lines, options=("--assistant", assistant)).stdout
    before, first, drawn, stats, unknown, helped, *_ = output.split("\n> ")[2:]
    said = plain(target, "w1 w2 w3")[0]
    assert "There is no answer yet: type a message first." in before
    assert said in first
    assert drawn.splitlines()[1].startswith("In brackets what each pass of the target gave")
    passes = drawn.splitlines()[2]
    assert passes.strip("[]").replace("][", " ").split() == [word for word in said.split() if word]
    assert max(len(some.split()) for some in passes.split("][")) > 1
    assert "tokens generated" in stats
    assert re.search(r"^verdict +\S", stats, flags=re.MULTILINE)
    assert "There is no command /nonsense. /help shows those that there are." in unknown
    for name in ("/reset", "/tree", "/stats", "/quit", "Ctrl-C"):
        assert name in helped
    assert "A new conversation." in output
    assert output.count("There is no answer yet") == 3  # what was said before a /reset still counts in /stats
    assert output.count(f"\n{said}\n") == 2
    assert "w9" not in output


def test_the_last_tree(target: str, assistant: str) -> None:
    output = chat(target, "w1 w2 w3", "/tree", options=("--assistant", assistant, "--tree")).stdout
    assert re.search(r"^'w\d+'   \(\d+ candidates, depth \d+, width \d", output, flags=re.MULTILINE)
    assert "└─" in output


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests are a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Ctrl-C so many times while the first answer is written."""
    left, stream = [times], Chat._stream

    def interrupted(self: Chat, text: str) -> None:
        stream(self, text)
        while left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Chat, "_stream", interrupted)


def test_ctrl_c_stops_an_answer_and_not_the_program(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, whole = signal.getsignal(signal.SIGINT), plain(target, "w1 w2 w3")[0]
    interrupting(monkeypatch, times=1)
    output = chat(target, "w1 w2 w3", "w4").stdout
    assert re.search(r"tokens per target pass, stopped$", output, flags=re.MULTILINE)
    first, second = re.findall(r"^> .+\n(.*)\n\d+ tokens? in ", output, flags=re.MULTILINE)
    assert whole.startswith(first)
    assert 0 < len(first) < len(whole)
    assert second
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_leaves_the_answer_out(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, times=2)
    result = chat(target, "w1 w2 w3", "/stats", "w4 w5")
    assert "Stopped, and left out of the conversation." in result.stdout
    assert "There is no answer yet" in result.stdout
    assert answers_of(result) == plain(target, "w4 w5")


def test_ctrl_c_between_answers(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([KeyboardInterrupt(), "w1", EOFError()])

    def typed(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", typed)
    output = chat(target).stdout
    assert "To end the chat type /quit, or Ctrl-D." in output
    assert re.search(r"\d+ tokens? in \d", output)


def test_errors_do_not_end_it(tmp_path: Path) -> None:
    folder, words = save_chat_model(tmp_path / "target"), chat_tokenizer()
    words.chat_template = (
        "{% if messages[-1]['content'] == 'w13' %}{{ raise_exception('no luck') }}{% endif %}" + words.chat_template
    )
    words.save_pretrained(folder)
    result = chat(folder, "w13", "w1 w2", "w3 " * 1100, "/reset", "w1 w2")
    assert "Error: The model's chat template refuses this conversation: no luck." in result.stdout
    said = r"Error: The conversation is \d+ tokens long, and the model reads 1024\. /reset begins"
    assert re.search(said, result.stdout)
    assert answers_of(result) == plain(folder, "w1 w2") * 2


def test_it_says_where_no_assistant_helps(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.use_cache = False
    model.save_pretrained(folder)
    result = chat(folder, "w1 w2 w3")
    assert "note       Answers are plain ones, without the assistant: use_cache=False" in result.stdout
    assert "verdict     The call was a plain one, without its assistant" in result.stdout
    assert answers_of(result) == plain(folder, "w1 w2 w3")


def test_a_model_without_a_chat_template(target: str) -> None:
    tokenizer().save_pretrained(target)
    (Path(target) / "chat_template.jinja").unlink()
    result = chat(target, "w1 w2", "w3")
    assert "This model has no chat template: it continues what is typed." in result.stdout
    assert len(answers_of(result)) == 2


def test_a_model_cannot_steer_the_terminal() -> None:
    assert without_controls("a\x1b[2Jb\x07\x9b\tc\r\n[bold]d \U0001f469\u200d\U0001f680") == (
        "a[2Jb\tc\n[bold]d \U0001f469\u200d\U0001f680"
    )


@pytest.mark.slow  # imports torch again
def test_in_a_pipe(target: str) -> None:
    command: Any = [sys.executable, "-m", "hf_specdecpp", "chat", "--target", target, "--max-new-tokens", "5"]
    done = subprocess.run(command, input="w1 w2\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 tokens in" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


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


def test_reset_and_system() -> None:
    talk = conversation(model_of("llama"), system="w40 w41")
    first = said(talk, MESSAGES[0])
    said(talk, MESSAGES[1])
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "w40 w41"}]
    assert said(talk, MESSAGES[0]) == first
    assert talk.answers[-1].carried == 0


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
