"""By Windows' rules of files, pretended (`support/runs/windows.py`), and on terminals in cp1252: what is saved, pushed,
trained, exported, converted and remembered."""

import ast
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from drawing import new_figure, save
from safetensors import safe_open
from support.files.released_heads import ReleasedHead, save_mixin
from support.files.repos import greedy, head_for, publish_pair, save_adapter, save_chat_model, save_model, tokenizer
from support.runs.hub_server import HubServer
from support.runs.training_files import training_run
from support.runs.windows import in_use, windows
from support.targets.models import assistant_of, quiet_later_layers, tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdecpp import files
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark import questions
from hf_specdecpp.cli import _Commands, app
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.files import Repository, Weights, save_tensors, save_text
from hf_specdecpp.hub.conversion import convert
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.texts.prompts import Prompt
from hf_specdecpp.training import features, recorded_chains
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import DistillConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.models import Trained

ROOT = Path(__file__).parents[1]


def assistant(kind: str, target: Any, folder: Path) -> SpecDecPPAssistant:
    if kind != "everything":
        return assistant_of(kind, target)
    adapter = save_adapter(early_exit(target, [0, 1]), folder / "peft")
    options: dict[str, Any] = {"adapter": adapter, "draft_vocab": range(3, 46), "head": head_for(target)}
    return SpecDecPPAssistant.from_early_exit(target, [0, 1], **options)


def save_over_itself(kind: str, folder: Path) -> None:
    """Saved, loaded, saved where it was loaded from, used, and saved there again."""
    target = quiet_later_layers(tiny("llama"))
    assistant(kind, target, folder).save_pretrained(folder / "saved")
    again = SpecDecPPAssistant.from_pretrained(folder / "saved", target)
    again.save_pretrained(folder / "saved")
    text = greedy(target, again, max_new_tokens=6)
    again.save_pretrained(folder / "saved")
    assert all(file.problem is None for file in inspect(Repository(str(folder / "saved"))).files)
    shutil.rmtree(folder / "saved")
    assert greedy(target, again, max_new_tokens=6) == text == greedy(target, max_new_tokens=6)


@pytest.mark.takes(2)
@pytest.mark.parametrize("kind", ["everything", "conditioned", "eagle3"])
def test_an_assistant_is_saved_where_it_was_loaded_from(kind: str, tmp_path: Path) -> None:
    with windows() as refused:
        save_over_itself(kind, tmp_path)
    assert refused == []
    assert not list(tmp_path.glob("**/*.tmp"))


@pytest.mark.takes(2)
def test_an_assistant_is_pushed_and_saved_where_it_was_cached(hub: HubServer, tmp_path: Path) -> None:
    publish_pair(hub)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    with windows() as refused:
        SpecDecPPAssistant.from_draft("org/draft", target, head=head_for(target)).push_to_hub("org/head")
        again = SpecDecPPAssistant.from_pretrained("org/head", target=target)
        again.push_to_hub("org/head")
        assert greedy(target, again, max_new_tokens=6) == greedy(target, max_new_tokens=6)
    assert refused == []
    assert hub.files("org/head").keys() >= {"config.json", "README.md", "acceptance_head.safetensors"}


def test_single_weights_are_not_kept_open(tmp_path: Path) -> None:
    save_model(tiny("llama"), tmp_path / "model", None)
    weights = Weights.of(Repository(str(tmp_path / "model")))
    tensor = weights["lm_head.weight"]
    assert not any(str(tmp_path) in name for name in in_use())
    with windows():
        shutil.rmtree(tmp_path / "model")
    assert tensor.isfinite().all()


def test_what_is_looked_up_and_drawn(tmp_path: Path) -> None:
    target = tiny("llama")
    with windows() as refused:
        answers = assistant_of("early_exit", target).memory.answers
        answers.add([1, 2, 3])
        answers.save(tmp_path / "answers.json")
        answers.load(tmp_path / "answers.json")
        for _ in range(2):
            save(new_figure(1, 1)[0], tmp_path / "picture.svg")
    assert refused == []


def test_what_is_exported_and_converted(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama").float(), tmp_path / "target"))
    made = assistant("everything", target, tmp_path)
    made.head = None
    released = save_mixin(ReleasedHead(2, False), tmp_path / "released")
    with windows() as refused:
        made.save_pretrained(tmp_path / "assistant")
        (tmp_path / "out").mkdir()
        export(tmp_path / "assistant", tmp_path / "out")
        convert(released, tmp_path / "converted")
    assert refused == []


def test_pictures_are_named_after_data_sets_with_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Mock(encode_all=lambda prompts: [Mock(prompt=each, input_ids=[1]) for each in prompts])
    monkeypatch.setattr(questions.Codec, "from_pretrained", lambda _: codec)
    monkeypatch.setattr(questions, "read_prompts", lambda source: [Prompt("1", source, [])])
    config = BenchmarkConfig(target="org/target", data=["org/set:train", "org/set:test"])
    names = [question.set for question in questions._questions(config)]
    with windows() as refused:
        for name in names:
            save(new_figure(1, 1)[0], tmp_path / f"pareto-{name}-0.png")
    assert (names, refused) == (["set-train", "set-test"], [])


def stages(folder: Path) -> None:
    """A draft and a head that are trained, and again with other settings, in one process."""
    config = training_run(folder, early_exit=True, num_texts=4, epochs=1.0)
    for rank in (2, 3):
        config.distill, config.head.rank = DistillConfig(rank=rank, batch_size=4, epochs=1), rank
        distillation.run(config)
        made = Trained.load(config)
        shown = features.build(made, "heldout")
        shown[0]
        head_fitting.run(config)
        shown[0]


@pytest.mark.slow
def test_training_again_with_other_settings(tmp_path: Path) -> None:
    with windows() as refused:
        stages(tmp_path)
    assert refused == []


SETTINGS: dict[str, Any] = {
    "rollouts": {"max_new_tokens": 10, "batch_size": 8, "shard_size": 8, "heldout": 0.4, "top_k": 0},
    "distill": {"rank": 2, "batch_size": 2, "draft_vocab_size": 30},
    "head": {"num_blocks": 1, "rank": 4, "epochs": 1.0, "batch_size": 8},
}


@pytest.mark.slow
def test_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_chains, "STARTS", 2)
    monkeypatch.setattr(recorded_chains, "MAX_TOKENS", 4)
    target = save_chat_model(tmp_path / "target")
    data, settings, out = tmp_path / "prompts.jsonl", tmp_path / "settings.yaml", tmp_path / "out"
    save_text("".join(f'{{"prompt": "w{i} w{i + 3} w{7 + i}"}}\n' for i in range(1, 13)), data)
    for rank in (2, 3):
        SETTINGS["distill"]["rank"] = SETTINGS["head"]["rank"] = rank
        save_text(yaml.safe_dump(SETTINGS), settings)
        run("train", "--target", target, "--data", data, "--output", out, "--layers", 1, "--config", settings)
    run("inspect", out)
    run("export", out, "--target", target, "--output", tmp_path / "exported")
    run("bench", "--target", target, "--assistant", out, "--data", data, "--output", tmp_path / "bench", "--threads", 1,
        "--device", "cpu", "--max_new_tokens", 6, "--contestants", "plain,fixed 3")  # fmt: skip
    run("demo", "--target", target, "--assistant", out, "--max-new-tokens", 6, "--svg", tmp_path / "demo.svg")
    # Not those of libraries, in the run's work and in what is exported.
    written = [*out.rglob("*"), *(tmp_path / "bench").glob("*"), tmp_path / "demo.svg"]
    texts = [path for path in written if path.suffix in (".json", ".jsonl", ".md", ".svg")]
    assert len(texts) > 5
    assert not [path for path in texts if b"\r\n" in path.read_bytes()]


def run(*words: Any, says: str | None = None) -> str:
    """A command by Windows' rules, which prints in cp1252."""
    with windows() as refused:
        result = CliRunner(charset="cp1252").invoke(app, [str(word) for word in words], input=says)
    assert result.exit_code == 0, result.output
    assert refused == []
    return result.output


# Terminals ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose words cp1252 does not have."""
    folder = tmp_path_factory.mktemp("spoken")
    save_model(quiet_later_layers(tiny("llama")).float(), folder, None)
    tokenizer(["<unk>", "w1", *(chr(0x4E00 + i) for i in range(46))]).save_pretrained(folder)
    return str(folder)


@pytest.mark.takes(2)
def test_a_terminal_without_the_signs(spoken: str) -> None:
    settings = ("--target", spoken, "--layers", 1, "--max-new-tokens", 8)
    assert "\n`- '?'   a=" in run("demo", *settings, "--prompt", "w1 w1", "--tree")
    assert "?" in run("chat", *settings, says="w1 w1\n/stats\n/quit\n")
    run("--help")
    run("train", "--help")


def test_lines_of_trees_are_drawn_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    made = assistant_of("early_exit", target, tree=[2, 1])
    greedy(target, made)
    stats: Any = made.stats
    with windows():
        for encoding, lines in (("utf-8", "├─"), ("cp1252", "|-"), (None, "├─")):
            monkeypatch.setattr("sys.stdout", type("Stream", (), {"encoding": encoding}))
            drawn = str(stats.last_tree)
            assert f"\n{lines}" in drawn
            drawn.encode(encoding or "utf-8")
        monkeypatch.setattr("sys.stdout", None)  # of programs without a console
        assert "\n├─" in str(stats.last_tree)


def test_texts_of_files_have_an_encoding() -> None:
    """Every call that opens a file as text, or may."""
    found = []
    for path in [*ROOT.glob("hf_specdecpp/**/*.py"), *ROOT.glob("examples/**/*.py"), ROOT / "setup.py"]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and lacks_encoding(call):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


def lacks_encoding(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    given = len(call.args)
    if any(each.arg == "encoding" for each in call.keywords):
        return False
    if name in ("read_text", "write_text"):
        return given < (1 if name == "read_text" else 2)
    is_binary = any(isinstance(each, ast.Constant) and "b" in str(each.value) for each in call.args)
    return name == "open" and not is_binary


def test_calls_without_an_encoding_are_found() -> None:
    calls = {
        "p.read_text()": True, "p.write_text(x)": True, "open(p)": True, "p.open('a')": True, "p.open('rb')": False,
        "p.read_text('utf-8')": False, "p.write_text(x, encoding='utf-8')": False, "open(p, 'wb')": False,
    }  # fmt: skip
    for text, lacks in calls.items():
        call = ast.parse(text).body[0].value  # type: ignore[attr-defined]
        assert lacks_encoding(call) is lacks, text


# Mutants --------------------------------------------------------------------------------------------------------------


def mapped(path: Path) -> dict[str, torch.Tensor]:
    """As `load_tensors`, without copying."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def test_mutants_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synced when open for reading; weights of the mapped file itself; and the rules one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, _mode, opened=Path.open: opened(path, "rb"))
        with windows(), pytest.raises(OSError, match="fsync of a file"):
            save_tensors({}, tmp_path / "tensors")
    with monkeypatch.context() as patch:
        patch.setattr(files, "load_tensors", mapped)
        with windows(), pytest.raises(OSError, match="in use by this process"):
            save_over_itself("eagle3", tmp_path / "eagle3")
    held = tmp_path / "held"
    held.touch()
    for change in (held.unlink, lambda: held.replace(tmp_path / "other"), lambda: save_text("", held),
                   lambda: shutil.rmtree(tmp_path), lambda: tmp_path.rename(tmp_path.parent / "moved")):  # fmt: skip
        with held.open("rb"), windows() as refused, pytest.raises(OSError, match="in use by this process"):
            change()
        assert len(refused) == 1
    with windows() as refused:
        for name in ("a:b", "what?", "nul", "ends."):
            with pytest.raises(OSError, match="not a name"):
                save_text("", tmp_path / name)
        with pytest.raises(UnicodeEncodeError):
            held.write_text("漢")
        held.write_text("a\n", encoding="utf-8")
        assert held.read_bytes() == b"a\r\n"


@pytest.mark.takes(2)
def test_a_mutant_that_prints_every_sign(spoken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_Commands, "main")
    with pytest.raises(AssertionError):
        run("demo", "--target", spoken, "--layers", 1, "--max-new-tokens", 4, "--prompt", "w1 w1")
