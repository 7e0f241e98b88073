"""Which families read a token tree as they read its paths, and that all others are refused."""

import pytest
import torch
from support.token_trees import all_gaps
from support.zoo import NOT_BUILT, WINDOW, families, tiny_of

from hf_specdecpp.trees.attention import check_tree

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


@pytest.mark.every(5)
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


@pytest.mark.every(5)
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
