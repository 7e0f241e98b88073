"""Rounds that are captured whole with processors that ask which tokens there were, and with others that no graph can
run, which are called between the graphs; targets of which some can be captured, as a try shows; on pretended graphs."""

from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.devices.capturing import CHAIN, generate
from support.devices.processors_between import MISTAKES
from support.devices.whole_rounds import SAMPLED, TREE, batch, made, together
from support.targets.models import assistant_of, quiet_later_layers, tiny
from support.targets.outputs import PROCESSORS
from support.targets.watchers import unnoticed
from torch import Tensor
from transformers import AttentionInterface, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_specdecpp.caches import masks
from hf_specdecpp.cuda_graphs import captured_draft, captured_rounds, model_copy
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.generation.captured.entering import BETWEEN
from hf_specdecpp.generation.captured.parts import GraphDrafts
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.trees.tree import DraftTree, TreePass

pytestmark = [pytest.mark.usefixtures("pretended"), pytest.mark.takes(6)]
PENALTY = {"repetition_penalty": 1.4}
# Older versions of generate() penalise tokens for the padding, too: a penalty leaves out as many tokens in each row.
LEAVES_OUT_PADDING = Version(transformers.__version__) >= Version("5.24")


@pytest.mark.daily("236-0-tree")
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("length", "padding"), [(5, 0), (5, 4), (236, 0)])
def test_a_repetition_penalty(length: int, padding: int, settings: dict[str, Any], tmp_path: Path) -> None:
    target, assistant = made("independent", tmp_path, **settings)
    for further in (24, 40):
        how: dict[str, Any] = {"padding": padding, "max_new_tokens": further, **PENALTY}
        assert torch.equal(generate(target, assistant, length, **how), generate(target, None, length, **how))
        assert assistant.stats.decided["rounds"] == "captured"
        assert assistant.stats.accepted > 0


def knows_the_prompt_alone(
    rounds: Any, found: Any, shape: Any, rules: Any, text: Tensor | None, settle: Any = CapturedRounds._settle
) -> None:
    """A mutant: emitted tokens are written into a copy of the text."""
    settle(rounds, found, shape, rules, None if text is None else text.clone())


def knows_no_path(text: Tensor, candidates: Tensor, seen: Tensor) -> Tensor:
    """A mutant: candidates see the text, and not one another."""
    return text[:, None].expand(-1, seen.shape[1], -1)


@pytest.mark.parametrize(("owner", "name", "mutant"), [
    (CapturedRounds, "_settle", knows_the_prompt_alone),
    (captured_rounds, "with_paths", knows_no_path),
], ids=["emitted", "path"])  # fmt: skip
def test_a_penalty_that_misses_tokens_is_noticed(
    owner: Any, name: str, mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    target, assistant = made("independent", tmp_path, **CHAIN)
    how: dict[str, Any] = {"max_new_tokens": 60, "repetition_penalty": 2.0}
    assert not torch.equal(generate(target, assistant, **how), generate(target, None, **how))


def padding_counts(_: Processing, texts: Tensor) -> Tensor:
    """A mutant: processors see the padding, too."""
    return texts


def one_text_for_all(text: Tensor, candidates: Tensor, seen: Tensor) -> Tensor:
    """A mutant: each row is judged by the tokens of the first."""
    return captured_draft.with_paths(text[:1].expand_as(text), candidates, seen)


@pytest.mark.daily("padding")
@pytest.mark.parametrize(("owner", "name", "mutant"), [
    (Processing, "shown", padding_counts),
    (captured_rounds, "with_paths", one_text_for_all),
    (CapturedRounds, "_settle", knows_the_prompt_alone),
], ids=["padding", "rows", "emitted"])  # fmt: skip
def test_a_batch_whose_rows_are_mistaken_is_noticed(
    owner: Any, name: str, mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding is a token that rows would go on with."""
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(3)
    how: dict[str, Any] = {"max_new_tokens": 30, "repetition_penalty": 2.0}
    often = together(target, None, ids, mask, **{**how, "max_new_tokens": 60})[0, ids.shape[1] :].mode()[0]
    ids = torch.where(mask > 0, ids, often)
    expected = together(target, None, ids, mask, **how)
    assert torch.equal(together(target, assistant, ids, mask, **how), expected)
    monkeypatch.setattr(owner, name, mutant)
    target, assistant = made("independent", tmp_path, **CHAIN)
    is_right = mutant is padding_counts and not LEAVES_OUT_PADDING
    assert torch.equal(together(target, assistant, ids, mask, **how), expected) == is_right


def padding_of_the_first(processing: Processing, text: Tensor) -> Tensor:
    """A mutant: all rows are shown with the padding of one."""
    for each in processing.processors:
        vars(each)["row"] = 0
    return shown(processing, text)


shown = Processing.shown


@pytest.mark.daily("3-2", "2-0")
@pytest.mark.parametrize(("rows", "leaving"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_row_that_ends_with_its_first_token(
    rows: int, leaving: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have the numbers that they had in the whole batch."""
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(rows)
    first = together(target, None, ids, mask, max_new_tokens=1, **PENALTY)[:, -1]
    assert first.tolist().count(int(first[leaving])) == 1
    how: dict[str, Any] = {"eos_token_id": int(first[leaving]), **PENALTY}
    expected = together(target, None, ids, mask, **how)
    assert torch.equal(together(target, assistant, ids, mask, **how), expected)
    assert assistant.stats.decided["rounds"] == "captured"


def test_padding_of_another_row_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(3)
    often = together(target, None, ids, mask, max_new_tokens=60, repetition_penalty=2.0)[0, ids.shape[1] :].mode()[0]
    ids = torch.where(mask > 0, ids, often)
    expected = together(target, None, ids, mask, repetition_penalty=2.0)
    for mutant in (shown, padding_of_the_first):
        monkeypatch.setattr(Processing, "shown", mutant)
        target, assistant = made("independent", tmp_path, **CHAIN)
        ours = together(target, assistant, ids, mask, repetition_penalty=2.0)
        assert torch.equal(ours, expected) == (mutant is shown or not LEAVES_OUT_PADDING)


@pytest.mark.daily("int-3", "<lambda>-13")
@pytest.mark.parametrize("ignored", [3, 12, 13, 20])
@pytest.mark.parametrize("given", [int, lambda ignored: torch.tensor([ignored])][: 1 + LEAVES_OUT_PADDING])
def test_a_penalty_that_leaves_out_tokens(given: Callable[[int], Any], ignored: int, tmp_path: Path) -> None:
    """More than the prompt has, too: then what the graphs note of a text would not do."""
    target, assistant = made("independent", tmp_path, **CHAIN)
    for penalty in (1.5, 3.0):
        processor = RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=given(ignored))
        how: dict[str, Any] = {"logits_processor": LogitsProcessorList([processor])}
        assert torch.equal(generate(target, assistant, **how), generate(target, None, **how))
        assert assistant.stats.decided["rounds"] == ("captured" if ignored < 13 else BETWEEN)


def test_rows_whose_penalty_leaves_out_other_numbers_of_tokens(tmp_path: Path) -> None:
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(2)
    for counts in ([ids.shape[1], 2], [2, ids.shape[1] + 3]):
        ignored = torch.tensor(counts) if LEAVES_OUT_PADDING else counts[0]
        penalty: Any = RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=ignored)
        how: dict[str, Any] = {"logits_processor": LogitsProcessorList([penalty])}
        assert torch.equal(*(together(target, each, ids, mask, **how) for each in (assistant, None)))


def test_padding_before_one_text_is_no_part_of_it(tmp_path: Path) -> None:
    """Neither where it is also what candidates that a node does not see are filled up with."""
    for settings in (CHAIN, TREE):
        target, assistant = made("independent", tmp_path, **settings)
        how: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 2.0}
        text = generate(target, None, 5, **how)
        ids = torch.cat((text[:, 5:6].expand(1, 3), text[:, :5]), dim=1)
        mask = (torch.arange(8) >= 3).long()[None]
        plain, ours = (together(target, each, ids, mask, **how) for each in (None, assistant))
        assert torch.equal(plain[:, 8:], text[:, 5:]) or not LEAVES_OUT_PADDING
        assert torch.equal(ours, plain)
        assert assistant.stats.decided["rounds"] == "captured"


def test_a_sampled_batch(tmp_path: Path) -> None:
    """The same for the same seed, whatever the padding was before; other texts in other rows."""
    target, assistant = made("conditioned", tmp_path, **CHAIN)
    ids, mask = batch(3)
    found = []
    for _ in range(2):
        found.append(together(target, assistant, ids, mask, **PENALTY, **SAMPLED))
        assert assistant.stats.decided["rounds"] == "captured"
        together(target, assistant, ids[:, 1:], mask[:, 1:], **PENALTY, **SAMPLED)
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0][:, ids.shape[1] :].tolist()}) == 3


def test_two_penalties_are_called_between_the_graphs(tmp_path: Path) -> None:
    """They may leave out other paddings."""
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(2)
    padding = (mask != 0).int().argmax(dim=1) if LEAVES_OUT_PADDING else 2
    how = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4, padding), *
           [RepetitionPenaltyLogitsProcessor(1.2)]])}  # fmt: skip
    assert torch.equal(*(together(target, each, ids, mask, **how) for each in (assistant, None)))
    assert assistant.stats.uncaptured is None
    assert assistant.stats.decided["rounds"] == BETWEEN


NAMES = ["no_repeat_ngram_size", "many", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens",
         "min_length", "min_new_tokens", "exponential_decay_length_penalty", "forced_eos_token_id",
         "watermarking_config", "prefix_allowed_tokens_fn"]  # fmt: skip


@pytest.mark.daily("no_repeat_ngram_size-chain", "suppress_tokens-tree")
@pytest.mark.parametrize("settings", [CHAIN, TREE, {"rule": "threshold", "threshold": 0.9}, {"rule": "throughput"}],
                         ids=["chain", "tree", "threshold", "throughput"])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_processors_between(name: str, settings: dict[str, Any], tmp_path: Path, pretended: Counter[str]) -> None:
    """Greedy, and drawn where one token alone is possible: two launches a round, no capture after the first text."""
    target, assistant = made("independent", tmp_path, **settings)
    for further in ({}, {}, {"do_sample": True, "top_k": 1}):
        before, how = pretended.copy(), {"max_new_tokens": 16, **PROCESSORS[name], **further}
        assert torch.equal(*(generate(target, each, 10, **how) for each in (assistant, None)))
        stats = assistant.stats
        assert stats.decided["rounds"] == BETWEEN
        assert stats.uncaptured is None
        # The draft knows nothing of watermarks, and graphs that are pretended may be too slow to draft with.
        assert stats.accepted > 0 or name == "watermarking_config" or settings["rule"] == "throughput"
        if pretended["captured"] == before["captured"]:
            assert pretended["replayed"] - before["replayed"] == 2 * stats.rounds
        if settings in (CHAIN, TREE):  # else another shape may be met
            assert (pretended["captured"] > before["captured"]) == (before["replayed"] == 0 or bool(further))


BY_ROW: dict[str, dict[str, Any]] = {
    "n-grams": PROCESSORS["no_repeat_ngram_size"],
    "its own tokens": {"prefix_allowed_tokens_fn": lambda row, _: list(range(1 + row, 40, 2))},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}


@pytest.mark.daily("its own tokens-4-conditioned", "penalty-230-independent")
@pytest.mark.parametrize("kind", ["independent", "conditioned"])
@pytest.mark.parametrize("shortest", [4, 230])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_batch_with_processors_between(name: str, shortest: int, kind: str, tmp_path: Path) -> None:
    """Rows of other lengths, of which some end before the others; the second outgrows its room. A function is asked
    about all rows at once, and rounds are made step by step."""
    target, assistant = made(kind, tmp_path, **CHAIN)
    ids, mask = batch(3, shortest)
    how: dict[str, Any] = {**BY_ROW[name], "max_new_tokens": 30}
    ends = together(target, None, ids, mask, **how)[:2, ids.shape[1] + 9].tolist()
    for further in ({}, {"do_sample": True, "top_k": 1}):
        plain, ours = (together(target, each, ids, mask, eos_token_id=ends, **how, **further)
                       for each in (None, assistant))  # fmt: skip
        assert torch.equal(ours, plain)
        assert (assistant.stats.decided["rounds"] == BETWEEN) == (name != "its own tokens")
        assert assistant.stats.accepted > 0


def asked(mistake: Any) -> Callable[..., Tensor]:
    """Between the graphs, with one of `MISTAKES`."""
    return lambda whole, place, tree, scores: mistake(whole.texts[place], TreePass(tree, range(len(tree) + 1)), scores)


def of_the_first_row(whole: GraphDrafts, place: int, tree: DraftTree, scores: Tensor) -> Tensor:
    return whole.texts[0].process(TreePass(tree, range(len(tree) + 1)), scores)


@pytest.mark.daily("row i has the prefix of row i + 1-chain", "candidates are no part of the prefix-tree")
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("mistake", [*map(asked, MISTAKES.values()), of_the_first_row], ids=[*MISTAKES, "row"])
def test_processors_that_are_asked_wrongly_are_noticed(
    mistake: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = made("independent", tmp_path, **settings)
    ids, mask = batch(2 if mistake is of_the_first_row and settings is CHAIN else 1)
    how: dict[str, Any] = {"max_new_tokens": 40, "no_repeat_ngram_size": 2}
    monkeypatch.setattr(GraphDrafts, "_process", mistake)
    same = torch.equal(*(together(target, each, ids, mask, **how) for each in (assistant, None)))
    assert same == (mistake is of_the_first_row and len(ids) == 1)


def asked_about_all(text: OutputText, tree_pass: TreePass, scores: Tensor) -> Tensor:
    """A mutant."""
    return text.processing.after_each(text.ids, [tree_pass.tree.path(node) for node in tree_pass.order], scores)


@pytest.mark.daily("chain")
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_trie_is_not_asked_about_what_it_forbids(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor about texts that have ended."""
    target, assistant = made("independent", tmp_path, **settings)
    ends: set[int] = set()

    def no_thirds(_: int, ids: Tensor) -> list[int]:
        last, *tokens = ids[8:].tolist()
        for token in tokens:
            if (last + token) % 3 == 0 or token in ends:
                return []
            last = token
        return [token for token in range(48) if (last + token) % 3]

    no_thirds.reads_prefix_only = True  # type: ignore[attr-defined]
    how: dict[str, Any] = {"prefix_allowed_tokens_fn": no_thirds}
    ends.add(int(generate(target, None, 9, **how)[0, 24]))
    how["eos_token_id"] = [*ends]
    assert torch.equal(*(generate(target, each, 9, **how) for each in (assistant, None)))
    assert assistant.stats.decided["rounds"] == BETWEEN
    assert assistant.stats.accepted > 0
    monkeypatch.setattr(OutputText, "_process_allowed", asked_about_all)
    with pytest.raises(ValueError, match="empty list"):
        generate(target, assistant, 9, **how)


def test_a_trees_rows_are_moved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance runs several times when it is captured, and the pass that wrote the rows does not run again."""
    how: dict[str, Any] = {"no_repeat_ngram_size": 3, "max_new_tokens": 12, "return_dict_in_generate": True}
    for mutant in (False, True):
        target, assistant = made("independent", tmp_path, **TREE)
        if mutant:
            monkeypatch.setattr(FixedCache, "rows", lambda *_: [])
        # After 9 tokens the first round, in which all is captured, accepts two candidates.
        plain, ours = (generate(target, each, 9, **how).past_key_values.layers for each in (None, assistant))
        assert assistant.stats.decided["rounds"] == BETWEEN
        same = [torch.allclose(one.keys, other.keys, atol=1e-9) for one, other in zip(ours, plain, strict=True)]
        assert all(same) != mutant


# Targets that a try shows to be captured or not. ----------------------------------------------------------------------


@unnoticed
def flash(_module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **_: Any) -> Any:
    """FlashAttention of one sequence: no mask, each token sees those before it."""
    assert mask is None
    group, (count, held) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    hidden = torch.ones(count, held).triu(held - count + 1) > 0
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill_(hidden, -inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.daily("independent-True", "early_exit-False")
@pytest.mark.parametrize("is_replaced", [True, False])
@pytest.mark.parametrize("kind", ["independent", "early_exit"])
def test_targets_with_flash_attention(kind: str, is_replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes replace it, because it takes no mask of a fixed cache."""
    if not is_replaced:  # as before
        for module in (masks, model_copy):
            monkeypatch.setattr(module, "is_replaced", lambda config: config._attn_implementation == "sdpa")
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_pretended", flash)
    target = quiet_later_layers(tiny("llama"))
    expected = generate(target, None)
    target.config._attn_implementation = "flash_attention_pretended"
    assert torch.equal(generate(target, None), expected)
    assistant = assistant_of(kind, target, **CHAIN)
    assert torch.equal(generate(target, assistant), expected)
    assert (assistant.stats.uncaptured is None) == is_replaced
    assert (assistant.stats.decided["rounds"] == "captured") == is_replaced


class Int8(torch.nn.Module):
    """A layer whose weight is quantised, and multiplied in the dtype of its input. `waits`: as kernels do that look at
    the numbers first."""

    waits = False

    def __init__(self, layer: Any) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.scale: torch.Tensor
        self.weight: torch.Tensor
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))

    @unnoticed
    def forward(self, hidden: Tensor) -> Tensor:
        scale = self.scale if not self.waits or float(self.scale.sum()) > 0 else -self.scale
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype) * scale)


@pytest.mark.daily("independent-True", "early_exit-False")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", ["independent", "early_exit"])
def test_quantised_targets(kind: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are captured unless their kernels wait for the device."""
    monkeypatch.setattr(Int8, "waits", waits)
    target: Any = quiet_later_layers(tiny("llama"))
    target.is_quantized = True
    for layer in target.model.layers:
        layer.mlp.down_proj = Int8(layer.mlp.down_proj)
    assistant = assistant_of(kind, target, **CHAIN)
    assert torch.equal(generate(target, assistant), generate(target, None))
    assert assistant.stats.accepted > 0
    assert (assistant.stats.decided["rounds"] == "captured") == (not waits)
    assert ("waits for the device" in str(assistant.stats.uncaptured)) == waits


def test_a_target_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a library's layer has something that is not copied."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, **CHAIN)

    def fails(*_: Any, **_how: Any) -> Any:
        raise TypeError("cannot pickle a stream")

    monkeypatch.setattr("hf_specdecpp.cuda_graphs.captured_target.for_capture", fails)
    assert torch.equal(generate(target, assistant), generate(target, None))
    assert "its modules cannot be copied (TypeError" in str(assistant.stats.uncaptured)
    assert assistant.stats.accepted > 0


@pytest.mark.daily("mistral-auto", "gemma3_text-off", "llama-auto")
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
def test_the_returned_cache_of_a_batch_whose_rows_end_apart(family: str, graphs: str) -> None:
    """As plain generation leaves it: a row that went on has lost the tokens that its windows no longer show, and those
    before the end of the shortest row are needed to read the padding after it."""
    target = quiet_later_layers(tiny(family, num_hidden_layers=3))
    assistant = assistant_of("independent", target, graphs=graphs, **CHAIN)
    ids, mask = batch(2)
    first = together(target, None, ids, mask, max_new_tokens=30)[:, ids.shape[1] :].tolist()
    end = next(token for token in first[0][:4] if token not in first[1])
    how: dict[str, Any] = {"eos_token_id": end, "max_new_tokens": 30, "return_dict_in_generate": True}
    plain = together(target, None, ids, mask, **how)
    for returned in (True, False):
        text = together(target, assistant, ids, mask, **how | {"return_dict_in_generate": returned})
        is_kept = returned and family != "llama"
        assert graphs == "off" or ("left a layer's window" in str(assistant.stats.uncaptured)) == is_kept
        assert torch.equal(text.sequences if returned else text, plain.sequences)
        if returned:
            for ours, theirs in zip(text.past_key_values.layers, plain.past_key_values.layers, strict=True):
                shown = torch.nn.functional.pad(mask, (0, 40), value=1)[:, : text.sequences.shape[1] - 1]
                shown = shown[:, -ours.keys.shape[2] :].bool()  # what hidden tokens left is arbitrary
                for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                    torch.testing.assert_close(found.transpose(1, 2)[shown], expected.transpose(1, 2)[shown])


@pytest.mark.daily("grouped_mm", "eager")
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_mixtures_of_experts(experts: str) -> None:
    """The default of transformers, `grouped_mm`, asks the device for nothing; the loop over experts does."""
    config = transformers.MixtralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts).eval()
    assistant = assistant_of("early_exit", target, **CHAIN)
    assert torch.equal(generate(target, assistant), generate(target, None))
    assert assistant.stats.accepted > 0
    if experts == "eager":
        assert "waits for the device" in str(assistant.stats.uncaptured)
    else:
        assert assistant.stats.decided["rounds"] == "captured"


@pytest.mark.parametrize(("rows", "settings"), [(1, CHAIN), (1, TREE), (3, CHAIN)], ids=["chain", "tree", "batch"])
def test_attention_over_long_caches_is_split(
    rows: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of 256 rows count as long here."""
    split, lengths = model_copy.split_attention, Counter[int]()

    def counted(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        lengths[key.shape[2]] += 1
        return split(query, key, *others)

    monkeypatch.setattr(model_copy, "LONG", 256)
    monkeypatch.setattr(model_copy, "ROWS", 64)
    monkeypatch.setattr(model_copy, "split_attention", unnoticed(counted))
    target, assistant = made("early_exit", tmp_path, **settings)
    ids, mask = batch(rows)
    assert torch.equal(together(target, assistant, ids, mask), together(target, None, ids, mask))
    assert assistant.stats.decided["rounds"] == "captured"
    assert set(lengths) == {256}
