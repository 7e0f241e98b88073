"""A repository is data: whatever its fields and tensors say, it is refused in a sentence or drafts, and soon."""

import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files.damage import CODE, MAKERS, Sound, bounded, check, copied, damaged, mappings
from support.files.repos import change_json, save_assistant, save_model
from support.targets.models import tiny
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_specdecpp.assistant import SpecDecPPAssistant

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sound]:
    return {kind: make(tmp_path_factory.mktemp("sound")) for kind, make in MAKERS.items()}


def nested(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with some of its fields exchanged, those of inner mappings too; `...` takes one out."""
    for name, value in changes.items():
        raw[name] = nested(raw[name], value) if isinstance(value, dict) and isinstance(raw.get(name), dict) else value
    return {name: value for name, value in raw.items() if value is not ...}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.5, "original_max_position_embeddings": 0}
MOST = {"full_attention": {"partial_rotary_factor": 2**22}}
LINEAR = {"full_attention": {"rope_type": "linear", "factor": 1.0}}  # beside the `partial_rotary_factor` that is there
ODD = {"head_dim": 1, "num_attention_heads": 32, "num_key_value_heads": 16}
LAYERS = "num_hidden_layers={} must be a whole number from 1 to 64"
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    # Numbers that would take time or memory.
    ("EAGLE-3", {"vocab_size": 2**22}, "was made for 4194304 token ids, and there are 48 in LlamaForCausalLM"),
    ("trained layer", {"eagle3": {"layer": {"vocab_size": 2**22}}}, "was made for 4194304 token ids, and there are 48"),
    ("trained layer", {"eagle3": {"layer": {"num_hidden_layers": 10**6}}}, f"layer.{LAYERS.format(10**6)}"),
    ("DFlash", {"num_hidden_layers": 64, "layer_types": ...}, "tensors of 2 layers, and config.json says 64"),
    ("DFlash", {"vocab_size": 2**22}, "was made for 4194304 token ids, and there are 12"),
    ("trained block", {"dflash": {"layer": {"num_hidden_layers": 2 * 10**4}}}, f"layer.{LAYERS.format(2 * 10**4)}"),
    ("Gemma 4", {"text_config": {"num_hidden_layers": 10**6, "layer_types": ...}}, LAYERS.format(10**6)),
    ("Gemma 4", {"text_config": {"vocab_size": 2**22}}, "was made for 4194304 token ids, and there are 12"),
    # Values that Python, torch or transformers stumble over.
    ("DFlash", {"dflash_config": 5}, "dflash_config='5' of config.json must be a mapping"),
    ("EAGLE-3", {"rope_parameters": YARN}, "No EAGLE-3 draft can be built .*division by zero"),
    ("trained layer", {"eagle3": {"num_reads": 0, "reads": [0]}}, "reads=.0. must name 0 layers"),
    ("trained block", {"dflash": {"layer": {"hidden_size": ...}}}, "layer.hidden_size is missing"),
    ("DFlash", {"dflash_config": {"input_embedding_scale": float("nan")}}, "_scale=nan must be a finite number"),
    ("Gemma 4", {"text_config": {"model_type": "llama"}}, "text_config.model_type='llama' must be 'gemma4_text'"),
    ("Gemma 4", {"text_config": {"num_key_value_heads": 3}}, "must be a multiple of num_key_value_heads=3"),
    ("Gemma 4", {"text_config": {"per_layer_config": {"1": {"num_key_value_heads": 65}}}}, "multiple of .*_heads=65"),
    ("Gemma 4", {"text_config": {"num_global_key_value_heads": 64}}, "multiple of num_global_key_value_heads=64"),
    ("Gemma 4", {"text_config": {"rope_parameters": {"sliding_attention": None}}}, "must have both full_attention and"),
    ("Gemma 4", {"text_config": {"rope_parameters": MOST}}, "rotary_factor=4194304 must be a number from 0 to 1"),
    ("Gemma 4", {"text_config": {"rope_parameters": LINEAR}}, "rotate a part of each head"),
    ("EAGLE-3", ODD, "heads of .1. numbers cannot be rotated"),
    ("conditioned", {"fusion": {"reads": [0, 5]}}, "reads layers .5. of its target, and LlamaForCausalLM has 3"),
    ("MTP", {"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a whole number"),
    ("MTP", {"num_hidden_layers": ...}, "has num_hidden_layers=None and 1 multi-token layers"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), CONFIGS)
def test_a_config_that_makes_no_sense(
    sound: dict[str, Sound], tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    folder = copied(sound[kind], tmp_path / "damaged")
    path = folder / "config.json"
    path.write_text(json.dumps(nested(json.loads(path.read_text()), changes)))
    with bounded(kind), pytest.raises(ValueError, match=message):
        sound[kind].load(folder, sound[kind].target)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, '{"a":' * 60 + "1" + "}" * 60, '{"a": 1' + "0" * 5000 + "}"])
@pytest.mark.parametrize("kind", ["early exit", "EAGLE-3", "MTP"])
def test_a_config_that_is_none(sound: dict[str, Sound], tmp_path: Path, kind: str, content: str) -> None:
    folder = copied(sound[kind], tmp_path / "damaged")
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"not valid JSON|has model_type 'list', not|instead of named fields"):
        sound[kind].load(folder, sound[kind].target)


@pytest.mark.parametrize("rope", [..., {"rope_type": "default", "rope_theta": ...}, None])
def test_rotary_parameters_may_be_left_out(sound: dict[str, Sound], tmp_path: Path, rope: Any) -> None:
    for kind, field in (("trained layer", "eagle3"), ("trained block", "dflash")):
        folder = copied(sound[kind], tmp_path / "damaged")
        path = folder / "config.json"
        raw = nested(json.loads(path.read_text()), {field: {"layer": {"rope_parameters": rope}}})
        path.write_text(json.dumps(raw))
        assert not check(sound[kind], folder, kind)


def test_a_draft_that_an_assistant_names_is_checked_as_well(sound: dict[str, Sound], tmp_path: Path) -> None:
    draft = copied(sound["EAGLE-3"], tmp_path / "draft")
    (draft / "config.json").write_text("[1]")
    folder = save_assistant(tmp_path / "ours", draft_kind="eagle3", draft_id=str(draft), head=None, draft_layers=None)
    with pytest.raises(ValueError, match="holds a list instead of named fields"):
        SpecDecPPAssistant.from_pretrained(folder)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_hidden_layers": 10**6}, "has num_hidden_layers=1000000, and its files have 12 tensors"),
    ({"intermediate_size": 7}, "cannot be loaded as a model: RuntimeError.*Download it again"),
    ({"use_cache": [1]}, "cannot be loaded as a model: Strict.*use_cache.*Download it again"),
])  # fmt: skip
def test_an_independent_draft(sound: dict[str, Sound], tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = copied(sound["independent"], tmp_path / "damaged")
    change_json(folder / "draft" / "config.json", **changes)
    with bounded("independent"), pytest.raises(ValueError, match=f"(?s){message}"):
        sound["independent"].load(folder, sound["independent"].target)


@pytest.mark.daily("early exit-fast", "DFlash of transformers-fast", takes=3)
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "slow"])
@pytest.mark.parametrize("kind", MAKERS)
def test_damage_is_refused_in_a_sentence(sound: dict[str, Sound], tmp_path: Path, kind: str, is_whole: bool) -> None:
    whole = sound[kind]
    count = 2000 if is_whole else 25  # as many as take about a second
    assert not check(whole, whole.folder, "as it is"), "it is sound before it is damaged"
    refused = 0
    for seed in range(count):
        what = f"{kind} {seed}: {damaged(whole, tmp_path / 'damaged', random.Random(f'{kind} {seed}'))}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            refused += check(whole, tmp_path / "damaged", what)
    assert 0 < refused < count


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is made of a config that names code, whoever makes it."""
    theirs = PreTrainedModel.__init__

    def parts(config: Any) -> Iterator[Any]:
        yield config
        for value in vars(config).values():
            if isinstance(value, PreTrainedConfig):
                yield from parts(value)

    def make(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        for part in parts(config):
            ways = {part._attn_implementation, part._experts_implementation}
            assert ways <= {None, "sdpa", "eager", "grouped_mm"}, f"transformers would fetch {ways}"
            assert not {"quantization_config", "auto_map", "trust_remote_code"} & set(vars(part))
        theirs(model, config, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "__init__", make)


@pytest.mark.usefixtures("no_code")
def test_code_would_be_seen() -> None:
    with pytest.raises(AssertionError, match="transformers would fetch"):
        LlamaForCausalLM(LlamaConfig(**CODE))


@pytest.mark.daily(
    "early exit", "lookup", "trained block", "EAGLE-3.1", "EAGLE-3 with embeddings", "DFlash of transformers",
    "Gemma 4, clusters", "MTP of Inkling",
)  # fmt: skip
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.usefixtures("no_code")
def test_no_field_of_a_repository_names_code(sound: dict[str, Sound], tmp_path: Path, kind: str) -> None:
    """At whatever depth of whichever config it stands, transformers never sees it."""
    for path in [path.relative_to(sound[kind].folder) for path in sound[kind].folder.rglob("*config.json")]:
        whole = json.loads((sound[kind].folder / path).read_text())
        for place in range(sum(isinstance(each, dict) for each in mappings(whole))):
            raw = json.loads(json.dumps(whole))
            [each for each in mappings(raw) if isinstance(each, dict)][place].update(CODE)
            folder = copied(sound[kind], tmp_path / "hostile")
            (folder / path).write_text(json.dumps(raw))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*does not know and ignores")
                check(sound[kind], folder, f"{path} {place}")


@pytest.mark.parametrize("where", ["attn_implementation", "_attn_implementation_internal", "experts_implementation"])
def test_no_kernel_of_an_independent_draft(tmp_path: Path, where: str) -> None:
    folder = save_model(tiny("llama"), tmp_path / "draft")
    for value in ("kernels-community/x", {"text_config": "kernels-community/x"}):
        change_json(Path(folder) / "config.json", inner={where: value})
        with pytest.raises(ValueError, match=f"{where}=.*kernels-community/x.*code that transformers would fetch"):
            SpecDecPPAssistant.from_draft(folder)
