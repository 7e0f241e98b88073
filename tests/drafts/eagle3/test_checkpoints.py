"""Tensors of EAGLE-3 checkpoints that others trained: what is refused, and the targets that they fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edited
from support.eagle3_files import DRAFT_VOCAB, HIDDEN, VARIANTS, VOCAB, Checkpoint
from support.eagle3_loading import DIALECTS, PLAIN, load, refused
from support.models import tiny
from torch import Tensor

# Tensors --------------------------------------------------------------------------------------------------------------


def test_a_flag_without_its_tensor(tmp_path: Path) -> None:
    refused(PLAIN.save(tmp_path / "a", norm_before_fc=True), r"lacks input_norm\.weight")
    refused(PLAIN.save(tmp_path / "b", fc_norm=True), r"lacks fc_norm\.0\.weight, fc_norm\.1\.weight")


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    folder = edited(PLAIN.save(tmp_path), **{"layers.0.hidden_norm.weight": torch.ones(HIDDEN)})
    refused(folder, r"has midlayer\.hidden_norm\.weight twice")


# Token ids ------------------------------------------------------------------------------------------------------------

OFFSETS = torch.tensor(PLAIN.ids) - torch.arange(DRAFT_VOCAB)
KEPT = torch.isin(torch.arange(VOCAB), torch.tensor(PLAIN.ids))


def changed_at(tensor: Tensor, place: int, value: int) -> Tensor:
    return tensor.clone().index_fill_(0, torch.tensor([place]), value)


@DIALECTS
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"d2t": changed_at(OFFSETS, 3, 99), "t2d": None}, rf"ids from \d+ to 102, .*vocab_size={VOCAB}"),
        ({"d2t": changed_at(OFFSETS, 0, -1), "t2d": None}, "ids from -1 to"),
        ({"d2t": changed_at(OFFSETS, 1, int(OFFSETS[0]) - 1), "t2d": None}, "19 different ones of 20"),
        ({"d2t": OFFSETS.float()}, r"d2t is \[20\] of float32, and must be \[20\] whole numbers"),
        ({"d2t": OFFSETS[:-1].clone()}, r"d2t is \[19\] of int64, and must be \[20\]"),
        ({"d2t": OFFSETS[:, None].clone()}, r"d2t is \[20, 1\]"),
        ({"d2t": None}, r"no d2t, which says what its 20 tokens are among the target's 48"),
        ({"t2d": ~KEPT}, r"d2t and t2d name different tokens \(20 in d2t, 28 in t2d\)"),
    ],
)
def test_token_ids_that_make_no_sense(tmp_path: Path, dialect: str, changed: dict[str, Any], match: str) -> None:
    refused(edited(PLAIN.save(tmp_path, dialect), **changed), match)


def test_token_ids_need_no_mask_and_no_order(tmp_path: Path) -> None:
    ids = torch.tensor(PLAIN.ids).flip(0)
    folder = edited(PLAIN.save(tmp_path), d2t=(ids - torch.arange(DRAFT_VOCAB)).int())
    assert load(folder).token_ids.tolist() == ids.tolist()
    assert load(edited(folder, t2d=None)).token_ids.tolist() == ids.tolist()


def test_all_tokens(tmp_path: Path) -> None:
    """Offsets of zero change nothing; a permutation does."""
    folder = VARIANTS["all tokens"].save(tmp_path)
    assert load(folder).token_ids is None
    assert load(edited(folder, d2t=torch.zeros(VOCAB, dtype=torch.int64))).token_ids is None
    turned = torch.arange(VOCAB).flip(0)
    assert load(edited(folder, d2t=turned - torch.arange(VOCAB))).token_ids.tolist() == turned.tolist()


def test_without_a_head_it_takes_the_targets(tmp_path: Path) -> None:
    folder = VARIANTS["all tokens"].save(tmp_path)
    target = tiny("llama")
    assert load(edited(folder, **{"lm_head.weight": None}), target).get_output_embeddings() is target.lm_head


# The target -----------------------------------------------------------------------------------------------------------


@DIALECTS
def test_a_target_with_other_tokens(tmp_path: Path, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = PLAIN.save(tmp_path, dialect)
    refused(folder, r"proposes token ids up to \d+, and there are 12 in Llama", target=tiny("llama", vocab_size=12))
    with caplog.at_level("WARNING", "hf_specdecpp"):
        load(folder, tiny("llama", vocab_size=56))
    assert "was made for 48 token ids, and the target has 56. That is harmless padding if" in caplog.text


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([2, 3, 9], r"reads layers \[2, 3, 9\] of its target, and this one has 3.*another target"),
        ([2, 3], r"layer_ids=\[2, 3\] must name 3 layers of the target.*eagle3=\{'reads'"),
        ([], None),
        ("all", "layer_ids='all' must list layers"),
        ([1, 2.5, 3], r"layer_ids=\[1, 2.5, 3\] must list layers"),
    ],
)
def test_layers_that_the_target_lacks(tmp_path: Path, ids: Any, match: str | None) -> None:
    folder = PLAIN.save(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    refused(folder, match or "names no layers, and a target of 3 layers is too small for the usual ones")


def test_overridden_layers_that_the_target_lacks(tmp_path: Path) -> None:
    folder = PLAIN.save(tmp_path)
    refused(
        folder,
        r"reads the outputs of layers \[0, 1, 7\], counted from 0, and there are 3 in LlamaFor",
        eagle3={"reads": [0, 1, 7]},
    )
    refused(folder, r"reads=\[0, 1\] must name 3 layers", eagle3={"reads": [0, 1]})


def test_two_states_and_no_ids(tmp_path: Path) -> None:
    folder = Checkpoint(num_reads=2).save(tmp_path, eagle_config=...)
    refused(folder, "layer_ids=None must name 2 layers")
    assert load(folder, eagle3={"reads": [0, 2]}).reader.reads == [0, 2]
