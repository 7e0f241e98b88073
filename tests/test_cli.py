"""`specdecpp`: what it prints and how it exits. What `inspect` finds is tested in test_inspection.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.files.assistant_files import FILES, edit_config, write_assistant
from support.files.eagle3_files import VARIANTS
from support.files.released_heads import ReleasedHead, save_bin, save_mixin
from support.files.repos import files_of, save_chat_model, save_model
from support.runs.hub_server import HubServer, point_client_at
from support.targets.models import tiny
from typer.testing import CliRunner, Result

from hf_specdecpp import cli_options
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.models.loading import load_model
from hf_specdecpp.terminal import demo
from hf_specdecpp.version import __version__


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(output: str) -> str:
    """Without line breaks and padding."""
    return " ".join(output.split())


def assert_error(result: Result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)  # not a traceback
    assert message in text(result.stderr)
    assert result.stderr.startswith("Error: ")
    assert (result.stderr.count("\n"), result.stdout) == (1, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_assistant(tmp_path / "assistant")


def test_version() -> None:
    assert run("--version").stdout == f"{__version__}\n"


def test_sound(folder: Path) -> None:
    result = run("inspect", folder)
    assert result.exit_code == 0, result.output
    output = text(result.stdout)
    for fact in (
        f"target org/target at {'a' * 40}",
        f"draft org/draft at {'b' * 40}",
        "hidden_size=8, inputs='after', num_blocks=2",
        "LORA, rank 2, on q_proj, v_proj",
        "draft vocabulary 10 token ids",
        "rule='throughput'",
        f"hf_specdecpp {__version__}, transformers",
        "All files are sound.",
        "next assist(model, ",
    ):
        assert fact in output
    for name in FILES:
        assert f"sound {name}" in output
    assert "warning" not in output


def test_a_draft_that_others_trained(tmp_path: Path) -> None:
    verifier = {"speculators_config": {"verifier": {"name_or_path": "org/target"}}}
    folder = VARIANTS["norm_output"].save(tmp_path, "speculators", **verifier)
    result = run("inspect", folder)
    assert result.exit_code == 0, result.output
    target = "org/target at a commit that is not recorded"
    assert text(result.stdout).startswith(
        f"repository {folder} target {target} draft EAGLE-3 {folder} settings layer={{"
    )
    assert "norm_output=True" in text(result.stdout)
    for of_an_assistant in ("head none", "adapter", "tokenizer hash", "written by", "speculation", "warning"):
        assert of_an_assistant not in result.stdout


def test_not_sound(folder: Path) -> None:
    (folder / "draft_vocab.safetensors").unlink()
    (folder / "acceptance_head.safetensors").write_bytes(b"")
    torch.save({}, folder / "pytorch_model.bin")
    result = run("inspect", folder)
    assert result.exit_code == 1
    output = text(result.stdout)
    assert "PROBLEM draft_vocab.safetensors draft_vocab.safetensors is missing, so" in output
    assert "PROBLEM acceptance_head.safetensors acceptance_head.safetensors is incomplete" in output
    assert "warning pytorch_model.bin looks like a pickle" in output
    assert "2 of 5 files have problems." in output
    assert "next" not in output


def test_a_repository_cannot_write_to_the_terminal(folder: Path) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07[bold red]\r\nAll files are sound."
    edit_config(folder, target_id=hostile, **{hostile: 1})
    output = run("inspect", folder).stdout
    assert "\x1b" not in output
    assert "\x07" not in output
    assert "\r" not in output
    assert "[bold red]" in output  # not taken for markup
    assert output.count("\nAll files are sound.") == 1


def test_no_such_folder(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert_error(run("inspect", missing), f"There is no folder '{missing}', and it cannot be a Hub id")
    assert_error(run("inspect", tmp_path), f"'{tmp_path}' has no config.json: it is neither an assistant nor a draft.")


def test_hub(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.commit("org/head", files_of(folder))
    hub.tag("org/head", "v1")
    hub.commit("org/head", {"config.json": b"{}"})
    hub.commit("org/gated", files_of(folder))
    hub.gate("org/gated")
    result = run("inspect", "org/head", "--revision", "v1")
    assert result.exit_code == 0, result.output
    assert text(result.stdout).startswith(f"assistant org/head at {commit}")
    assert (damaged := run("inspect", "org/head")).exit_code == 1
    assert "There is no folder" not in damaged.output, "the Hub has the repository"
    assert_error(run("inspect", "org/head", "--revision", "v2"), "Revision Not Found")
    assert_error(run("inspect", "org/other"), "Repository Not Found")
    assert_error(run("inspect", "org/gated"), "Access to model org/gated is restricted")
    hub.__exit__()
    assert_error(run("inspect", "org/never-seen"), "check your internet connection")
    point_client_at(monkeypatch, hub, tmp_path / "cache", offline=True)
    assert_error(run("inspect", "org/never-seen"), "offline mode is on")


def test_convert(tmp_path: Path) -> None:
    source, out = save_bin(ReleasedHead(3), tmp_path / "in"), tmp_path / "out"
    result = run("inspect", source, "--convert", out, "--draft", "org/draft@abc", "--target", "org/target")
    assert result.exit_code == 0, result.output
    output = text(result.stdout)
    assert f"assistant {out}" in output
    assert "draft org/draft at abc" in output
    assert "target org/target at a commit that is not recorded draft" in output
    assert "tied=True" in output
    assert "All files are sound." in output


def test_convert_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    save_mixin(ReleasedHead(2), tmp_path / "heads/pair")
    hub.commit("org/heads", {**files_of(tmp_path / "heads"), "other/model.safetensors": b"x"})
    result = run("inspect", "org/heads", "--subfolder", "pair", "--convert", tmp_path / "out")
    assert not any("other" in path for _, path, _ in hub.requests)
    assert result.exit_code == 0, result.output
    assert "tied=True" in text(result.stdout)


def test_the_draft_of_a_conversion_needs_one(folder: Path) -> None:
    result = run("inspect", folder, "--draft", "org/draft")
    assert result.exit_code == 2
    assert "it needs --convert OUT" in text(result.stderr.replace("│", " "))


def test_export(tmp_path: Path) -> None:
    target = load_model(save_model(tiny("llama").float(), tmp_path / "target"))
    SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=range(20)).save_pretrained(tmp_path / "assistant")
    result = run("export", tmp_path / "assistant", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"Written: {tmp_path / 'out'}"
    config = f'{{"method":"draft_model","model":"{tmp_path / "out"}","num_speculative_tokens":3}}'
    assert f"vllm serve {tmp_path / 'target'} --speculative-config '{config}'" in lines, "on one line, to be copied"
    assert load_model(tmp_path / "out").config.num_hidden_layers == 2
    result = run("export", tmp_path / "assistant", "--output", tmp_path / "again", "--to", "sglang")
    assert result.exit_code == 0, result.output
    assert "SGLang" in result.stdout.splitlines()
    assert "vllm serve" not in result.stdout
    assert (tmp_path / "again" / "serve.sh").read_text().splitlines()[-1].startswith("exec python -m sglang")


def test_export_says_why_not(tmp_path: Path, folder: Path) -> None:
    assert_error(run("export", folder, "--output", folder), "exists and is not an empty folder")
    edit_config(folder, draft_kind="lookup", adapter=False, head=None, draft_id=None, draft_vocab_size=None)
    assert_error(run("export", folder, "--output", tmp_path / "out"), "nothing to export")
    assert_error(run("export", tmp_path / "none", "--output", tmp_path / "out"), "There is no folder")
    assert_error(run("export", folder, "--output", "out", "--to", "vlm"), "--to 'vlm' must be one of vllm, sglang,")
    assert not (tmp_path / "out").exists()


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[cli_options.DemoConfig] = []
    monkeypatch.setattr(demo, "run", lambda config, _: told.append(config))
    assert run("demo", "--target", "a", "--max_new_tokens", "7").exit_code == 0
    options = ["--assistant", "b", "--layers", "0,2", "--max-new-tokens", "5", "--prompt", "c", "--prompt", "d"]
    options += ["--tree", "--lookup", "--svg", "x.svg"]
    assert run("demo", "--target", "a", *options).exit_code == 0
    assert told == [
        cli_options.DemoConfig("a", max_new_tokens=7),
        cli_options.DemoConfig("a", "b", [0, 2], True, False, True, 5, ["c", "d"], Path("x.svg")),
    ]
    assert_error(run("demo", "--target", "a", "--assistant", "b", "--mtp"), "--mtp drafts with the target's own layers")


NOWHERE = "There is no folder '/nowhere"


@pytest.mark.parametrize(("words", "says"), [
    (["demo", "--layers", "9"], "must be a number from 1 to 2"),
    (["demo", "--layers", "four"], "must be a number such as 4 or a list such as 0,1,2,29"),
    (["demo", "--assistant", "/nowhere/at/all"], f"{NOWHERE}/at/all', and it cannot be"),
    (["demo", "--svg", "/nowhere/at/all.svg"], "The picture '/nowhere/at/all.svg' cannot be written"),
    (["demo", "--svg", "/"], "The picture '/' cannot be written"),
    (["chat", "--assistant", "/nowhere"], NOWHERE),
    (["chat", "--target", "/nowhere"], NOWHERE),
])  # fmt: skip
def test_bad_arguments_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    result = run(words[0], "--target", save_chat_model(tmp_path / "target"), *words[1:])
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_drafts_that_others_have_published() -> None:
    lines = text(run("drafts", "Qwen/Qwen3-8B").stdout)
    assert "z-lab/Qwen3-8B-DFlash-b16 DFlash draft, 6.4 tokens a pass (GSM8K in English" in lines
    assert "AngelSlim/Qwen3-14B_eagle3" in text(run("drafts").stdout)
    assert "specdecpp inspect DRAFT --convert FOLDER" in text(run("drafts", "lmsys/vicuna-13b-v1.3").stdout)
    assert_error(run("drafts", "org/none"), "No published draft of org/none is known.")


# A command line that is made of a settings dataclass. -----------------------------------------------------------------


def given(*arguments: str) -> Any:
    app, made = typer.Typer(), []

    @app.command()
    @cli_options.options_of(BenchmarkConfig)
    def command(**options: Any) -> None:
        made.append(cli_options.settings_from(BenchmarkConfig, options))

    result = CliRunner().invoke(app, arguments)
    return made[0] if made else result


@pytest.mark.parametrize(("arguments", "settings"), [
    ([], {}),
    (["--max_prompts", "2"], {"max_prompts": 2}),
    (["--max-prompts", "2"], {"max_prompts": 2}),
    (["--layers", "0,2"], {"layers": [0, 2]}),
    (["--data", "a", "--data", "b"], {"data": ["a", "b"]}),
    (["--quick", "--no-live"], {"quick": True, "live": False}),
    (["--temperatures", "0.7"], {"temperatures": [0.7]}),
    (["--output", "there"], {"output": Path("there")}),
])  # fmt: skip
def test_options_reach_the_fields(arguments: list[str], settings: dict[str, Any]) -> None:
    assert given("--target", "x", *arguments) == BenchmarkConfig("x", **settings)


@pytest.mark.parametrize("arguments", [[], ["--target", "x", "--max_prompts", "0"], ["--target", "x", "--no-quick"]])
def test_what_the_command_line_refuses(arguments: list[str]) -> None:
    assert given(*arguments).exit_code == 2
