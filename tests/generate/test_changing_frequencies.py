"""Rotary frequencies that change with the length of the text: the output is that of plain `generate()` all the same."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.targets.models import VOCAB_SIZE, assistant_of, prompt, tiny
from torch import Tensor
from transformers import Qwen3Config

from hf_specdecpp.generation import single_target
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import FrequencyChange, frequency_changes

CHANGE = 32  # tokens
LONG: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": CHANGE, "rope_theta": 1e4,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"max_position_embeddings": CHANGE, "rope_parameters": DYNAMIC}),
    "longrope": ("llama", {"max_position_embeddings": 128, "rope_parameters": LONG}),
    "phi3": (
        "phi3",
        {"max_position_embeddings": 128, "original_max_position_embeddings": CHANGE, "rope_parameters": LONG},
    ),
}
CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
TREE: dict[str, Any] = {"tree": "dyspec", "tree_budget": 6, "tree_depth": 3}
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 2}
LENGTHS = (20, 28, CHANGE - 1, CHANGE, CHANGE + 1, CHANGE + 2, 40)  # of prompts


# Plain generation itself is wrong there: it drops the cache and then reads the last token alone.
FORGETS = Version(transformers.__version__) < Version("5.20")


def target_of(kind: str) -> CausalLM:
    if kind == "phi3" and FORGETS:
        pytest.skip("transformers before 5.20 forgets the text of Phi-3 where its frequencies change")
    family, overrides = TARGETS[kind]
    target = tiny(family, **overrides)
    with torch.no_grad():  # so that positions matter
        for name, parameter in target.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                parameter *= 3.0
    return target


def generate(target: CausalLM, ids: Tensor, **options: Any) -> Any:
    target(prompt(4))  # dynamic frequencies stay as the longest text left them until a short one is read
    return target.generate(ids, max_new_tokens=16, **OPTIONS, **options)


def differing(target: CausalLM, assistant: Any, **options: Any) -> list[int]:
    """The lengths of the prompts whose texts differ from plain generation's."""
    found = []
    for length in LENGTHS:
        plain = generate(target, prompt(length), **options)
        if not torch.equal(generate(target, prompt(length), assistant_model=assistant, **options), plain):
            found.append(length)
    return found


@pytest.mark.daily("chain-early_exit-dynamic", "tree-eagle3-longrope")
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("draft", ["early_exit", "independent", "conditioned", "eagle3"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_texts_across_the_change(kind: str, draft: str, speculation: dict[str, Any]) -> None:
    target = target_of(kind)
    assert differing(target, assistant_of(draft, target, **speculation)) == []


@pytest.mark.daily("tree-dynamic")
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_passes_over_both_sides_differ(kind: str, speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_target, "frequency_changes", lambda _: [])
    target = target_of(kind)
    assistant = assistant_of("early_exit", target, **speculation)
    if kind == "phi3" and speculation is TREE:
        with pytest.raises(RuntimeError, match="must match the size"):  # it reads its text anew, which fits no tree
            differing(target, assistant)
    else:
        assert differing(target, assistant) != []


@pytest.mark.daily("phi3")
@pytest.mark.parametrize("kind", TARGETS)
def test_static_caches(kind: str) -> None:
    target = target_of(kind)
    assert differing(target, assistant_of("independent", target, **CHAIN), cache_implementation="static") == []


@pytest.mark.daily("phi3")
@pytest.mark.parametrize("kind", TARGETS)
def test_padding_takes_no_position(kind: str) -> None:
    target = target_of(kind)
    assistant = assistant_of("independent", target, **CHAIN)
    for length in LENGTHS[:-1]:
        ids = torch.cat((torch.zeros((1, 5), dtype=torch.long), prompt(length - 3)), dim=1)
        mask = (ids != 0).long()
        plain = generate(target, ids, attention_mask=mask)
        assert torch.equal(generate(target, ids, attention_mask=mask, assistant_model=assistant), plain), length


@pytest.mark.parametrize("kind", TARGETS)
def test_a_cache_that_is_carried_on(kind: str) -> None:
    target = target_of(kind)
    assistant, texts = assistant_of("independent", target, **CHAIN), []
    for used in (None, assistant):
        first = generate(target, prompt(12), return_dict_in_generate=True, assistant_model=used)
        ids, cache = torch.cat((first.sequences, prompt(3, seed=1)), dim=1), first.past_key_values
        texts.append(target.generate(ids, past_key_values=cache, max_new_tokens=16, **OPTIONS, assistant_model=used))
    assert torch.equal(*texts)


def test_drafting_goes_on_after_the_change() -> None:
    found = {}
    for kind in TARGETS:
        target = target_of(kind)
        assistant = assistant_of("independent", target, **CHAIN)
        generate(target, prompt(CHANGE + 2), assistant_model=assistant)
        found[kind] = assistant.stats
    dynamic = found.pop("dynamic")
    assert (dynamic.drafted, dynamic.rounds_at_change) == (0, 15), "its frequencies change with every token"
    assert "in 15 of 15 rounds: the target's rotary frequencies change" in dynamic.verdict
    assert all(stats.drafted > 8 and stats.rounds_at_change == 0 for stats in found.values())


@pytest.mark.parametrize("kind", TARGETS)
def test_batches_stay_before_it(kind: str) -> None:
    target = target_of(kind)
    assistant, ids = assistant_of("independent", target, **CHAIN), torch.cat((prompt(), prompt(seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {**OPTIONS, "attention_mask": mask, "max_length": CHANGE}
    assert torch.equal(target.generate(ids, **options, assistant_model=assistant), target.generate(ids, **options))
    with pytest.raises(ValueError, match=r"grow beyond 32 tokens, where the rotary frequencies .* change .*max_length"):
        target.generate(ids, **options | {"max_length": CHANGE + 1}, assistant_model=assistant)


def test_where_they_change_in_layers_of_several_kinds() -> None:
    mixed = Qwen3Config(vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    mixed.rope_parameters = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}
    assert frequency_changes(mixed) == [FrequencyChange(64, every_token=True)]
