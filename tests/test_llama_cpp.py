"""llama.cpp serves SmolLM2 with its exported early exit as the draft (`make test-serving`)."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.serving import AS_EAGLE3, Destination, commands_for

pytestmark = pytest.mark.takes(60)
llama_cpp = pytest.importorskip("llama_cpp", reason="run `make test-serving`")

ROOT = Path(__file__).parents[1]
SOURCES = Path(llama_cpp.__file__).parents[1] / "sources" / "vendor" / "llama.cpp"
SMOLLM2 = os.environ.get("SMOLLM2", str(ROOT / ".models" / "smollm2"))  # a folder or a Hub id
QUESTION = "Write a Python function that returns the n-th Fibonacci number."
LAYERS, DRAFTED, LENGTH = 20, 3, 48


@dataclass
class Served:
    """The target in transformers, a prompt, and the folder of `target.gguf` and `my-draft.gguf`."""

    target: Any
    prompt: list[int]
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    source = str(Path(SMOLLM2).absolute()) if Path(SMOLLM2).is_dir() else snapshot_download(SMOLLM2)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    speculation = SpeculationConfig(rule="fixed", num_tokens=DRAFTED)
    assistant = SpecDecPPAssistant.from_early_exit(target, LAYERS, speculation=speculation)
    assistant.save_pretrained(folder / "assistant")
    convert(export(folder / "assistant", folder / "my-draft", source).commands["llama.cpp"][0], folder)
    convert(f"python convert_hf_to_gguf.py {shlex.quote(source)} --outfile target.gguf", folder)
    messages = [{"role": "user", "content": QUESTION}]
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Served(target, prompt, folder)


def convert(command: str, folder: Path) -> None:
    """Run a command as `export` prints it, but in the precision that transformers is compared in."""
    python, script, *words = shlex.split(command)
    assert (python, script) == ("python", "convert_hf_to_gguf.py")
    words = [sys.executable, str(SOURCES / script), *words, "--outtype", "f32"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def documented(served: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python code of docs/serving.md defines: `Draft` and `target`."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "serving.md").read_text("utf-8"), re.M | re.S)
    monkeypatch.chdir(served.folder)
    monkeypatch.setattr(
        "multiprocessing.cpu_count", lambda: 1
    )  # threads that share a core wait for one another, busily
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own guide
    return names


def greedy(model: Any, prompt: list[int], length: int = LENGTH) -> list[int]:
    tokens: Iterator[int] = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
    return [next(tokens) for _ in range(length)]


def test_greedy_text_is_the_same_and_candidates_are_accepted(served: Served, documented: dict[str, Any]) -> None:
    with torch.no_grad():
        text = served.target.generate(torch.tensor([served.prompt]), do_sample=False, max_new_tokens=LENGTH)
    plainly = text[0, len(served.prompt) :].tolist()
    assert len(plainly) == LENGTH, "no end of turn in between, at which only one of the two engines stops"
    target = documented["target"]
    texts: list[list[int]] = []  # as each round found them
    draft = target.draft_model

    def watched(input_ids: Any) -> Any:
        texts.append(input_ids.tolist())
        return draft(input_ids)

    target.draft_model = watched
    assert greedy(target, served.prompt) == plainly
    lengths = [len(later) - len(earlier) for earlier, later in zip(texts, texts[1:], strict=False)]
    assert min(lengths) < DRAFTED + 1, "some candidates are rejected"
    assert 1 < max(lengths) <= DRAFTED + 1, "and some are accepted"
    target.reset()
    target.draft_model = None
    assert greedy(target, served.prompt) == plainly


def test_its_draft_is_the_draft_that_was_exported(served: Served, documented: dict[str, Any]) -> None:
    exported = AutoModelForCausalLM.from_pretrained(served.folder / "my-draft", dtype=torch.float32)
    with torch.no_grad():
        text = exported.generate(torch.tensor([served.prompt]), do_sample=False, max_new_tokens=DRAFTED)
    proposed = documented["target"].draft_model(torch.tensor(served.prompt).int().numpy())
    assert proposed.tolist() == text[0, len(served.prompt) :].tolist()


def test_its_programs_have_the_options_of_our_commands() -> None:
    to = Destination(Path("x"), Path("draft"), "org/target", None, DRAFTED)
    options = (SOURCES / "common" / "arg.cpp").read_text("utf-8")
    methods = (SOURCES / "common" / "speculative.cpp").read_text("utf-8")
    converter = (SOURCES / "convert_hf_to_gguf.py").read_text("utf-8")
    for converting, serving in (commands_for(to)["llama.cpp"], commands_for(to, AS_EAGLE3)["llama.cpp"]):
        assert [word for word in shlex.split(converting) if word[0] == "-" and f'"{word}"' not in converter] == []
        words = shlex.split(serving)
        assert [word for word in words if word[0] == "-" and f'"{word}"' not in options] == []
        assert f'{{"{words[words.index("--spec-type") + 1]}",' in methods
