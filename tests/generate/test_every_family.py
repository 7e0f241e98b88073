"""Every model that transformers can build is assisted rightly or refused, whatever its family.

What trees are read as has a test of its own in `test_tree_families.py`.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.families import informed_draft
from support.models import partly_agreeing, prompt
from support.pretend_graph import pretend_graphs
from support.zoo import KINDS, NOT_BUILT, WINDOW, families, tiny_of
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.causal_lm import CausalLM

PLAIN: dict[str, Any] = {
    "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24, "use_cache": True,
}  # fmt: skip
CHAINS = SpeculationConfig("fixed", num_tokens=4)
# A draft that knows the text, in chains, and these captured as far as a CPU can pretend; one of the target's own family
# in chains, trees and transformers' loop; and
# looking up, in a second text, what the first one was. A batch is one for each of these but the latter two.
DOORS = ("told", "captured", "chain", "tree", "lookup", "unattached", "batch")
# Families that nothing can be done for.
REFUSED = {
    "image blip-2", "image hy_v4_vl", "image mistral_large4", "image qwen3_omni_moe_thinker", "image qwen3_vl_moe",
    "image t5gemma2", "text axk2", "text big_bird", "text bigbird_pegasus", "text cpmant",
    "text deepseek_v32", "text deepseek_v4", "text falcon_mamba", "text glm_moe_dsa", "text hy_v4", "text jamba",
    "text mamba", "text minimax", "text moshi", "text nemotron_h", "text openai-gpt", "text prophetnet",
    "text recurrent_gemma",
    "text rwkv",
    "text xlm",
    "text xlnet",
    "text zamba2",
}  # fmt: skip
# What transformers itself says of a target without a cache, before it asks an assistant for anything.
WITHOUT_CACHE = "Assisted decoding requires a cache"


def inputs_of(family: str, is_batch: bool = False) -> dict[str, Tensor]:
    """Longer than any window; in a batch beside shorter ones, padded on the left."""
    longest = 2 * WINDOW
    lengths = [5, longest, 11] if is_batch else [longest]
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        ids[row, longest - length :], mask[row, longest - length :] = prompt(length, row)[0], 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family == "blip-2":
        inputs["pixel_values"] = torch.zeros(len(lengths), 3, 16, 16, dtype=torch.float64)
    return inputs


def plain_of(target: CausalLM, inputs: dict[str, Tensor]) -> Tensor | None:
    """The text of plain generation, if there is one."""
    try:
        # Eager attention over padding only is NaN in float64.
        if len(inputs["input_ids"]) > 1 and bool(target(**inputs).logits.isnan().any()):
            return None
        return target.generate(**inputs, **PLAIN)
    except Exception:  # noqa: BLE001 - whatever a family's forward raises
        return None


def assistant_at(door: str, target: CausalLM, text: Tensor) -> SpecDecPPAssistant:
    if door == "lookup":
        return assist(target, "lookup", speculation=SpeculationConfig("fixed", lookup="history"), default=False)
    if door in ("told", "captured", "batch"):
        draft = informed_draft(text, target.config.get_text_config(decoder=True).vocab_size)
        return SpecDecPPAssistant.from_draft(draft, target, speculation=CHAINS)
    shape = SpeculationConfig(tree=[2, 2, 1]) if door == "tree" else CHAINS
    return SpecDecPPAssistant.from_draft(
        partly_agreeing(target), None if door == "unattached" else target, speculation=shape
    )


def is_right(door: str, target: CausalLM, inputs: dict[str, Tensor], plain: Tensor) -> bool:
    """Whether the text is that of plain generation; raises `ValueError` where it is refused."""
    longest = plain[inputs["attention_mask"].sum(1).argmax()][None]
    assistant = assistant_at(door, target, longest)
    try:
        for _ in range(2 if door == "lookup" else 1):
            with pretend_graphs() if door == "captured" else nullcontext():
                ours = target.generate(**inputs, **PLAIN, assistant_model=assistant)
    except RuntimeError as error:
        if WITHOUT_CACHE not in str(error):
            raise
        raise ValueError(WITHOUT_CACHE) from error
    finally:
        assistant.detach()
    return torch.equal(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{kind} {family}" for kind in KINDS for family in families(kind)])
def test_a_family(case: str) -> None:
    if case in NOT_BUILT:
        pytest.skip(NOT_BUILT[case])
    kind, family = case.split(" ")
    target = tiny_of(family, kind=kind)
    assert plain_of(target, inputs_of(family)) is not None, "belongs into NOT_BUILT"
    right, reasons = set[str](), set[str]()
    for door in DOORS:
        inputs = inputs_of(family, is_batch=door == "batch")
        if (plain := plain_of(target, inputs)) is None:
            continue
        try:
            assert is_right(door, target, inputs, plain), door
        except ValueError as reason:
            reasons.add(str(reason))
        else:
            right.add(door)
    assert bool(right) == (case not in REFUSED), reasons


def test_block_sparse_attention_is_refused_and_full_attention_is_right() -> None:
    inputs = inputs_of("big_bird")
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
