"""Gemma 4 assistants: steps beside transformers' class and generator with the very weights, and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.pretend_graph import pretend_graphs
from support.files import gemma4_files
from support.files.checkpoints import edited
from support.files.gemma4_files import VARIANTS, VOCAB, target_for
from support.files.repos import change_json
from support.targets.formulas import close
from support.targets.models import prompt, tiny
from support.targets.rounds_anew import Ear, check_rounds
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.draft_kinds.gemma4 import sources
from hf_specdecpp.draft_kinds.known import GEMMA4
from hf_specdecpp.models.causal_lm import CACHE, CausalLM
from hf_specdecpp.trees.tree import DraftTree

TEXT = prompt(9) % gemma4_files.VOCAB


def drafted_by(theirs: CausalLM, target: CausalLM) -> Any:
    return SpecDecPPAssistant.from_draft(theirs, target=target).ready_drafter()


def chain(session: Any, count: int) -> tuple[list[int], Tensor]:
    """The likeliest candidates, and logits at each of their places."""
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        rows.append(session.propose_next([torch.tensor(token) for token in tokens])[0])
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


def seen_by(target: CausalLM, text: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What transformers' target shares after reading all but the last token, in windows what its own layers see."""
    shared = target(text[:, :-1], return_shared_kv_states=True).shared_kv_states
    first = {gemma4_files.FULL: 0, gemma4_files.SLIDING: max(text.shape[1] - 1 - (gemma4_files.WINDOW - 1), 0)}
    return {kind: tuple(each[:, :, begin:] for each in shared[kind]) for kind, begin in first.items()}


@pytest.mark.parametrize("length", [4, 9])
@pytest.mark.parametrize("name", gemma4_files.VARIANTS)
@torch.no_grad()
def test_the_class_of_transformers(name: str, length: int) -> None:
    """Its own forward, step by step, in a text shorter and longer than the window."""
    variant, text = gemma4_files.VARIANTS[name], TEXT[:, :length]
    theirs, target = variant.theirs(), gemma4_files.target_for(variant.of)
    before = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    session = gemma4_files.begun(drafted_by(theirs, target), target, text)
    tokens, ours = chain(session, 4)
    assert session.passes == 4
    state = target(text[:, :-1], output_hidden_states=True).hidden_states[-1][:, -1:]
    shared, position = seen_by(target, text), torch.tensor([[length - 1]])
    for place, row in enumerate(ours):
        last = text[:, -1:] if not place else torch.tensor([[tokens[place - 1]]])
        inputs = torch.cat((target.get_input_embeddings()(last), state), dim=-1)
        found = theirs(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        state, expected = found.last_hidden_state, found.logits[0, 0]
        shown = row.isfinite()
        close(row[shown], expected[shown])
        assert int(shown.sum()) == (gemma4_files.VOCAB // 2 if variant.clusters else gemma4_files.VOCAB)
        assert variant.clusters is False or float(expected[~shown].max()) < float(expected[shown].min())
    assert all(torch.equal(tensor, before[key]) for key, tensor in theirs.state_dict().items())


@torch.no_grad()
def test_what_a_step_reads() -> None:
    """The control: another row of the target, another state and another position are other logits."""
    target = gemma4_files.target_for()
    draft = drafted_by(gemma4_files.VARIANTS["plain"].theirs(), target)
    expected = gemma4_files.begun(draft, target, TEXT).propose_next([])[0]
    for change in ("row", "state", "position", "window"):
        session, text = gemma4_files.begun(draft, target, TEXT), gemma4_files.read_by(target, TEXT)
        layers = text.cache.layers
        if change == "row":
            layers[3].keys[:, :, 0] += 1.0
        elif change == "position":
            text.position = text.position + 1
        elif change == "window":
            layers[2].keys[:, :, -1] += 1.0
        elif change == "state":
            session._state += 0.3
        session.bind_cache(text)
        assert float((session.propose_next([])[0] - expected).abs().max()) > 1e-3, change
    assert sources(target.config) == {gemma4_files.SLIDING: 2, gemma4_files.FULL: 3}
    assert sources(gemma4_files.target_for("shares its own").config) == {gemma4_files.SLIDING: 0, gemma4_files.FULL: 1}


@torch.no_grad()
def test_nodes_of_a_tree_are_paths_of_chains() -> None:
    """A level is one pass, and its nodes do not see one another."""
    for name in ("plain", "clusters"):
        target = gemma4_files.target_for()
        draft = drafted_by(gemma4_files.VARIANTS[name].theirs(), target)
        session, tree = gemma4_files.begun(draft, target, TEXT), DraftTree(int(TEXT[0, -1]))
        logits, level = {0: session.expand(tree, [0])[0][0]}, [0]
        for depth in range(1, 4):
            level = [tree.add(parent, token) for parent in level for token in (depth, depth + 4)]
            logits |= dict(zip(level, session.expand(tree, level)[0], strict=True))
            assert session.passes == depth + 1
        for node in logits:
            single, path = gemma4_files.begun(draft, target, TEXT), tree.path(node)
            for place in range(len(path) + 1):
                row = single.propose_next([torch.tensor(token) for token in path[:place]])[0]
            torch.testing.assert_close(logits[node], row, rtol=3e-6, atol=3e-6)


# Generations with Gemma 4 assistants: the target's own text, and in each round what is drafted after reading anew. ----


WORDS = 1 + prompt(9) % (gemma4_files.VOCAB - 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 5},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.1, "verify": [1.0]}},
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "static": {"tree": [3, 2, 1]},
}


def assisted(target: CausalLM, name: str = "plain", **settings: Any) -> SpecDecPPAssistant:
    speculation = SpeculationConfig(**{"rule": "threshold", **(settings or SETTINGS["fixed"])})
    return SpecDecPPAssistant.from_draft(gemma4_files.VARIANTS[name].theirs(), target=target, speculation=speculation)


def test_a_text_whose_cache_the_draft_reads_is_captured_in_whole_rounds_alone() -> None:
    target = gemma4_files.target_for()
    assistant = assisted(target, rule="fixed", num_tokens=5)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    plain = target.generate(WORDS, **options)
    with pretend_graphs() as counts:
        scored = target.generate(
            WORDS, assistant_model=assistant, return_dict_in_generate=True, output_scores=True, **options
        )
        assert torch.equal(scored.sequences, plain)
        assert assistant.stats.uncaptured == "scores or logits are requested"
        assert not counts
        assert torch.equal(target.generate(WORDS, assistant_model=assistant, **options), plain)
        assert assistant.stats.uncaptured is None
        # A pass is compared with the target's own, and each graph is replayed once when it is captured.
        assert counts["replayed"] == assistant.stats.rounds + 1 + counts["captured"]


@pytest.mark.daily("unified-fixed", "images-dyspec", "clusters-fixed")
@pytest.mark.parametrize("settings", ["fixed", "dyspec"])
@pytest.mark.parametrize("name", ["unified", "images", *VARIANTS])
def test_variants_and_other_classes(name: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in VARIANTS:
        target, theirs = target_for(VARIANTS[name].of), VARIANTS[name].theirs()
    else:
        target, theirs = gemma4_files.other_pairs()[name]
    speculation = SpeculationConfig(**{"rule": "threshold", **SETTINGS[settings]})
    assistant = SpecDecPPAssistant.from_draft(theirs, target=target, speculation=speculation)
    check_rounds(target, assistant, WORDS, monkeypatch, max_new_tokens=16)


def test_a_cache_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made without the target's config it holds every token, of which the draft sees a window."""
    target = gemma4_files.target_for()
    assistant = assisted(target)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    output = target.generate(WORDS, assistant_model=assistant, **how, **{CACHE: DynamicCache()})
    assert torch.equal(output, target.generate(WORDS, **how))
    ear.check(target)


def test_caches_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    target = gemma4_files.target_for()
    assistant = assisted(target)
    monkeypatch.setattr(DynamicCache, "offload", lambda *_: None)
    for streams in (torch, torch.cuda):  # a torch with CUDA makes none where there is no GPU
        monkeypatch.setattr(streams, "Stream", lambda: None)
    with pytest.raises(ValueError, match="reads the keys and values in the target's cache.*cache_implementation unset"):
        target.generate(WORDS, assistant_model=assistant, max_new_tokens=4, cache_implementation="offloaded")


def test_together_with_transformers_own() -> None:
    target = gemma4_files.target_for()
    with pytest.raises(ValueError, match="speculation_type='dflash' is transformers' own"):
        target.generate(WORDS, assistant_model=assisted(target), max_new_tokens=4, speculation_type="dflash")


ORDER = "masked_embedding.token_ordering"


def saved(folder: Path, name: str = "plain", **changes: Any) -> Path:
    VARIANTS[name].theirs().save_pretrained(folder)
    change_json(folder / "config.json", **changes)
    return folder


def load(folder: Path, target: CausalLM | None = None, **options: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target or target_for(), **options)


def test_an_object_without_a_name_cannot_be_stored(tmp_path: Path) -> None:
    assistant = SpecDecPPAssistant.from_draft(VARIANTS["plain"].theirs(), target=target_for())
    assert "reads the cache of the target" in assistant.kind.describe(assistant.config)
    with pytest.raises(ValueError, match="model in memory"):
        assistant.save_pretrained(tmp_path)


TOKENS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no order": ("clusters", {ORDER: None}, "token_ordering is missing"),
    "an order that is none": ("clusters", {ORDER: torch.zeros(VOCAB, dtype=torch.long)}, r"\[12\] numbers of int64"),
    "an order without clusters": ("plain", {ORDER: torch.arange(VOCAB)}, f"unexpected {ORDER}"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_order_of_tokens(case: str, tmp_path: Path) -> None:
    name, changes, reason = TOKENS[case]
    with pytest.raises(ValueError, match=reason):
        load(edited(saved(tmp_path, name), **changes))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 24}, "reads states of 32 numbers, and they have 24"),
    "tokens": ({"vocab_size": VOCAB + 1}, "proposes 12 token ids, and there are 13"),
    "heads": ({"num_key_value_heads": 4}, r"reads 2 heads of 8 numbers \(sliding_attention\), and there are 4 of 8"),
    "head size": ({"global_head_dim": 8}, r"reads 2 heads of 16 numbers \(full_attention\), and there are 2 of 8"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_gemma_4(name: str) -> None:
    changes, reason = OTHERS[name]
    with pytest.raises(ValueError, match=f"{reason} in Gemma4ForCausalLM.*trained for alone"):
        SpecDecPPAssistant.from_draft(VARIANTS["plain"].theirs(), target=target_for(**changes))


def test_another_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drafts for a Gemma 4, and there is a model of type 'llama'"):
        load(saved(tmp_path), tiny("llama", vocab_size=VOCAB))


def test_a_class_that_this_transformers_lacks(tmp_path: Path) -> None:
    folder = saved(tmp_path, model_type="gemma9_assistant")
    with pytest.raises(ValueError, match=r"'gemma9_assistant', a class.*that version \d.* does not have.*Install"):
        load(folder)


PLAIN = VARIANTS["plain"].theirs().config.to_dict()
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"text_config": None}, ""),
    "clusters of no size": ({"use_ordered_embeddings": True, "num_centroids": 5}, "vocab_size=12 .*num_centroids=5"),
    "more than there are": (
        {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 5},
        "centroid_intermediate_top_k=5",
    ),
    "a layer of its own": ({"text_config": {**PLAIN["text_config"], "num_kv_shared_layers": 1}}, "must be shared"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str) -> None:
    changes, reason = CONFIGS[name]
    weights = VARIANTS["plain"].theirs().state_dict()
    with pytest.raises(ValueError, match=f"(?s)No Gemma 4 assistant can be built.*{reason}"):
        GEMMA4.read({**PLAIN, **changes}, weights, "The draft")
