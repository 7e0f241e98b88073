"""`specdecpp chat`, driven through its standard input. Answers read only the text that is new, and are those of plain
generation after the whole conversation."""

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.enumeration.mutants import accept_everything
from support.files.repos import chat_tokenizer, save_chat_model, tokenizer
from support.targets.models import quiet_later_layers, tiny
from support.targets.zoo import tiny_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.cli import app
from hf_specdecpp.cli_options import ChatConfig
from hf_specdecpp.terminal import chat as chats
from hf_specdecpp.terminal.chat import Chat, _Shown
from hf_specdecpp.terminal.listener import without_controls

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


@pytest.mark.parametrize("kind", ["lookups", "assistant"])
def test_a_conversation(kind: str, target: str, assistant: str) -> None:
    given = ("--assistant", assistant) if kind == "assistant" else ()
    result = chat(target, "w1 w2 w3", "", "w4 w5", options=given)
    assert answers_of(result) == plain(target, "w1 w2 w3", "w4 w5")
    output = result.stdout
    drafts = assistant if given else "lookups in earlier text"
    assert re.match(rf"target     {target} \(float32 on cpu, \d+ threads?\)\nassistant  {drafts}\n", output)
    assert "Type a message, or /help." in output
    assert re.search(r"12 tokens in \d+\.\d s, \d+\.\d tokens/s, \d\.\d\d tokens per target pass$", output, re.M)
    *_, measure = output.splitlines()
    how = f"--assistant {assistant}" if kind == "assistant" else "--lookup"
    assert measure == f"Measure more: specdecpp bench --target {target} {how} --quick"


def test_a_wrong_verification_would_be_seen(target: str, assistant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    assert answers_of(chat(target, "w1 w2 w3", options=("--assistant", assistant))) != plain(target, "w1 w2 w3")


def test_commands(target: str, assistant: str) -> None:
    lines = ("/stats", "w1 w2 w3", "/stats", "/nonsense now", "/help", "/reset", "/stats", "w1 w2 w3", "/quit", "w9")
    output = chat(target, *lines, options=("--assistant", assistant)).stdout
    before, first, stats, unknown, helped, reset, after, again = output.split("\n> ")[1:9]
    said = plain(target, "w1 w2 w3")[0]
    assert "There is no answer yet: type a message first." in before
    assert f"\n{said}\n" in first
    assert "tokens generated      12 in" in stats
    assert re.search(r"^verdict +\S", stats, flags=re.MULTILINE)
    assert "There is no command /nonsense. /help shows the commands." in unknown
    assert all(name in helped for name in ("/reset", "/stats", "/quit", "Ctrl-C"))
    assert "A new conversation." in reset
    assert "tokens generated      12 in" in after  # answers before a /reset count, too
    assert f"\n{said}\n" in again
    assert "w9" not in output


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests are a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_an_answer_and_not_the_program(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes on with the text that was shown."""
    pieces, print_piece = list[str](), _Shown.on_finalized_text

    def interrupted(self: _Shown, text: str, stream_end: bool = False) -> None:
        print_piece(self, text, stream_end)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_Shown, "on_finalized_text", interrupted)
    messages, encode = list[Any](), chats.encoded

    def encoding(words: Any, talk: Any) -> Any:
        messages.append(talk)
        return encode(words, talk)

    monkeypatch.setattr(chats, "encoded", encoding)
    output = chat(target, "w1 w2 w3", "w4").stdout
    assert output.count("\nStopped.\n") == 1
    first, second = re.findall(r"^> .+\n(.*)\n(?:Stopped|\d+ tokens? in )", output, flags=re.MULTILINE)
    assert plain(target, "w1 w2 w3")[0].startswith(first.strip())
    assert 0 < len(first) < len(plain(target, "w1 w2 w3")[0])
    assert messages[1][1] == {"role": "assistant", "content": first}
    assert second


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
    assert "Error: The model's chat template refuses this conversation with the roles user: no luck." in result.stdout
    said = r"Error: The conversation is \d+ tokens long, and the model reads 1024\. /reset begins"
    assert re.search(said, result.stdout)
    assert answers_of(result) == plain(folder, "w1 w2") * 2


def test_it_says_where_no_assistant_helps(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.use_cache = False
    model.save_pretrained(folder)
    result = chat(folder, "w1 w2 w3")
    assert re.search(r"tokens/s, plain generate\(\): use_cache=False", result.stdout)
    assert "\nThe call was a plain one, without its assistant" in result.stdout
    assert answers_of(result) == plain(folder, "w1 w2 w3")


def test_a_model_without_a_chat_template(target: str) -> None:
    tokenizer().save_pretrained(target)
    (Path(target) / "chat_template.jinja").unlink()
    result = chat(target, "w1 w2", "w3")
    assert "This model has no chat template: it continues the messages." in result.stdout
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
RECURRENT = ("granitemoehybrid", "falcon_h1", "mamba2")  # layers of either kind, of both at once, of states alone
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in RECURRENT[1:]]
FORGETS = (  # the first three words of each answer, its thoughts
    "{% for message in messages %}{% set words = message['content'].split() %}"
    "{{ (words[3:] if message['role'] == 'assistant' else words) | join(' ') }} {% endfor %}"
)


def model_of(family: str) -> Any:
    ends: dict[str, Any] = {"eos_token_id": 47, "pad_token_id": 47}
    model = tiny_of(family, **ends).double() if family in RECURRENT else quiet_later_layers(tiny(family, **ends))
    model.generation_config.suppress_tokens = [0]  # which a tokenizer leaves out of the text
    return model


class Talk(Chat):
    """A conversation without a terminal. `read`: how many tokens the cache held when each answer began."""

    def __init__(self, model: Any, template: str | None = None, temperature: float | None = 0.0) -> None:
        words, self.read, self.answers = chat_tokenizer(), list[int](), list[list[int]]()
        words.chat_template = template or words.chat_template
        if model.config.model_type in RECURRENT:
            assistant = assist(model, "lookup", speculation=FIXED, default=True)
        else:
            assistant = SpecDecPPAssistant.from_early_exit(model, 2, speculation=FIXED, default=True)
        config = ChatConfig("", max_new_tokens=14, temperature=temperature)
        super().__init__(model, words, assistant, config, Console(file=io.StringIO()))
        generate = model.generate

        def noted(ids: torch.Tensor, **how: Any) -> Any:
            self.read.append(len(self.held) if how.get(chats.CACHE) is not None else 0)
            output = generate(ids, **how)
            self.answers.append(output.sequences[0, ids.shape[1] :].tolist())
            return output

        model.generate = noted

    def answer(self, message: str) -> None:
        self.held = self._cached_ids
        super().answer(message)

    def plainly(self, message: str) -> list[int]:
        """The answer of plain generation to a message, after reading the whole conversation."""
        ids = torch.tensor([chats.encoded(self.tokenizer, [*self.messages, {"role": "user", "content": message}])])
        with self.assistant.paused():
            output = type(self.model).generate(
                self.model, ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14
            )
        return output[0, ids.shape[1] :].tolist()

    def ask_all(self) -> list[int]:
        """How many tokens each answer took over, while each is that of plain generation."""
        for message in MESSAGES:
            expected = self.plainly(message)
            self.answer(message)
            assert self.answers[-1] == expected
            assert self.messages[-1]["content"] == self.tokenizer.decode(expected, skip_special_tokens=True)
        return self.read


@pytest.mark.parametrize("family", ["llama", "mistral", "granitemoehybrid", *SLOW])
def test_the_cache_is_carried_on(family: str) -> None:
    """It holds the whole text but the last token of each answer, also where windows or states have dropped most of it.
    Mamba2's does not tell how many tokens it has read, so the conversation is read again."""
    talk = Talk(model_of(family))
    read = talk.ask_all()
    if family == "mamba2":
        assert read == [0] * 4
        return
    lengths = [len(talk.tokenizer(message["content"]).input_ids) for message in talk.messages]
    ended = [answer[-1] == 47 for answer in talk.answers]
    carried = [0, *(sum(lengths[: 2 * n]) - (not ended[n - 1]) for n in (1, 2, 3))]
    assert all(after - before in (0, 1) for before, after in zip(read, carried, strict=True))
    assert read == carried or family in RECURRENT  # whose states may stand a token before the end of the text
    assert talk.stats is not None
    assert talk.stats.refusal is None
    assert talk.stats.accepted > 0 or family in RECURRENT


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_a_template_that_drops_earlier_thoughts(family: str) -> None:
    """The text before the new message is another one, so all of it is read again."""
    assert Talk(model_of(family), FORGETS).ask_all() == [0] * 4


def test_a_cache_of_another_text_would_be_seen() -> None:
    """The mutant takes the cache of the text before it was changed for one of the text now."""
    talk = Talk(model_of("llama"), FORGETS)
    talk.answer(MESSAGES[0])
    expected = talk.plainly(MESSAGES[1])
    ids = chats.encoded(talk.tokenizer, [*talk.messages, {"role": "user", "content": MESSAGES[1]}])
    assert talk._cache is not None
    talk._cached_ids = ids[: chats.num_rows(talk._cache)]
    talk.answer(MESSAGES[1])
    assert talk.read[1] > 0
    assert talk.answers[1] != expected


def test_reset() -> None:
    talk = Talk(model_of("llama"))
    talk.answer(MESSAGES[0])
    talk.answer(MESSAGES[1])
    talk.reset()
    talk.answer(MESSAGES[0])
    assert talk.answers[2] == talk.answers[0]
    assert talk.read[2] == 0


def test_temperature_and_the_models_own_config() -> None:
    model = model_of("llama")
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
    own, greedy, hot = (Talk(model, temperature=given) for given in (None, 0.0, 1.5))
    assert (own.how.do_sample, own.how.temperature) == (True, 0.7)
    assert greedy.how.do_sample is False
    assert (hot.how.do_sample, hot.how.temperature) == (True, 1.5)


def test_a_cache_of_the_models_own_choice_is_not_carried() -> None:
    model = model_of("llama")
    model.generation_config.cache_implementation = "static"
    talk = Talk(model)
    talk.answer(MESSAGES[0])
    talk.answer(MESSAGES[1])
    assert talk.read == [0, 0]
    assert talk.stats is not None
    assert talk.stats.refusal is None
