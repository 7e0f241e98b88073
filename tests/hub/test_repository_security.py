"""Nothing from a repository is run: no pickle, no code. What is loaded is pinned."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from support.hub_server import HubServer
from support.models import VOCAB_SIZE, assistant_for, prompt, tiny
from support.repos import (
    TEXT,
    change_json,
    files_of,
    greedy,
    head_for,
    publish_pair,
    save_adapter,
    save_assistant,
    save_model,
    tokenizer,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specdecpp
from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.early_exit import early_exit

PACKAGE = Path(hf_specdecpp.__file__).parent
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "get_class_from_dynamic_module", "import_module"}


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "run"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists once something foreign was run."""
    return tmp_path / "mark"


@pytest.fixture
def bomb(mark: Path) -> bytes:
    content = pickle.dumps(Payload(mark))
    pickle.loads(content)  # noqa: S301 - our own, to see that it works
    assert mark.exists()
    mark.unlink()
    return content


# --- the source ---


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call with the name of what is called, without the module."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func).split(".")[-1], node) for node in found]


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_source(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not UNSAFE_MODULES & {name.split(".")[0] for name in names}
    for name, call in calls(tree):
        assert name not in UNSAFE_CALLS or (name == "eval" and isinstance(call.func, ast.Attribute)), ast.unparse(call)
        assert keyword(call, "trust_remote_code") in (None, "False"), ast.unparse(call)
        if ast.unparse(call.func) in ("torch.load", "np.load", "numpy.load"):
            assert path.name == "conversion.py"
            assert keyword(call, "weights_only") == "True"


# --- pickles ---


def test_pickle_beside_a_missing_head(tmp_path: Path, hub: HubServer, bomb: bytes, mark: Path) -> None:
    folder = save_assistant(tmp_path / "a")
    (folder / "acceptance_head.safetensors").unlink()
    for name in ("pytorch_model.bin", "acceptance_head.bin", "acceptance_head.pt", "model.safetensors.bin"):
        (folder / name).write_bytes(bomb)
    hub.commit("org/head", files_of(folder))
    with pytest.raises(FileNotFoundError, match=r"acceptance_head\.safetensors is missing"):
        SpecDecPPAssistant.from_pretrained(folder)
    with pytest.raises(EntryNotFoundError, match=r"acceptance_head\.safetensors"):
        SpecDecPPAssistant.from_pretrained("org/head")
    assert not mark.exists()
    assert not [path for _, path, _ in hub.requests if path.endswith((".bin", ".pt"))]


def test_pickle_beside_a_missing_adapter(tmp_path: Path, hub: HubServer, bomb: bytes, mark: Path) -> None:
    target = tiny("llama")
    adapter = Path(save_adapter(early_exit(target, 2), tmp_path / "peft"))
    folder = save_assistant(tmp_path / "a")
    change_json(folder / "config.json", adapter=True)
    adapter.rename(folder / "adapter")
    (folder / "adapter/adapter_model.safetensors").rename(folder / "adapter/adapter_model.bin")
    (folder / "adapter/adapter_model.bin").write_bytes(bomb)
    hub.commit("org/head", files_of(folder))
    hub.commit("org/adapter", files_of(folder / "adapter"))
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors is missing"):
        SpecDecPPAssistant.from_pretrained(folder, target)
    with pytest.raises(EntryNotFoundError, match=r"adapter/adapter_model\.safetensors"):
        SpecDecPPAssistant.from_pretrained("org/head", target)
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors is missing"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder / "adapter")
    with pytest.raises(EntryNotFoundError, match=r"adapter_model\.safetensors"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter="org/adapter")
    assert not mark.exists()
    assert not [path for _, path, _ in hub.requests if path.endswith(".bin")]


def test_pickle_in_the_repository_of_the_draft(tmp_path: Path, hub: HubServer, bomb: bytes, mark: Path) -> None:
    files = files_of(save_model(tiny("llama"), tmp_path / "draft"))
    del files["model.safetensors"]
    hub.commit("org/draft", {**files, "pytorch_model.bin": bomb})
    hub.commit("org/head", files_of(save_assistant(tmp_path / "a", draft_kind="independent", draft_id="org/draft")))
    with pytest.raises(OSError, match="safetensors"):
        SpecDecPPAssistant.from_pretrained("org/head")
    assert not mark.exists()
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".bin")]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", ["foreign tensor", "bias", "pissa"])
def test_adapter_cannot_overwrite_the_target(tmp_path: Path, kind: str, merge: bool) -> None:
    """PEFT loads any tensor whose name is in the model, and some adapters change the model's own weights."""
    target = tiny("qwen2")
    folder = Path(save_adapter(early_exit(target, 2), tmp_path / "peft"))
    path = folder / "adapter_model.safetensors"
    if kind == "foreign tensor":
        name = "base_model.model.model.layers.0.mlp.down_proj.weight"
        save_file({**load_file(path), name: torch.zeros(32, 48, dtype=torch.float64)}, path)
    else:
        changes: dict[str, Any] = {"bias": "all"} if kind == "bias" else {"init_lora_weights": "pissa"}
        change_json(folder / "adapter_config.json", **changes)
    before = target(prompt()).logits
    with pytest.raises(ValueError, match="does not fit" if kind == "foreign tensor" else "overwrites the model's own"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge)
    assert torch.equal(target(prompt()).logits, before)


# --- code ---


@pytest.fixture
def hostile(tmp_path: Path, mark: Path) -> Path:
    """An assistant with code in all the places where transformers looks for some."""
    folder = save_assistant(tmp_path / "hostile")
    code = f"open({str(mark)!r}, 'w').write('run')\n"
    for name in ("configuration.py", "modeling.py", "tokenization.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code + "def generate(*args, **kwargs): pass\n")
    auto_map = {
        "AutoConfig": "configuration.Config",
        "AutoModelForCausalLM": "modeling.Model",
        "AutoTokenizer": ["tokenization.Tokenizer", None],
    }
    change_json(folder / "config.json", auto_map=auto_map)
    return folder


@pytest.mark.parametrize("from_hub", [False, True])
def test_code_is_not_run(hub: HubServer, hostile: Path, mark: Path, tmp_path: Path, from_hub: bool) -> None:
    publish_pair(hub, tmp_path)
    hub.commit("org/hostile", files_of(hostile))
    name = "org/hostile" if from_hub else str(hostile)
    target = tiny("llama")
    for assistant in (SpecDecPPAssistant.from_pretrained(name, target), AutoModelForCausalLM.from_pretrained(name)):
        assert type(assistant) is SpecDecPPAssistant
        assistant.attach(target) if assistant.drafter is None else None
        assert greedy(target, assistant) == greedy(target)
    AutoTokenizer.from_pretrained(name)
    with pytest.raises(ValueError, match="must be attached"):
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=name)(TEXT)
    assert not mark.exists()
    assert not [path for _, path, _ in hub.requests if path.endswith(".py")]


def test_code_of_the_draft_is_not_run(hub: HubServer, tmp_path: Path, mark: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    code = f"open({str(mark)!r}, 'w').write('run')\n".encode()
    config = json.dumps({"model_type": "unheard_of", "auto_map": auto_map}).encode()
    hub.commit("org/draft", {"config.json": config, "configuration.py": code, "modeling.py": code})
    hub.commit("org/head", files_of(save_assistant(tmp_path / "a", draft_kind="independent", draft_id="org/draft")))
    for load in (SpecDecPPAssistant.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load("org/head")
    with pytest.raises(ValueError, match="trust_remote_code"):
        SpecDecPPAssistant.from_draft("org/draft")
    assert not mark.exists()


# --- pinned, and inside the vocabulary ---


def test_commits_are_stored_and_used(hub: HubServer, tmp_path: Path) -> None:
    target_commit, draft_commit = publish_pair(hub, tmp_path)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    AutoTokenizer.from_pretrained("org/target")
    assistant = SpecDecPPAssistant.from_draft("org/draft", target, head=head_for(target))
    assistant.save_pretrained(tmp_path / "a")
    stored = json.loads((tmp_path / "a/config.json").read_text())
    assert (stored["target_id"], stored["target_revision"]) == ("org/target", target_commit)
    assert (stored["draft_id"], stored["draft_revision"]) == ("org/draft", draft_commit)
    assert len(stored["vocab_hash"]) == 64

    hub.commit("org/draft", files_of(save_model(tiny("llama", seed=9), tmp_path / "new")))
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "a", target, force_download=True)
    weights = [a.ready_drafter().model.lm_head.weight for a in (assistant, again)]
    assert torch.equal(*weights), "the draft has moved on, the assistant has not"


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE + 8])
def test_tokens_stay_inside_the_vocabulary(rows: int, attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where residuals are sampled with a draft that has more ids, or fewer, than the target."""
    target = tiny("llama")
    if attached:
        assistant = SpecDecPPAssistant.from_draft(tiny("llama", seed=3, vocab_size=rows), target)
    else:
        assistant = assistant_for(target, attached=False)
        assistant.drafter = SpecDecPPAssistant.from_draft(tiny("llama", seed=3, vocab_size=rows)).drafter
    assistant.speculation = SpeculationConfig("fixed", num_tokens=4)
    torch.manual_seed(0)
    seen: Tensor = target.generate(
        prompt(), assistant_model=assistant, do_sample=True, temperature=5.0, top_k=0, max_new_tokens=300
    )
    assert int(seen.min()) >= 0
    assert int(seen.max()) < VOCAB_SIZE
    assert seen.shape[1] == 312
