"""Nothing from a repository is run: no pickle, no code; no token is outside the vocabulary."""

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from support.files import repos
from support.files.released_heads import Payload
from support.runs.hub_server import HubServer
from support.targets.models import prompt, tiny
from support.targets.snapshots import hash_of
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specdecpp
from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.trees.growth import Growth

PACKAGE = Path(hf_specdecpp.__file__).parent
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "get_class_from_dynamic_module", "import_module"}


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


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call with the name of what is called, without the module."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func).split(".")[-1], node) for node in found]


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def unsafe(path: Path) -> list[str]:
    """Imports and calls of a module that could run what a repository says."""
    found, tree = [], ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += sorted(UNSAFE_MODULES & {name.split(".")[0] for name in names})
    for name, call in calls(tree):
        said, function = ast.unparse(call), ast.unparse(call.func)
        is_safe = name not in UNSAFE_CALLS or (name == "eval" and isinstance(call.func, ast.Attribute))
        is_safe &= keyword(call, "trust_remote_code") in (None, "False")
        if name == "from_pretrained" and function.startswith("Auto"):
            is_safe &= path.name == "loading.py"  # one place loads
            is_safe &= keyword(call, "trust_remote_code") == "False"
            is_safe &= keyword(call, "use_safetensors") == "True" or "AutoModel" not in function
        if function in ("torch.load", "np.load", "numpy.load"):
            is_safe &= path.name == "conversion.py" and keyword(call, "weights_only") == "True"
        found += [] if is_safe else [said]
    return found


def test_no_module_runs_what_a_repository_says() -> None:
    assert {path: found for path in PACKAGE.rglob("*.py") if (found := unsafe(path))} == {}


def test_unsafe_calls_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import pickle\ntorch.load(path)\nAuto.from_pretrained(name, trust_remote_code=True)")
    assert len(unsafe(path)) == 3


@pytest.mark.parametrize("name", ["acceptance_head.safetensors", "adapter/adapter_model.safetensors"])
def test_pickle_beside_a_missing_file(tmp_path: Path, hub: HubServer, bomb: bytes, mark: Path, name: str) -> None:
    target = tiny("llama")
    adapter = Path(repos.save_adapter(early_exit(target, 2), tmp_path / "peft"))
    folder = repos.save_assistant(tmp_path / "a")
    repos.change_json(folder / "config.json", adapter=True)
    adapter.rename(folder / "adapter")
    (folder / name).unlink()
    names = ("pytorch_model.bin", "acceptance_head.bin", "acceptance_head.pt", "model.safetensors.bin")
    for each in (*names, "adapter/adapter_model.bin"):
        (folder / each).write_bytes(bomb)
    hub.commit("org/head", repos.files_of(folder))
    hub.commit("org/adapter", repos.files_of(folder / "adapter"))
    for repository, error in ((folder, FileNotFoundError), ("org/head", EntryNotFoundError)):
        with pytest.raises(error, match=name):
            SpecDecPPAssistant.from_pretrained(repository, target)
        if name.startswith("adapter"):
            alone = folder / "adapter" if repository is folder else "org/adapter"
            with pytest.raises(error, match="adapter_model.safetensors"):
                SpecDecPPAssistant.from_early_exit(target, 2, adapter=alone)
    assert not mark.exists()
    assert not [path for _, path, _ in hub.requests if path.endswith((".bin", ".pt"))]


def test_pickle_in_the_repository_of_the_draft(tmp_path: Path, hub: HubServer, bomb: bytes, mark: Path) -> None:
    files = repos.files_of(repos.save_model(tiny("llama"), tmp_path / "draft"))
    del files["model.safetensors"]
    hub.commit("org/draft", {**files, "pytorch_model.bin": bomb})
    repos.commit_head_of_a_draft(hub, tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        SpecDecPPAssistant.from_pretrained("org/head")
    assert not mark.exists()
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".bin")]


# What peft 0.21 does with each: truncates, replaces or subtracts from the model's own weights, needs data, wraps other
# modules, or puts layers in another order.
HOSTILE: dict[str, dict[str, Any]] = {
    "kasa": {"kasa_config": {"beta": 1e-4, "gamma": 1e-3}},
    **{kind: {"init_lora_weights": kind} for kind in ("pissa", "pissa_niter_4", "olora", "eva", "lora_ga", "mica")},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    "corda": {"init_lora_weights": "corda", "corda_config": {"corda_method": "kpm"}},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "bias of the adapter": {"lora_bias": True},
    "trainable tokens": {"trainable_token_indices": [1, 2]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "alora": {"alora_invocation_tokens": [1]},
    "target_parameters": {"target_parameters": ["mlp.gate_proj.weight"]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "tied": {"ensure_weight_tying": True},
    "velora": {"velora_config": {"num_groups": 4}},
    "bdlora": {"use_bdlora": {"nblocks": 2}},
    "a later version": {"new_kind_config": {"gamma": 1}},
}


@pytest.mark.daily("kasa", "olora", "mica", "dora", "trainable tokens", "target_parameters", "velora")
@pytest.mark.parametrize("kind", HOSTILE)
def test_adapter_cannot_change_the_target(tmp_path: Path, kind: str) -> None:
    target = tiny("qwen2").float()
    folder = Path(repos.save_adapter(early_exit(target, 2), tmp_path / "peft"))
    repos.change_json(folder / "adapter_config.json", **HOSTILE[kind])
    before = hash_of(target)
    for merge in (False, True):
        with pytest.raises(ValueError, match=f"has .*{next(iter(HOSTILE[kind]))}=.* more than an ordinary LoRA"):
            SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge)
    with pytest.raises(ValueError, match="more than an ordinary LoRA"):
        SpecDecPPAssistant.from_draft(target, adapter=folder)
    assert hash_of(target) == before


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "name", ["base_model.model.model.layers.0.mlp.down_proj.weight", "model.norm.weight", "x.lora_A"]
)
def test_adapter_brings_no_foreign_tensors(tmp_path: Path, name: str, merge: bool) -> None:
    """PEFT loads any tensor whose name is in the model."""
    target = tiny("qwen2")
    folder = Path(repos.save_adapter(early_exit(target, 2), tmp_path / "peft"))
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.zeros(32, 48, dtype=torch.float64)}, path)
    before = hash_of(target)
    with pytest.raises(ValueError, match="does not fit"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge)
    assert hash_of(target) == before


@pytest.mark.parametrize("merge", [False, True])
def test_no_tensor_of_the_target_is_written_to(tmp_path: Path, merge: bool) -> None:
    """Nor while an adapter is used, detached, or found not to fit in the midst of its modules."""
    target = tiny("qwen2")
    folder = Path(repos.save_adapter(early_exit(target, 2), tmp_path / "peft"))
    before, expected = hash_of(target), repos.greedy(target)
    versions = {name: tensor._version for name, tensor in target.named_parameters()}
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge)
    assert repos.greedy(target, assistant) == expected
    assistant.detach()
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    last = max(name for name in tensors if "lora_B" in name)
    save_file({**tensors, last: torch.zeros(7, 4)}, path)
    with pytest.raises(ValueError, match="does not fit"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge)
    assert hash_of(target) == before
    assert {name: tensor._version for name, tensor in target.named_parameters()} == versions


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize("tree", ["dyspec", "dyspec-exact"])
def test_huge_weights_do_not_hang_tree_growth(monkeypatch: pytest.MonkeyPatch, tree: str, size: float) -> None:
    target, draws = tiny("llama"), []
    draw = Growth.draw_best

    def count(growth: Growth) -> int | None:
        draws.append(growth)
        assert len(draws) < 1000
        return draw(growth)

    monkeypatch.setattr(Growth, "draw_best", count)
    head = repos.head_for(target, inputs="before")
    with torch.no_grad():
        for place, parameter in enumerate(head.parameters()):
            parameter.copy_(size * (-1.0) ** torch.arange(place, place + parameter.numel()).view(parameter.shape))
    knobs = SpeculationConfig(rule="threshold", tree=tree, tree_budget=8)  # type: ignore[arg-type]
    assistant = SpecDecPPAssistant.from_draft(tiny("llama", seed=1), target, head=head, speculation=knobs)
    assert target.generate(prompt(), assistant_model=assistant, do_sample=True, max_new_tokens=6).shape[1] == 18
    assert draws


@pytest.fixture
def hostile(tmp_path: Path, mark: Path) -> Path:
    """An assistant with code in all the places where transformers looks for some."""
    folder = repos.save_assistant(tmp_path / "hostile")
    code = f"open({str(mark)!r}, 'w').write('run')\n"
    for name in ("configuration.py", "modeling.py", "tokenization.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code + "def generate(*args, **kwargs): pass\n")
    auto_map = {
        "AutoConfig": "configuration.Config",
        "AutoModelForCausalLM": "modeling.Model",
        "AutoTokenizer": ["tokenization.Tokenizer", None],
    }
    repos.change_json(folder / "config.json", auto_map=auto_map)
    return folder


@pytest.mark.parametrize("from_hub", [False, True])
def test_code_is_not_run(hub: HubServer, hostile: Path, mark: Path, tmp_path: Path, from_hub: bool) -> None:
    repos.publish_pair(hub)
    hub.commit("org/hostile", repos.files_of(hostile))
    name = "org/hostile" if from_hub else str(hostile)
    target = tiny("llama")
    for assistant in (SpecDecPPAssistant.from_pretrained(name, target), AutoModelForCausalLM.from_pretrained(name)):
        assert type(assistant) is SpecDecPPAssistant
        assistant.attach(target) if assistant.drafter is None else None
        assert repos.greedy(target, assistant) == repos.greedy(target)
    AutoTokenizer.from_pretrained(name)
    pipeline("text-generation", model=target, tokenizer=repos.tokenizer(), assistant_model=name)(repos.TEXT)
    assert not mark.exists()
    assert not [path for _, path, _ in hub.requests if path.endswith(".py")]


def test_code_beside_a_tokenizer_is_not_run(hub: HubServer, tmp_path: Path, mark: Path) -> None:
    """Nor asked about at the terminal, as transformers does where it is not told."""
    files = repos.files_of(repos.save_model(tiny("llama"), tmp_path / "target"))
    described = json.loads(files["tokenizer_config.json"]) | {
        "tokenizer_class": "Unheard", "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}
    }  # fmt: skip
    code = f"open({str(mark)!r}, 'w').write('run')\n".encode()
    files |= {"tokenizer_config.json": json.dumps(described).encode(), "tokenization.py": code}
    hub.commit("org/target", files)
    hub.commit("org/head", repos.files_of(repos.save_assistant(tmp_path / "a")))
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained("org/head")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Codec.from_pretrained("org/target")
    assert not mark.exists()


def test_code_of_the_draft_is_not_run(hub: HubServer, tmp_path: Path, mark: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    code = f"open({str(mark)!r}, 'w').write('run')\n".encode()
    config = json.dumps({"model_type": "unheard_of", "auto_map": auto_map}).encode()
    hub.commit("org/draft", {"config.json": config, "configuration.py": code, "modeling.py": code})
    repos.commit_head_of_a_draft(hub, tmp_path)
    for load in (SpecDecPPAssistant.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load("org/head")
    with pytest.raises(ValueError, match="trust_remote_code"):
        SpecDecPPAssistant.from_draft("org/draft")
    assert not mark.exists()
