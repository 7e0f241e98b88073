"""In offline mode what is not in the cache is said to be that; nobody is told to check a connection."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.files.repos import tokenizer
from support.targets.models import partly_agreeing, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, pipeline
from typer.testing import CliRunner

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.cli import app
from hf_specdecpp.models.loading import load_model, load_model_config


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


CALLS: dict[str, Callable[[Any], Any]] = {
    "assist": lambda target: assist(target, "org/nothing"),
    "a name without an organisation": lambda target: assist(target, "nothing"),
    "from_pretrained": lambda _: SpecDecPPAssistant.from_pretrained("org/nothing"),
    "from_draft": lambda target: SpecDecPPAssistant.from_draft("org/nothing", target),
    "an adapter": lambda target: assist(target, partly_agreeing(target), adapter="org/nothing"),
    "multi-token layers": lambda target: assist(target, "mtp", source="org/nothing"),
    "a model": lambda _: load_model("org/nothing"),
    "a config": lambda _: load_model_config("org/nothing"),
}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("what", CALLS)
def test_calls(what: str) -> None:
    with pytest.raises(OSError, match="There is no folder .*nothing'.*offline mode is on") as said:
        CALLS[what](tiny("llama"))
    assert "connection" not in str(said.value)
    assert "HF_HUB_OFFLINE" in str(said.value)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("words", [
    "demo --target org/nothing", "chat --target org/nothing", "bench --target org/nothing", "inspect org/nothing",
    "export org/nothing --output out", "train --target org/nothing --data prompts.jsonl --output out",
])  # fmt: skip
def test_commands(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "w{place}"}}\n' for place in range(9)), encoding="utf-8")
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 1
    assert "offline mode is on" in done.output
    assert "connection" not in done.output


@pytest.mark.usefixtures("offline")
def test_a_pipeline_names_the_tokenizer_that_it_cannot_load(tmp_path: Path) -> None:
    """transformers loads the tokenizer of an assistant that is given by name: here the target's."""
    target = tiny("llama")
    target.config.name_or_path = "org/target"
    SpecDecPPAssistant.from_early_exit(target, 1).save_pretrained(tmp_path / "assistant")
    folder = str(tmp_path / "assistant")
    with pytest.raises(OSError, match="The tokenizer of 'org/target' cannot be loaded") as said:
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=folder)
    assert f"assistant_model=SpecDecPPAssistant.from_pretrained({folder!r}, model)" in str(said.value)
    target.config.name_or_path = ""
    assistant = SpecDecPPAssistant.from_pretrained(folder, target)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=assistant)
    pipe("w1 w2", max_new_tokens=8, do_sample=False)
    assert assistant.stats.generated == 8


def test_nothing_is_said_of_offline_mode_where_it_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not in the local cache and cannot be reached") as said:
        SpecDecPPAssistant.from_pretrained("org/nothing", cache_dir=tmp_path, local_files_only=True)
    assert "offline mode is on" not in str(said.value)


# Models that cannot be assisted. -------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "t5": (AutoModelForSeq2SeqLM, {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2,
           "vocab_size": 48}, "is an encoder-decoder model"),
    "mamba": (AutoModelForCausalLM, {**SMALL, "state_size": 4}, "Mamba"),
    "rwkv": (AutoModelForCausalLM, {**SMALL, "context_length": 64}, "Rwkv"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("how", ["assist", "early exit", "attach"])
def test_errors_advise_nothing_that_nobody_did(family: str, how: str) -> None:
    kind, sizes, says = REFUSED[family]
    model = kind.from_config(AutoConfig.for_model(family, **sizes)).eval()
    make: Any = {
        "assist": lambda: assist(model),
        "early exit": lambda: SpecDecPPAssistant.from_early_exit(model, 1),
        "attach": lambda: SpecDecPPAssistant.from_draft(tiny("llama")).attach(model),
    }[how]
    with pytest.raises(ValueError, match=says) as said:
        make()
    assert "without assistant_model" not in str(said.value)
    assert how == "early exit" or "Generate without an assistant" in str(said.value)
