"""Who said each token: compared with the rounds themselves, also where a text ends inside one; and its picture, which
is well-formed, all there, written at the times that it is given, and safe with any text."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.files.repos import PROMPT, letter_tokenizer, tokenizer
from support.targets.families import informed_draft
from support.targets.models import tiny
from support.targets.watchers import Collector, heard
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig, assist
from hf_specdecpp.terminal.listener import GUESSED, PAUSE, Answer, Listener, Token, picture

MOST = 24
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each round accepted, as the generator itself is told."""
    counts: list[int] = []

    heard(
        monkeypatch,
        SpecDecPPCandidateGenerator,
        "record_outcome",
        lambda _, tree, path, *rest: counts.append(len(path)),
    )
    return counts


def by_rounds(accepted: Sequence[int], length: int) -> list[bool]:
    """Of each token, whether it was a candidate: the prompt's pass gives the first one."""
    flags = [False]
    for count in accepted:
        flags += [True] * count + [False]
    return flags[:length]


def generate(
    target: Any, assistant: Any = None, words: Any = None, **options: Any
) -> tuple[torch.Tensor, Listener, list[Token]]:
    listener, words = Listener(), words or tokenizer()
    options = {"max_new_tokens": MOST, "do_sample": False, **options}
    output = target.generate(PROMPT, assistant_model=assistant, streamer=listener, **options)
    stats = None if assistant is None else assistant.stats
    return output[0, PROMPT.shape[1] :], listener, listener.tokens(words, stats)


def informed(target: Any, speculation: SpeculationConfig) -> SpecDecPPAssistant:
    plain = target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)
    return SpecDecPPAssistant.from_draft(informed_draft(plain, 48), target, speculation=speculation)


@pytest.mark.daily("greedy-chain", "sampled-tree")
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_candidates_are_those_of_the_rounds(speculation: SpeculationConfig, sample: bool, accepted: list[int]) -> None:
    target = tiny("llama")
    torch.manual_seed(0)
    tokens, _, said = generate(target, informed(target, speculation), do_sample=sample)
    assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
    assert 0 < sum(each.accepted for each in said) < len(said)
    assert "".join(each.text for each in said) == tokenizer().decode(tokens, skip_special_tokens=True)


def test_candidates_that_were_looked_up(accepted: list[int]) -> None:
    target = tiny("llama")
    tokens, _, said = generate(target, assist(target, "lookup", default=False, rule="fixed"), max_new_tokens=80)
    assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
    assert any(each.accepted for each in said)


@pytest.mark.daily("tree")
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_text_may_end_with_a_candidate(speculation: SpeculationConfig, accepted: list[int]) -> None:
    """At some of these ends the last token is a candidate, at others the target's own. The mutant, which does not ask
    the counts, takes it for the target's at all of them."""
    target = tiny("llama")
    plain = target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    last, mutants = [], 0
    for end in sorted({plain.index(token) for token in plain}):
        assistant = informed(target, speculation)
        accepted.clear()
        tokens, listener, said = generate(target, assistant, eos_token_id=plain[end], pad_token_id=0)
        assert tokens.tolist() == plain[: end + 1]
        assert [each.accepted for each in said] == by_rounds(accepted, end + 1)
        last.append(said[-1].accepted)
        mutants += listener.tokens(tokenizer()) != said
        assistant.detach()
    assert set(last) == {False, True}
    assert mutants == sum(last) > 0


def test_a_stop_string_inside_a_round(accepted: list[int]) -> None:
    target, words = tiny("llama"), letter_tokenizer()
    plain = words.decode(target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)[0, PROMPT.shape[1] :])
    found = []
    for end in range(3, 16):
        accepted.clear()
        stop = {"stop_strings": [plain[end - 1 : end + 1]], "tokenizer": words}
        tokens, _, said = generate(target, informed(target, CHAIN), words, **stop)
        assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
        found.append(said[-1].accepted)
    assert set(found) == {False, True}


def test_seconds_are_those_of_the_passes() -> None:
    target = tiny("llama")
    _, listener, said = generate(target, informed(target, CHAIN))
    seconds = [each.seconds for each in said]
    assert seconds == sorted(seconds)
    assert min(seconds) > 0
    assert sorted(set(seconds)) == [at for at, _ in listener.passes]


def test_it_passes_everything_on() -> None:
    kept = Collector()
    listener = Listener(kept)
    tiny("llama").generate(PROMPT, max_new_tokens=5, do_sample=False, streamer=listener)
    assert kept.puts[1:] == [tokens for _, tokens in listener.passes]
    assert (len(listener.passes), kept.ends) == (5, 1)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte a token, so that most characters take several."""
    inner = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["é日本 a🙂b", "plain", "  two\n\nlines\t", "no \ufffd at all"])
def test_characters_of_several_tokens(text: str) -> None:
    words, listener = byte_tokenizer(), Listener()
    listener.passes = [(float(place), [token]) for place, token in enumerate(words.encode(text))]
    said = listener.tokens(words)
    assert (len(said), "".join(each.text for each in said)) == (len(text.encode()), text)
    assert "\ufffd" in text or all(len(each.text) < 2 for each in said)
    half = Listener()
    half.passes = listener.passes[:1]  # of a text that is being written
    assert len(half.tokens(words)) == 1


SVG = "{http://www.w3.org/2000/svg}"
TEXT = ["The", " sky", " is", " blue", ".\n", "\n", "It ", "scatters", " light"]


def said(texts: Sequence[str], accepted: Sequence[int] = (), step: float = 0.5) -> list[Token]:
    """Two tokens a pass where the first of them is accepted."""
    seconds, found = 0.0, []
    for place, text in enumerate(texts):
        seconds += step if place - 1 not in accepted else 0.0
        found.append(Token(text, place in accepted, seconds))
    return found


def drawn(texts: Sequence[str], accepted: Sequence[int] = (), question: str = "Why?") -> ET.Element:
    plain, assisted = (Answer(each, each[-1].seconds) for each in (said(texts), said(texts, accepted)))
    return ET.fromstring(picture(question, plain, assisted, ["where"]))  # noqa: S314 - our own output


def rules(root: ET.Element) -> dict[str, str]:
    """The colour of each class."""
    style = "".join(each.text or "" for each in root.iter(f"{SVG}style"))
    return dict(re.findall(r"\.(answer-r\d+) { fill: (#\w+)", style))


def starts(root: ET.Element) -> dict[str, float]:
    """Seconds at which the text of each class is shown, read off the animation, which goes round in `loop` seconds."""
    style = "".join(each.text or "" for each in root.iter(f"{SVG}style"))
    [loop] = {float(each) for each in re.findall(r"animation:\S+ ([\d.]+)s", style)}
    shares = re.findall(r"@keyframes (answer-r\d+){0%{opacity:0}([\d.]+)%{opacity:1}}", style)
    return {name: float(share) / 100 * loop for name, share in shares}


def panes(root: ET.Element) -> tuple[str, str]:
    """What is animated, in the left and the right half, line by line."""
    middle = max(float(root.get("viewBox", "").split()[2]) / 2, 600.0)
    moving = [each for each in root.iter(f"{SVG}text") if each.get("class") in starts(root)]
    left = [each for each in moving if float(each.get("x", 0)) < middle - 20]
    return tuple(  # type: ignore[return-value]
        "".join((each.text or "").replace("\u00a0", " ") for each in half)
        for half in (left, [each for each in moving if each not in left])
    )


def test_both_answers_are_whole_and_candidates_are_marked() -> None:
    root, expected = drawn(TEXT, accepted=[1, 3, 7]), "".join(TEXT).replace(" ", "").replace("\n", "")
    assert [each.replace(" ", "") for each in panes(root)] == [expected, expected]
    assert len(list(root.iter(f"{SVG}title"))) == 1
    colour = rules(root)
    green = [each.text for each in root.iter(f"{SVG}text") if is_near(colour.get(each.get("class", ""), ""), GUESSED)]
    assert [(each or "").replace("\u00a0", "") for each in green] == ["sky", "blue", "scatters", "Green"]


def is_near(colour: str, base: tuple[int, int, int]) -> bool:
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)] if colour else [0, 0, 0]
    return all(0 <= part - own < 16 for part, own in zip(parts, base, strict=True))


def test_passes_are_shown_at_their_times() -> None:
    root = drawn(TEXT, accepted=[1, 3, 7])
    plain, assisted = said(TEXT), said(TEXT, [1, 3, 7])
    shown = {each.seconds for answer in (plain, assisted) for each in answer if each.text.strip()}
    assert sorted(set(starts(root).values())) == pytest.approx(sorted(shown), abs=0.001)
    assert f" {plain[-1].seconds + PAUSE:.2f}s" in ET.tostring(root, "unicode")
    assert "prefers-reduced-motion:reduce" in ET.tostring(root, "unicode")


@pytest.mark.parametrize("texts", [
    ["word "] * 60,
    ["x" * 30] * 9,
    ["日本語"] * 40,
    [" " * 70, "deep", "\tTab", "\r\n", "e", "\u0301", "🙂", "end"],
    ["\x00\x1b[31m", "<script>alert(1)</script>", "&amp;", "]]>", '"q"', "[bold]"],
    ["", "only"],
], ids=["words", "one long word", "wide", "spaces", "hostile", "empty"])  # fmt: skip
def test_any_text_stays_in_its_pane(texts: list[str]) -> None:
    root = drawn(texts, accepted=range(1, len(texts), 2), question="".join(texts) + "\n" + texts[-1])
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
        "svg", "title", "style", "rect", "g", "text", "defs", "clipPath", "circle"
    }  # fmt: skip
    expected = re.sub(r"\s|[\x00\x1b]", "", "".join(texts))
    assert [re.sub(r"\s", "", each) for each in panes(root)] == [expected, expected]


def test_nothing_comes_from_elsewhere() -> None:
    """Pictures in pages load nothing else, so that whatever they named would be missing."""
    text = ET.tostring(drawn(TEXT), "unicode")
    assert re.findall(r"\b(?:href|src|url\((?!#)|@import)", text) == []
    assert re.findall(r"https?://[^\"\s]+", text) == ["http://www.w3.org/2000/svg"]
