"""`export`: an assistant's draft as a folder that drafts the same elsewhere, in full or not at all."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import WORDS, change_json, files_of, greedy, head_for, publish_pair, save_adapter, save_model
from support.runs.hub_server import HubServer
from support.targets.models import VOCAB_SIZE, partly_agreeing, prompt, random_fusion, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPConfig, SpeculationConfig, serving
from hf_specdecpp.hub.exporting import draft_length, export
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.loading import load_model

FIXED = SpeculationConfig("fixed", num_tokens=4)
LORA = {"gpt2": ("c_attn", "c_fc"), "llama tied": ("q_proj", "lm_head")}
SHAPES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}, [0, 1]),
    "llama": ("llama", {}, [0, 2]),
    "qwen2": ("qwen2", {}, [0, 1]),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, [1, 2]),
    "gemma3 tied": ("gemma3_text", {"tie_word_embeddings": True}, [0, 2]),
    "gpt2": ("gpt2", {}, [0, 2]),
}


def save_target(folder: Path, shape: str = "llama") -> Any:
    family, settings, _ = SHAPES[shape]
    return load_model(save_model(tiny(family, **settings).float(), folder))


def exits_early(target: Any, shape: str, folder: Path, **arguments: Any) -> SpecDecPPAssistant:
    """Saved to `folder`, with an adapter."""
    layers = SHAPES[shape][2]
    adapted = LORA.get(shape, ("q_proj", "up_proj"))
    adapter = save_adapter(early_exit(target, layers), folder.parent / "peft", 0, adapted)
    made = SpecDecPPAssistant.from_early_exit(target, layers, adapter=adapter, speculation=FIXED, **arguments)
    made.save_pretrained(folder)
    return made


def logits_along(model: Any, text: Tensor) -> Tensor:
    with torch.no_grad():
        return model(text).logits


@pytest.mark.daily("llama tied", "gpt2")
@pytest.mark.parametrize("shape", SHAPES)
def test_an_early_exit_is_the_same_model(shape: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", shape)
    assistant = exits_early(target, shape, tmp_path / "assistant")
    export(tmp_path / "assistant", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, theirs = assistant.ready_drafter().model.state_dict(), exported.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].dtype == torch.float32 and torch.equal(ours[name], theirs[name]) for name in ours)
    text = prompt(40)
    assert torch.equal(logits_along(exported, text), logits_along(assistant.ready_drafter().model, text))
    assert not torch.equal(logits_along(exported, text), logits_along(early_exit(target, SHAPES[shape][2]), text))
    assert exported.config.num_hidden_layers == 2
    tied = exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    words = [AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("target", "out")]
    assert words[0] == words[1]


def test_an_independent_draft_has_its_adapter_merged(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    draft = save_model(partly_agreeing(target), tmp_path / "draft")
    adapter = save_adapter(load_model(draft), tmp_path / "peft")
    assistant = SpecDecPPAssistant.from_draft(draft, target, adapter=adapter, head=head_for(target), speculation=FIXED)
    assistant.save_pretrained(tmp_path / "assistant")
    exported = export(tmp_path / "assistant", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_along(again, prompt(40)), logits_along(assistant.ready_drafter().model, prompt(40)))
    assert not torch.equal(logits_along(again, prompt(40)), logits_along(load_model(draft), prompt(40)))
    assert not hasattr(again, "peft_config")
    (note,) = exported.notes
    assert note.startswith("Each round has 4 candidates (the length of its rule). Engines do not use the stopping")
    assert greedy(target, again) == greedy(target)


@pytest.mark.parametrize("kind", ["independent", "early exit"])
def test_a_draft_vocabulary_becomes_the_full_head(kind: str, tmp_path: Path) -> None:
    target, few = save_target(tmp_path / "target"), list(range(0, VOCAB_SIZE, 2))
    made = (
        SpecDecPPAssistant.from_draft(save_model(partly_agreeing(target), tmp_path / "draft"), target, draft_vocab=few)
        if kind == "independent"
        else SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=few)
    )
    made.save_pretrained(tmp_path / "assistant")
    exported = export(tmp_path / "assistant", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight.shape[0] == VOCAB_SIZE
    assert torch.equal(logits_along(again, prompt(9)), logits_along(made.ready_drafter().model, prompt(9)))
    assert exported.notes[0].startswith("Here the draft proposes 24 of 48 tokens.")


def test_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    commit, _ = publish_pair(hub)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    SpecDecPPAssistant.from_early_exit(target, 2).push_to_hub("org/assistant")
    newer = tiny("llama", seed=5)
    hub.commit("org/target", files_of(save_model(newer, tmp_path / "newer", ["<unk>", *reversed(WORDS[1:])])))
    shutil.rmtree(tmp_path / "cache")
    exported, again = export("org/assistant", tmp_path / "out"), load_model(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, target.lm_head.weight), f"the target's commit is {commit}"
    assert exported.commands["vLLM"][0].startswith("vllm serve org/target ")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["w7"] == 7


def test_the_target_elsewhere(tmp_path: Path) -> None:
    exits_early(save_target(tmp_path / "target"), "llama", tmp_path / "assistant")
    (tmp_path / "target").rename(tmp_path / "moved")
    exported = export(tmp_path / "assistant", tmp_path / "out", tmp_path / "moved")
    assert exported.commands["vLLM"][0].startswith(f"vllm serve {tmp_path / 'moved'} ")
    save_model(tiny("llama").float(), tmp_path / "other", ["<unk>", *reversed(WORDS[1:])])
    with pytest.raises(ValueError, match="whose tokenizer differs"):
        export(tmp_path / "assistant", tmp_path / "wrong", tmp_path / "other")
    change_json(tmp_path / "assistant" / "config.json", target_id=None)
    with pytest.raises(ValueError, match=r"names no target \(target_id\).*Name it: --target"):
        export(tmp_path / "assistant", tmp_path / "unnamed")
    assert not (tmp_path / "wrong").exists()
    assert not (tmp_path / "unnamed").exists()


@pytest.mark.parametrize(("speculation", "count"), [
    (SpeculationConfig("fixed", num_tokens=6), 6),
    (SpeculationConfig("threshold", num_tokens=6), 3),
    (SpeculationConfig("fixed", num_tokens=6, tree="dyspec"), 3),
])  # fmt: skip
def test_tokens_a_round(speculation: SpeculationConfig, count: int, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation).save_pretrained(tmp_path / "assistant")
    exported = export(tmp_path / "assistant", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["num_assistant_tokens"], written["num_assistant_tokens_schedule"]) == (count, "constant")
    assert f'"num_speculative_tokens":{count}' in exported.commands["vLLM"][0]
    assert f"Each round has {count} candidates (" in exported.notes[-1]


@pytest.mark.parametrize(("rates", "count"), [({"greedy": [0.55]}, 2), ({"greedy": [0.9, 0.1]}, 7),
                                              ({"sampled": [0.05]}, 1), ({"greedy": [1.0]}, 8), ({}, 3)])  # fmt: skip
def test_tokens_a_round_by_the_measured_acceptance(rates: dict[str, list[float]], count: int) -> None:
    """The least time per token of those lengths, counted here by hand: at 0.55 1.4 / 1.8525 for two candidates, against
    1.2 / 1.55 for one and 1.6 / 2.0189 for three."""
    found, reason = draft_length(SpecDecPPConfig(acceptance_by_rank=rates))
    assert found == count
    a = next(iter(rates.values()), [0.0])[0]
    assert f"acceptance of {a:.2f}" in reason if rates else "no acceptance was measured" in reason
    if rates:
        times = [(1 + 0.2 * k) / sum(a**place for place in range(k + 1)) for k in range(1, 9)]
        assert times[found - 1] == min(times)


@pytest.mark.parametrize("to", ["vllm", "sglang", "llama.cpp"])
def test_one_engine_gets_a_script(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where it was written, converts only once, and passes its arguments on: programs that note their arguments
    take the places of the engine's."""
    SpecDecPPAssistant.from_early_exit(save_target(tmp_path / "target"), 2).save_pretrained(tmp_path / "assistant")
    monkeypatch.chdir(tmp_path)
    exported = export("assistant", "my draft", to=to)
    assert list(map(str.lower, exported.commands)) == [to]
    assert any("loader" in note for note in exported.notes)
    (commands,) = exported.commands.values()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("vllm", "python", "llama-server"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> "{tmp_path}/asked"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir("/")
    runs = []
    for _ in range(2):
        subprocess.run([tmp_path / "my draft" / "serve.sh", "--port", "8001"], check=True)
        runs.append((tmp_path / "asked").read_text().splitlines())
        (tmp_path / "asked").unlink()
        (tmp_path / "my draft.gguf").touch()
    words = [shlex.split(command) for command in commands]
    assert runs[0] == [*itertools.chain(*words), "--port", "8001"]
    assert runs[1] == [*words[-1], "--port", "8001"]


def test_other_engines_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--to 'ollama' must be one of vllm, sglang, llama\.cpp"):
        export(tmp_path / "no such assistant", tmp_path / "out", to="ollama")


def test_vllm_reads_the_configs_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for vLLM's arguments: what it refuses is deleted."""
    asked: list[dict[str, Any]] = []

    class EngineArgs:
        def __init__(self, **arguments: Any) -> None:
            asked.append(arguments)

        def create_engine_config(self) -> None:
            assert Path(asked[-1]["speculative_config"]["model"], "config.json").is_file()
            if len(asked) > 1:
                raise ValueError("the draft has no tokens")

    for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.engine.arg_utils"].EngineArgs = EngineArgs  # type: ignore[attr-defined]
    SpecDecPPAssistant.from_early_exit(save_target(tmp_path / "target"), 2).save_pretrained(tmp_path / "assistant")
    exported = export(tmp_path / "assistant", tmp_path / "out", to="vllm")
    assert exported.notes[-1] == "vLLM's own loader accepts the configs of target and draft."
    assert asked[0]["model"] == str(tmp_path / "target")
    assert asked[0]["speculative_config"]["num_speculative_tokens"] == 3
    with pytest.raises(ValueError, match="has no tokens"):
        export(tmp_path / "assistant", tmp_path / "other", to="vllm")
    assert not (tmp_path / "other").exists()


def test_a_conditioned_draft_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    made = SpecDecPPAssistant.from_conditioned(target, 2, fusion=random_fusion(target))
    made.save_pretrained(tmp_path / "assistant")
    shutil.rmtree(tmp_path / "target")  # nothing is loaded to find out
    with pytest.raises(ValueError, match="in a form that no other engine has") as refusal:
        export(tmp_path / "assistant", tmp_path / "out")
    assert f"`specdecpp train --draft eagle3 --target {tmp_path / 'target'} " in str(refusal.value)
    assert f"`specdecpp export NEW --output {tmp_path / 'out'}`" in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["assistant"]


def test_a_folder_that_is_taken_is_refused_before_any_work(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    for path in (taken, taken / "notes.txt"):
        with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
            export(tmp_path / "no such assistant", path)
    assert (taken / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("something"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_failure(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SpecDecPPAssistant.from_early_exit(save_target(tmp_path / "target"), 2).save_pretrained(tmp_path / "assistant")
    seen: list[set[str]] = []

    def fail(_model: Any, folder: Path) -> None:
        seen.append({path.name for path in folder.iterdir()})
        raise error

    monkeypatch.setattr(serving, "_check_reloaded", fail)
    with pytest.raises(type(error)):
        export(tmp_path / "assistant", tmp_path / "deep" / "out")
    assert "model.safetensors" in seen[0], "all of it was written"
    assert {path.name for path in tmp_path.iterdir()} == {"target", "assistant"}
