"""Every causal LM that transformers can build is assisted rightly or refused, in chains and in batches.

Trees have a test of their own in `test_tree_families.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.families import informed_draft
from support.models import prompt
from support.pretend_graph import pretend_graphs
from support.zoo import WINDOW, families, tiny_of
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 40}
# At least so many are right, with the newest transformers.
RIGHT = {"chain": 120, "batch": 90, "captured": 65}


def inputs_of(kind: str) -> dict[str, Tensor]:
    """Longer than any window; in a batch beside shorter ones, padded on the left."""
    longest = 2 * WINDOW
    lengths = [5, longest, 11] if kind == "batch" else [longest]
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        ids[row, longest - length :], mask[row, longest - length :] = prompt(length, row)[0], 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "batch", "captured"])
def test_no_family_is_silently_wrong(kind: str) -> None:
    unbuilt, refused, wrong, right = set[str](), dict[str, str](), set[str](), set[str]()
    inputs = inputs_of(kind)
    for family in families():
        try:
            target = tiny_of(family)
            plain = target.generate(**inputs, **PLAIN)
            if bool(target(**inputs).logits.isnan().any()):
                raise ValueError("Eager attention over padding only is NaN in float64, in plain generation, too.")
        except Exception:  # noqa: BLE001 - whatever a family's config, constructor or forward raises
            unbuilt.add(family)
            continue
        longest = plain[inputs["attention_mask"].sum(1).argmax()][None]
        draft = informed_draft(longest, target.config.get_text_config().vocab_size)
        speculation = SpeculationConfig("fixed", num_tokens=4)
        try:
            assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
            with pretend_graphs() if kind == "captured" else nullcontext():
                ours = target.generate(**inputs, **PLAIN, assistant_model=assistant)
        except ValueError as reason:
            refused[family] = str(reason)
            continue
        if kind == "captured" and (uncaptured := assistant.stats.uncaptured) is not None:
            refused[family] = uncaptured
            continue
        (right if torch.equal(ours, plain) else wrong).add(family)
    assert not wrong
    assert len(right) >= RIGHT[kind], (len(right), refused, unbuilt)


def test_block_sparse_attention_is_refused_and_full_attention_is_right() -> None:
    inputs = inputs_of("chain")
    with pytest.raises(ValueError, match='load it with attention_type="original_full"'):
        SpecDecPPAssistant.from_draft(tiny_of("llama"), tiny_of("big_bird"))
    target = tiny_of("big_bird", attention_type="original_full")
    plain = target.generate(**inputs, **PLAIN)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain), target)
    assert torch.equal(target.generate(**inputs, **PLAIN, assistant_model=assistant), plain)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_to_tokens_that_an_indexer_chooses_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"index_topk=\d+ tokens that an indexer chooses.*Generate without"):
        SpecDecPPAssistant.from_draft(tiny_of("llama"), tiny_of(family))
