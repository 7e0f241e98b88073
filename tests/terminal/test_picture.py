"""The picture of an answer: well-formed, all of it there, written at the times that it is given, safe with any text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support.browser import page

from hf_specdecpp.terminal.listener import Token
from hf_specdecpp.terminal.picture import COLUMNS, MARGIN, PAUSE, WIDTH, Answer, picture

SVG = "{http://www.w3.org/2000/svg}"
TEXT = ["The", " sky", " is", " blue", ".\n", "\n", "It ", "scatters", " light"]


def said(texts: Sequence[str], accepted: Sequence[int] = (), step: float = 0.5) -> list[Token]:
    """Two tokens a pass where the first of them is accepted."""
    seconds, found = 0.0, []
    for place, text in enumerate(texts):
        seconds += step if place - 1 not in accepted else 0.0
        found.append(Token(text, place in accepted, seconds))
    return found


def drawn(
    texts: Sequence[str], accepted: Sequence[int] = (), question: str = "Why?", is_narrow: bool = False
) -> ET.Element:
    plain, assisted = (Answer(each, each[-1].seconds) for each in (said(texts), said(texts, accepted)))
    return ET.fromstring(picture(question, plain, assisted, ["where"], is_narrow))  # noqa: S314 - our own output


def passes(root: ET.Element, letter: str) -> list[ET.Element]:
    """The groups of one of the two answers: p of the plain one, o of ours."""
    return [each for each in root.iter(f"{SVG}g") if re.fullmatch(letter + r"\d+", each.get("class", ""))]


def words(groups: Sequence[ET.Element]) -> str:
    return "".join(each.text or "" for group in groups for each in group.iter(f"{SVG}text"))


def starts(root: ET.Element) -> dict[str, float]:
    """Seconds at which each group is shown, read off the animation, which goes round in `loop` seconds."""
    [style] = [each.text or "" for each in root.iter(f"{SVG}style")]
    loop = {float(each) for each in re.findall(r"animation:\S+ ([\d.]+)s", style)}
    assert len(loop) == 1
    shares = re.findall(r"@keyframes ([po]\d+){0%{opacity:0}([\d.]+)%{opacity:1}}", style)
    return {name: float(share) / 100 * next(iter(loop)) for name, share in shares}


def test_both_answers_are_whole_and_candidates_are_marked() -> None:
    root = drawn(TEXT, accepted=[1, 3, 7])
    expected = "".join(TEXT).replace(" ", "").replace("\n", "")
    assert words(passes(root, "p")).replace(" ", "") == expected
    assert words(passes(root, "o")).replace(" ", "") == expected
    assert [len(list(root.iter(f"{SVG}title"))), root.get("role")] == [1, "img"]
    marked = []
    for group in passes(root, "o"):
        hit = False
        for each in group:
            if hit and each.tag == f"{SVG}text":
                marked.append(each.text)
            hit = each.tag == f"{SVG}rect"
    assert marked == ["sky", "blue", "scatters"]
    assert not [each for group in passes(root, "p") for each in group.iter(f"{SVG}rect")]


def test_passes_are_shown_at_their_times() -> None:
    root = drawn(TEXT, accepted=[1, 3, 7])
    at = starts(root)
    plain, assisted = said(TEXT), said(TEXT, [1, 3, 7])
    for letter, answer in (("p", plain), ("o", assisted)):
        expected = sorted({each.seconds for each in answer})
        found = [at[each.get("class", "")] for each in passes(root, letter)]
        assert found == pytest.approx(expected, abs=0.001)
    assert f"animation:p0 {plain[-1].seconds + PAUSE:.2f}s" in ET.tostring(root, "unicode")


def test_bars_are_as_long_as_the_answers_took() -> None:
    root = drawn(TEXT, accepted=[1, 3, 7])
    [plain, ours] = [float(each.get("width", 0)) for each in root.iter(f"{SVG}rect") if "bar" in each.get("class", "")]
    assert ours / plain == pytest.approx(6 / 9, abs=0.001)


@pytest.mark.parametrize(
    "texts",
    [
        ["word "] * 60,
        ["x" * 30] * 9,
        ["日本語"] * 40,
        [" " * 70, "deep", "\tTab", "\r\n", "e", "\u0301", "🙂", "end"],
        ["\x00\x1b[31m", "<script>alert(1)</script>", "&amp;", "]]>", '"q"', "\u2028"],
        ["", "only"],
    ],
    ids=["words", "one long word", "wide", "spaces", "hostile", "empty"],
)
def test_any_text_stays_in_its_pane(texts: list[str]) -> None:
    root = drawn(texts, accepted=range(1, len(texts), 2), question="".join(texts) + "\n" + texts[-1])
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "title", "style", "rect", "g", "text"}
    pane = (WIDTH - 2 * MARGIN) / 2
    for letter, left in (("p", MARGIN), ("o", MARGIN + pane)):
        for each in (text for group in passes(root, letter) for text in group.iter(f"{SVG}text")):
            assert cell_len(each.text or "") <= COLUMNS
            assert float(each.get("textLength", 0)) > 0
            end = float(each.get("x", 0)) + float(each.get("textLength", 0))
            assert left <= float(each.get("x", 0)) < end < left + pane + 0.1
    assert all(float(each.get("width", 0)) > 0 for each in root.iter(f"{SVG}rect"))
    shown = words(passes(root, "p"))
    assert shown.replace(" ", "") == re.sub(r"\s|[\x00\x1b\u2028]", "", "".join(texts))


def test_on_a_telephone_the_answers_stand_one_above_the_other() -> None:
    """All letters stay within 415 pixels, so at 390 they are 12 pixels high, and no answer covers the other."""
    root = drawn(["word "] * 60, range(1, 60, 2), "Why? " * 40, is_narrow=True)
    width = float(root.get("width", 0))
    assert width < 415
    [second] = [each for each in root.iter(f"{SVG}g") if each.get("transform")]
    down = float(re.findall(r"translate\(0 ([\d.]+)\)", second.get("transform", ""))[0])
    for each in root.iter(f"{SVG}text"):
        letters = 6.7 if each.get("class") == "note" else 7.8  # pixels a letter
        assert float(each.get("x", 0)) + letters * len(each.text or "") < width
    lowest = max(float(each.get("y", 0)) for group in passes(root, "p") for each in group.iter(f"{SVG}text"))
    title = min(float(each.get("y", 0)) for each in second.iter(f"{SVG}text"))
    assert down + title > lowest + 18


def test_nothing_comes_from_elsewhere() -> None:
    """Pictures in pages load nothing else, so that whatever they named would be missing."""
    text = ET.tostring(drawn(TEXT), "unicode")
    assert re.findall(r"\b(?:href|src|url\(|@import)", text) == []
    assert re.findall(r"https?://[^\"\s]+", text) == ["http://www.w3.org/2000/svg"]


def test_it_can_be_read_on_light_and_dark_pages() -> None:
    """The picture has a ground of its own, and says what colours are on a dark one."""
    root = drawn(TEXT)
    [style] = [each.text or "" for each in root.iter(f"{SVG}style")]
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    dark = dark.partition("@media")[0]
    for part in (light, dark):
        ground, ink, mark = (
            re.search(name + r"\{[^}]*fill:#(\w+)", part) for name in (r"\.card", r"(?:^|[{}\s])text", r"\.hit")
        )
        assert ground
        assert ink
        assert mark
        for behind in (ground, mark):
            assert contrast(ink[1], behind[1]) > 4.5  # WCAG 2, level AA
    assert next(each for each in root if each.tag == f"{SVG}rect").get("class") == "card"


def contrast(one: str, other: str) -> float:
    lights = sorted(map(_luminance, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: str) -> float:
    """Of `fff` or `ffffff`, as WCAG 2 defines it."""
    full = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(full[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_in_a_browser(motion: str, tmp_path: Path) -> None:
    """It is written in time, and stands there at once for those who want no motion."""
    answer = [Token("now", False, 0.001), Token(" later", True, 1.5)]
    file = tmp_path / "answer.svg"
    file.write_text(picture("?", Answer(answer, 1.5), Answer(answer, 1.5)), encoding="utf-8")
    with page(reduced_motion=motion) as tab:
        tab.goto(file.as_uri())
        later = "1" if motion == "reduce" else "0"
        assert opacities(tab, 0.5) == {"p0": "1", "p1": later, "o1": later}
        assert opacities(tab, 2) == {"p0": "1", "p1": "1", "o1": "1"}


def opacities(tab: Any, seconds: float) -> dict[str, str]:
    """What is shown so long after the beginning, with the clock of the animations set by hand."""
    return tab.evaluate(
        """seconds => {
            for (const each of document.getAnimations()) { each.pause(); each.currentTime = 1000 * seconds }
            const opacity = name => getComputedStyle(document.querySelector("." + name)).opacity
            return Object.fromEntries(["p0", "p1", "o1"].map(name => [name, opacity(name)]))
        }""",
        seconds,
    )
