"""Every model that transformers can build is assisted rightly or refused, whatever its family.

What trees are read as has tests of its own below."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.devices.pretend_graph import pretend_graphs
from support.enumeration.token_trees import all_gaps
from support.targets.families import informed_draft
from support.targets.models import partly_agreeing, prompt
from support.targets.zoo import KINDS, NOT_BUILT, WINDOW, families, tiny_of
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.attention import check_tree

PLAIN: dict[str, Any] = {
    "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24, "use_cache": True,
}  # fmt: skip
CHAINS = SpeculationConfig("fixed", num_tokens=4)
# A draft that knows the text, in chains, and these captured as far as a CPU can pretend; one of the target's own family
# in chains and trees; and looking up, in a second text, what the first one was. A batch is one for each of these but
# the latter two.
DOORS = ("told", "captured", "chain", "tree", "lookup", "batch")
# Families that nothing can be done for.
REFUSED = {
    "image blip-2", "image hy_v4_vl", "image mistral_large4", "image qwen3_omni_moe_thinker", "image qwen3_vl_moe",
    "image t5gemma2", "text axk2", "text big_bird", "text bigbird_pegasus", "text cpmant",
    "text deepseek_v32", "text deepseek_v4", "text falcon_mamba", "text glm_moe_dsa", "text hy_v4", "text jamba",
    "text mamba", "text minimax", "text moshi", "text nemotron_h", "text openai-gpt", "text prophetnet",
    "text recurrent_gemma", "text rwkv", "text xlm", "text xlnet", "text zamba2",
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
    return SpecDecPPAssistant.from_draft(partly_agreeing(target), target, speculation=shape)


def is_right(door: str, target: CausalLM, inputs: dict[str, Tensor], plain: Tensor) -> bool:
    """Whether the text is that of plain generation; raises `ValueError` where it is refused."""
    assistant = assistant_at(door, target, plain[inputs["attention_mask"].sum(1).argmax()][None])
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


# Which families read a token tree as they read its paths, and that all others are refused. ----------------------------


PREFIX = 2 * WINDOW  # so that every window has long been reached
# Rounding of float64, and of the float32 that some families and all eager softmaxes compute in.
TOLERANCE = 1e-5

MUST_WORK = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gemma4_text", "phi3", "olmo2", "smollm3",
    "granite", "stablelm", "gpt2", "opt", "falcon", "mixtral", "gpt_oss", "starcoder2", "deepseek_v3",
]  # fmt: skip
EAGER_ONLY = {"gemma2", "gpt_oss"}
# Refused although it would work, because what a short test sees does not prove it at every length.
CAUTIOUS = {
    "axk2", "deepseek_v32", "doge", "glm_moe_dsa", "hy_v4", "llama4", "minimax_m3_vl_text", "mllama",
    "moss_transcribe_diarize", "whisper",
}  # fmt: skip


@pytest.mark.daily("llama", "gemma2", "smollm3", "falcon")
@pytest.mark.parametrize("family", MUST_WORK)
def test_trees_are_read_as_their_paths(family: str) -> None:
    for attention in ("eager",) if family in EAGER_ONLY else ("sdpa", "eager"):
        model = tiny_of(family, attention)
        assert model.config._attn_implementation == attention
        check_tree(model)
        gaps = all_gaps(model, PREFIX)
        assert max(gaps.values()) < TOLERANCE, (attention, gaps)


def test_trees_are_read_as_their_paths_in_chunks() -> None:
    """Llama 4's chunked attention; with its temperature, it is refused (below)."""
    model = tiny_of("llama4_text", attn_temperature_tuning=False)
    assert set(model.config.layer_types) == {"chunked_attention", "full_attention"}
    check_tree(model)
    for num_prefix in (WINDOW - 3, PREFIX - 1, PREFIX + 4):  # a chunk ends within the tree, after the root, behind it
        gaps = all_gaps(model, num_prefix)
        assert max(gaps.values()) < TOLERANCE, gaps


@pytest.mark.daily("1-gemma3_text", "10-gpt_oss", "12-mistral")
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral", "llama"])
@pytest.mark.parametrize("num_prefix", [1, WINDOW - 2, WINDOW])
def test_trees_are_read_as_their_paths_across_the_window(family: str, num_prefix: int) -> None:
    gaps = all_gaps(tiny_of(family), num_prefix)
    assert max(gaps.values()) < TOLERANCE, gaps


@pytest.mark.slow
def test_no_family_is_silently_wrong() -> None:
    """Every causal LM of transformers: refused, or right in one pass, level by level, kept and continued."""
    unbuilt, accepted, wrong, refused_needlessly = set(), set(), {}, set()
    for family in families():
        try:
            models = [tiny_of(family)]
        except Exception:  # noqa: BLE001 - whatever a family's config or constructor raises
            unbuilt.add(family)
            continue
        if models[0].config.get_text_config()._attn_implementation == "sdpa":
            models.append(tiny_of(family, "eager"))
        for model in models:
            right = _is_right(model)
            try:
                check_tree(model)
            except ValueError:
                if right:
                    refused_needlessly.add(family)
                continue
            accepted.add(family)
            if not right:
                wrong[family] = model.config.get_text_config()._attn_implementation
    assert wrong == {}
    assert unbuilt <= {case.removeprefix("text ") for case in NOT_BUILT}
    assert refused_needlessly <= CAUTIOUS
    assert len(accepted) >= 95
    assert accepted >= set(MUST_WORK)


def _is_right(model: torch.nn.Module) -> bool:
    try:
        return max(all_gaps(model, PREFIX).values()) < TOLERANCE
    except Exception:  # noqa: BLE001 - some cannot even be fed a mask
        return False
