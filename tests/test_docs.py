"""The pages: links lead somewhere, programs run or say what they need, and settings are those of the dataclasses."""

import ast
import random
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
import yaml
from support.files.eagle3_files import Checkpoint
from support.files.repos import PROMPT, chat_tokenizer, save_adapter, save_model
from support.targets.models import partly_agreeing, quiet_later_layers, tiny
from typer.main import get_command
from typer.testing import CliRunner

import hf_specdecpp
from hf_specdecpp.cli import app
from hf_specdecpp.cli_options import meanings
from hf_specdecpp.figures import median_of_ratios, ratio_of_sums
from hf_specdecpp.training.configuration import TrainingConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for glob in ("*.md", "docs/**/*.md", "hub_cards/**/*.md") for page in ROOT.glob(glob))
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE_BLOCK = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: `## On a CPU` is `on-a-cpu`."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(CODE_SPAN.sub("code", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


def test_links_lead_somewhere() -> None:
    assert {page: broken for page in PAGES if (broken := broken_links(page))} == {}


def test_files_that_are_named_exist() -> None:
    for page in PAGES:
        named = re.findall(r"`((?:docs|examples|hf_specdecpp|tests)/[\w/-]+\.\w+)`", page.read_text(encoding="utf-8"))
        assert [path for path in named if not (ROOT / path).exists()] == [], page


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](page.md#one) [b](#one) [c](http://x) `[d](no.md)` [e](no.md) [f](#two) [g](page.md#two)"
    )
    assert broken_links(page) == ["no.md", "#two", "page.md#two"]


@pytest.mark.parametrize("name", ["settings", "api"])
def test_pages_of_docstrings_are_those_of_the_code(name: str) -> None:
    page = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))["page"]
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_api_page_has_every_public_name() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert set(page["NAMES"]) == set(hf_specdecpp.__all__) - {"__version__"}
    text = page["page"]()
    for name in page["NAMES"]:
        assert f"\n## {name}\n" in text
    for name in meanings(hf_specdecpp.SpeculationConfig):
        assert re.search(rf"^- `{name}`[ :]", text, flags=re.MULTILINE), name
    for method in ("from_pretrained", "attach", "warm_up", "stats"):
        assert f"\n### SpecDecPPAssistant.{method}\n" in text


BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"# [Nn]eeds \S+")
EXCERPT = re.compile(r"# Of (\S+\.py)")
# What pages call models, and which of ours takes their place.
IDS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "target",
    **dict.fromkeys(("org/target", "org/model"), "target"),
    **dict.fromkeys(("org/repo", "org/small-model", "org/independent", "my/folder"), "draft"),
    "RedHatAI/Qwen3-8B-speculator.eagle3": "eagle3",
    "org/lora": "adapter",
}


def blocks(language: str) -> list[Any]:
    found = []
    for page in GUIDES:
        programs = [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]
        found += [pytest.param(code, id=f"{page.stem}-{number}") for number, code in enumerate(programs)]
    return found


def test_every_block_has_a_language() -> None:
    for page in GUIDES:
        fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(fences[::2]) <= {"python", "console", "yaml", ""}, page
        assert set(fences[1::2]) <= {""}, page


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that chats, a smaller one, a LoRA adapter of it and an EAGLE-3 draft of the first."""
    folder = tmp_path_factory.mktemp("models")
    target = quiet_later_layers(tiny("llama", num_hidden_layers=6, eos_token_id=47, pad_token_id=47)).float()
    draft = partly_agreeing(target)
    for name in ("target", "draft"):
        chat_tokenizer().save_pretrained(folder / name)
    return {
        "target": save_model(target, folder / "target", None),
        "draft": save_model(draft, folder / "draft", None),
        "adapter": save_adapter(draft, folder / "adapter"),
        "eagle3": str(Checkpoint().save(folder / "eagle3")),
        "assistant": save_assistant_of(folder),
    }


def save_assistant_of(folder: Path) -> str:
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    assistant = hf_specdecpp.SpecDecPPAssistant.from_draft(str(folder / "draft"), target)
    assistant.save_pretrained(folder / "assistant")
    return str(folder / "assistant")


@pytest.fixture
def names(folders: dict[str, str]) -> dict[str, Any]:
    """What pages take for granted."""
    model, draft = (transformers.AutoModelForCausalLM.from_pretrained(folders[name]) for name in ("target", "draft"))
    model.generation_config.max_new_tokens = 16
    other = hf_specdecpp.SpecDecPPAssistant.from_draft(draft, model)
    return {
        "assist": hf_specdecpp.assist, "SpecDecPPAssistant": hf_specdecpp.SpecDecPPAssistant,
        "SpeculationConfig": hf_specdecpp.SpeculationConfig, "pipeline": transformers.pipeline, "torch": torch,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM, "TextStreamer": transformers.TextStreamer,
        "model": model, "draft": draft, "other": other, "assistant": hf_specdecpp.assist(model, draft),
        "tokenizer": chat_tokenizer(), "inputs": {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)},
    }  # fmt: skip


@pytest.mark.parametrize("code", blocks("python"))
@pytest.mark.filterwarnings("ignore")
def test_python_runs(
    code: str, folders: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NEEDS.match(code):
        ast.parse(code)
    elif excerpt := EXCERPT.match(code):
        source = (ROOT / excerpt[1]).read_text(encoding="utf-8")
        assert -1 not in [source.find(call) for call in re.findall(r"\.\w+\(", code)]
    else:
        monkeypatch.chdir(tmp_path)
        for name, of in IDS.items():  # folders of ours in the place of the ids that the page has
            code = code.replace(f'"{name}"', repr(folders[of]))
        names = request.getfixturevalue("names")
        exec(compile(code, "page", "exec"), names)  # noqa: S102 - our own pages


def commands(code: str) -> list[str]:
    """The lines of a block that are commands: those that a backslash continues are one."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("code", blocks("console"))
def test_commands_are_taken_by_their_programs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their options are parsed, and what they name is there; other programs' commands say what they need."""
    needs = NEEDS.match(code) is not None
    for line in commands(code):
        program, *rest = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if program == "specdecpp":
            parse(rest)
        elif program == "python" and rest[0].startswith("examples/"):
            source = (ROOT / rest[0]).read_text(encoding="utf-8")
            assert [word for word in rest[1:] if word.startswith("--") and word.split("=")[0] not in source] == []
        elif program == "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        elif program == "pip":
            extra = re.search(r"\[(\w+)\]", line)
            project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            assert extra is None or re.search(rf"^{extra[1]} = \[", project, flags=re.MULTILINE)
        else:
            assert needs or NEEDS.search(line), f"{program} is not ours: say what it needs"


def parse(words: list[str]) -> None:
    """What the command line makes of these words; `click.UsageError` if it takes them not."""
    verb, *rest = words
    command: Any = get_command(app)
    found = command.commands[verb]
    with click.Context(command, info_name="specdecpp") as above:
        found.make_context(verb, list(rest), parent=above)


FILES = {"FILE", "prompts.jsonl", "my-prompts.jsonl", "chat.jsonl", "code.jsonl"}
# Added to commands, so that they end soon.
SHORT = {
    "bench": "--max_new_tokens 8 --max_prompts 1 --contestants throughput*",
    "demo": "--max_new_tokens 8",
    "chat": "--max_new_tokens 8",
    "train": "--config short.yaml",
}


# What these need is not here: a Hub, a server, a published draft, and a head for that.
ELSEWHERE = "--push_to_hub", "--server", "org/dflash-or-dspark", "my-head"


def ours(code: str) -> list[str]:
    """The commands of a block that can run here."""
    return [
        line for line in commands(code) if line.startswith("specdecpp") and not any(each in line for each in ELSEWHERE)
    ]


@pytest.mark.slow  # a benchmark and a training run are among them
@pytest.mark.parametrize("code", [block for block in blocks("console") if ours(block.values[0])])
def test_commands_run(code: str, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with models of ours in the place of the ids and capitals that the page has."""
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).write_text("".join(f'{{"prompt": "w{place} w{place + 1} w3"}}\n' for place in range(24)))
    Path("short.yaml").write_text("rollouts: {max_new_tokens: 16, heldout: 0.5}")
    models = {**dict.fromkeys(("ID_OR_FOLDER", "ID", "org/model"), "target"), "org/assistant": "assistant"}
    for number, line in enumerate(ours(code)):
        named = models | {"REPO": "eagle3" if "inspect" in line and "--target" in line else "assistant"}
        given = [folders[named[word]] if word in named else word for word in shlex.split(line, comments=True)[1:]]
        given += shlex.split(SHORT.get(given[0], ""))
        given = [{"DIR": f"made-{number}", "MODEL": "Qwen/Qwen3-8B"}.get(word, word) for word in given]
        done = CliRunner().invoke(app, given, input="w1 w2\n")
        assert done.exit_code == 0, f"{line}: {done.output}"


@pytest.mark.parametrize("code", blocks("yaml"))
def test_settings_files_are_taken(code: str) -> None:
    config = TrainingConfig.from_dict({"target": "org/model", "output": "my-assistant", **yaml.safe_load(code)})
    config.rollouts.data = ["prompts.jsonl"]
    config.validate()


# Medians, ratios and their intervals. ---------------------------------------------------------------------------------


def test_median_is_not_moved_by_one_disturbed_run() -> None:
    middle, low, high = median_of_ratios([1.5, 1.52, 1.48, 1.51, 1.49, 1.5, 0.2])
    assert middle == 1.5
    assert low <= middle <= high
    assert high <= 1.52


def test_ratio_weighs_texts_by_their_length() -> None:
    assert ratio_of_sums([100.0, 1.0], [50.0, 1.0]) == pytest.approx((101 / 51, 1.0, 2.0))


@pytest.mark.parametrize("size", [20, 80])
def test_intervals_cover_what_they_say(size: int) -> None:
    """Of intervals from many samples of one distribution 95 % hold its median; bootstrap ones a little fewer."""
    draw = random.Random(size)
    held, widths = 0, 0.0
    for seed in range(100):
        _, low, high = median_of_ratios([draw.lognormvariate(0.3, 0.2) for _ in range(size)], seed)
        held += low <= 2.718281828**0.3 <= high
        widths += high - low
    assert 86 <= held < 100
    assert widths / 100 < 4.0 * 0.2 * 1.35 * 1.2533 / size**0.5 * 1.5


def test_a_field_without_a_meaning_is_an_error() -> None:
    @dataclass
    class Mute:
        """Says nothing.

        Args:
            told: is described.
        """

        told: int = 0
        untold: int = 0

    with pytest.raises(ValueError, match=r"Mute\.untold"):
        list(runpy.run_path(str(ROOT / "docs" / "settings.py"))["describe"](Mute))


# The files of the Space as Hugging Face reads them. ------------------------------------------------------------------


SPACE = ROOT / "hub_cards" / "space"
CARD = (SPACE / "README.md").read_text(encoding="utf-8")
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def test_the_header_is_one_of_a_gradio_space() -> None:
    header: dict[str, Any] = yaml.safe_load(CARD.split("---\n")[1])
    assert header["sdk"] == "gradio"
    assert (SPACE / header["app_file"]).is_file()
    assert {header["colorFrom"], header["colorTo"]} <= COLOURS
    assert len(header["short_description"]) <= 60
    # The version that the tests run.
    assert f"gradio=={header['sdk_version']}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_the_variables_of_the_space_are_those_of_its_program() -> None:
    read = set(re.findall(r'os\.environ\.get\("([A-Z]+)"', (SPACE / "app.py").read_text(encoding="utf-8")))
    assert set(re.findall(r"^\| `([A-Z]+)` \|", CARD, flags=re.MULTILINE)) == read != set()


def test_the_space_installs_what_it_imports() -> None:
    asked = (SPACE / "requirements.txt").read_text(encoding="utf-8")
    assert re.search(r"^hf-specdecpp\[bench\]", asked, flags=re.MULTILINE)  # with matplotlib, which draws trees
