"""Released SpecDec++ heads judge the same after conversion, and nothing unsafe or ambiguous is converted."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from support.files.released_heads import SIZE, Payload, ReleasedHead, save_bin, save_mixin, write_config
from support.targets.models import assistant_for, tiny
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.conversion import convert, read_released_head
from hf_specdecpp.hub.repository import load_config, load_head

HIDDEN = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0))


def assert_same(head: AcceptanceHead, released: ReleasedHead) -> None:
    assert_close(head(HIDDEN).sigmoid(), released.acceptance(HIDDEN), rtol=1e-5, atol=1e-6)


def load(folder: Path) -> AcceptanceHead:
    repository = Repository(str(folder))
    return load_head(repository, load_config(repository))


def save_plain(
    head: ReleasedHead, folder: Path, drop: tuple[str, ...] = (), changed: dict[str, Tensor] | None = None
) -> Path:
    """safetensors without metadata, less the tensors whose names start with `drop`, with others `changed`."""
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items() if not name.startswith(drop)}
    save_file(tensors | (changed or {}), write_config(folder, **head.sizes) / "model.safetensors")
    return folder


@pytest.mark.parametrize("save", [save_bin, save_mixin])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth", range(5))
def test_released_heads_are_recognised_and_judge_the_same(tmp_path: Path, depth: int, tied: bool, save: Any) -> None:
    released = ReleasedHead(depth, tied)
    convert(save(released, tmp_path / "released"), tmp_path / "out")
    head = load(tmp_path / "out")
    assert_same(head, released)
    assert (head.num_blocks, head.inputs, head.tied) == (depth, "after", tied and depth > 1)
    assert len(head.blocks) == (min(depth, 1) if tied else depth)


def test_the_test_can_tell_tied_from_untied() -> None:
    tied, untied = ReleasedHead(3, tied=True), ReleasedHead(3, tied=False)
    assert (tied.acceptance(HIDDEN) - untied.acceptance(HIDDEN)).abs().max() > 1e-3
    names = [f"model.{i}.linear.weight" for i in range(3)]
    assert len({tied.state_dict()[name].data_ptr() for name in names}) == 1
    assert len({untied.state_dict()[name].data_ptr() for name in names}) == 3


def test_safetensors_writer_and_any_file_name(tmp_path: Path) -> None:
    released = ReleasedHead(3)
    save_model(released, str(write_config(tmp_path, **released.sizes) / "acc_head.safetensors"))
    assert_same(read_released_head(tmp_path), released)


def test_copies_of_one_block_are_tied(tmp_path: Path) -> None:
    released = ReleasedHead(3)
    head = read_released_head(save_plain(released, tmp_path))
    assert head.tied
    assert_same(head, released)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("save", [save_bin, save_mixin])
def test_stored_as_float32(tmp_path: Path, dtype: torch.dtype, save: Any) -> None:
    released = ReleasedHead(3).to(dtype)
    convert(save(released, tmp_path / "released"), tmp_path / "out")
    head = load(tmp_path / "out")
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert_same(head, released.float())


def test_the_folder_and_its_config(tmp_path: Path) -> None:
    source = save_bin(ReleasedHead(3), tmp_path / "released")
    models = {"draft_id": "org/draft", "draft_revision": "abc", "target_id": "org/target", "target_revision": "def"}
    convert(source, tmp_path / "out", **models)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["acceptance_head.safetensors", "config.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "specdecpp"
    assert config["head"] | {"num_blocks": 3, "tied": True, "inputs": "after", "hidden_size": SIZE} == config["head"]
    assert (config["draft_id"], config["draft_revision"]) == ("org/draft", "abc")
    assert (config["target_id"], config["target_revision"]) == ("org/target", "def")


def test_an_assistant_without_a_head_has_none_to_load(tmp_path: Path) -> None:
    assistant_for(tiny("llama"), attached=False).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no acceptance head"):
        load(tmp_path)


def assert_refused(folder: Path, match: str, error: Any = ValueError) -> None:
    out = folder.with_name("refused")
    with pytest.raises(error, match=match):
        convert(folder, out)
    assert not out.exists()


@pytest.mark.parametrize("says", [2, 4])
def test_another_depth_than_the_config_says(tmp_path: Path, says: int) -> None:
    folder = save_bin(ReleasedHead(3), tmp_path / "in")
    write_config(folder, hidden_size=SIZE, num_layers=says)
    assert_refused(folder, f"hidden_size=6, num_layers={says}.*do not belong together")


def with_bias(value: float, name: str = "model.0.linear.bias", depth: int = 3) -> ReleasedHead:
    """In float64."""
    released = ReleasedHead(depth).double()
    released.state_dict()[name][1] = value
    return released


WHOLE = {"model.0.bias": torch.zeros(2, dtype=torch.int64)}
WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no output layer": (lambda to: save_plain(ReleasedHead(1), to, drop=("model.1.",)), r"not fit .*model\.1\.weight"),
    "whole numbers": (
        lambda to: save_plain(ReleasedHead(0), to, changed=WHOLE),
        r"model\.0\.bias has the shape of no floating point tensor, and should have \[2\]",
    ),
    "not a number": (lambda to: save_bin(with_bias(torch.nan), to), r"NaN or infinite .*model\.0\.linear\.bias"),
    "infinite": (lambda to: save_mixin(with_bias(torch.inf), to), r"NaN or infinite .*model\.0\.linear\.bias"),
    "too large": (lambda to: save_bin(with_bias(1e300, "model.0.bias", 0), to), r"NaN or infinite .*model\.0\.bias"),
}  # fmt: skip


@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_that_are_none(tmp_path: Path, damage: str) -> None:
    save, match = WEIGHTS[damage]
    save(tmp_path / "in")
    assert_refused(tmp_path / "in", match)


def test_another_size_than_the_config_says(tmp_path: Path) -> None:
    folder = save_bin(ReleasedHead(3), tmp_path / "in")
    write_config(folder, hidden_size=8, num_layers=3)
    assert_refused(folder, r"hidden_size=8.* in model\.0\.linear\.bias, .*the shape \[6\], and should have \[8\]")


@pytest.mark.parametrize(("text", "match"), [
    ("{", "not valid JSON"),
    ("[]", "hidden_size=None and num_layers=None"),
    ('{"hidden_size": "6", "num_layers": 3}', "hidden_size='6'"),
    ('{"hidden_size": 6, "num_layers": true}', "num_layers=True"),
    ('{"hidden_size": 6, "num_layers": -1}', "num_layers=-1"),
    ('{"hidden_size": 6, "num_layers": 10000000}', "num_layers=10000000; .* from 0 to 64"),
    ('{"model_type": "specdecpp"}', "in the format of hf_specdecpp already"),
])  # fmt: skip
def test_config_of_something_else(tmp_path: Path, text: str, match: str) -> None:
    folder = save_bin(ReleasedHead(3), tmp_path / "in")
    (folder / "config.json").write_text(text)
    assert_refused(folder, match)


def test_missing_files(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "in", hidden_size=SIZE, num_layers=3)
    assert_refused(folder, r"no safetensors file and no pytorch_model\.bin", error=FileNotFoundError)
    (folder / "config.json").unlink()
    assert_refused(folder, r"config\.json is missing, which has the head.s size", error=FileNotFoundError)


def test_several_files(tmp_path: Path) -> None:
    folder = save_mixin(ReleasedHead(1), tmp_path / "in")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert_refused(folder, r"several safetensors files \(a\.safetensors, b\.safetensors\)")
    (folder / "a.safetensors").rename(folder / "model.safetensors")
    read_released_head(folder)


def malicious(folder: Path, proof: Path, form: str) -> None:
    path = folder / "pytorch_model.bin"
    if form == "bare":
        path.write_bytes(pickle.dumps(Payload(proof)))
    elif form == "among tensors":
        torch.save({**ReleasedHead(3).state_dict(), "payload": Payload(proof)}, path)
    else:
        torch.save(ReleasedHead(3).state_dict(), path, pickle_module=smuggler(proof))


def smuggler(proof: Path) -> Any:
    """A pickle module whose streams run a command before they yield the real tensors, and leave no trace in these."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, protocol: int = 2) -> None:
            file.write(b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR0")  # os.system('touch ...'), drop
            super().__init__(file, protocol)

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


FORMS = ["bare", "among tensors", "before the tensors"]


@pytest.mark.parametrize("form", FORMS)
def test_the_payload_works(tmp_path: Path, form: str) -> None:
    """Or else the tests below prove nothing."""
    proof = tmp_path / "proof"
    malicious(tmp_path, proof, form)
    if form == "bare":
        pickle.loads((tmp_path / "pytorch_model.bin").read_bytes())  # noqa: S301 - that it can is the point
    else:
        torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    folder, proof = write_config(tmp_path / "in", hidden_size=SIZE, num_layers=3), tmp_path / "proof"
    malicious(folder, proof, form)
    assert_refused(folder, r"pytorch_model\.bin is damaged or holds more than tensors.*nothing in it was run")
    assert not proof.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_pickle_beside_safetensors_is_not_opened(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = ReleasedHead(3)
    folder, proof = save_mixin(released, tmp_path / "in"), tmp_path / "proof"
    malicious(folder, proof, form)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("opened a pickle"))
    assert_same(read_released_head(folder), released)
    assert not proof.exists()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
PICKLE = "is damaged or holds more than tensors"
FILES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    *(("pytorch_model.bin", lambda _, new=new: new, PICKLE) for new in (b"", b"garbage" * 20, b"\x80", b"PK\x03\x04")),
    ("pytorch_model.bin", lambda content: content[:-100], PICKLE),
    ("model.safetensors", lambda content: content[:-100], "incomplete or not a safetensors file"),
    *((name, lambda _: POINTER, f"{name} is a git-LFS pointer") for name in ("pytorch_model.bin", "model.safetensors")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "match"), FILES)
def test_damaged_files(tmp_path: Path, name: str, damage: Callable[[bytes], bytes], match: str) -> None:
    save = save_bin if name.endswith(".bin") else save_mixin
    path = save(ReleasedHead(3), tmp_path / "in") / name
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(path.parent, match)


@pytest.mark.parametrize("content", [
    [torch.zeros(2)],
    {"model": {"model.0.weight": torch.zeros(2, SIZE)}},
    {"model.0.weight": torch.zeros(2, SIZE, device="meta"), "model.0.bias": torch.zeros(2)},
    {"model.0.weight": torch.zeros(2, SIZE).to_sparse(), "model.0.bias": torch.zeros(2)},
], ids=["list", "nested", "meta", "sparse"])  # fmt: skip
def test_pickles_of_something_else(tmp_path: Path, content: Any) -> None:
    folder = write_config(tmp_path / "in", hidden_size=SIZE, num_layers=0)
    torch.save(content, folder / "pytorch_model.bin")
    assert_refused(folder, "objects other than named tensors")
