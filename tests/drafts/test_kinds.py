"""Kinds of draft: what is asked of them is asked in one room, and drafts that are no model a step fit the interface."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny
from support.stand_ins import BLOCK, BlockDraft, LookupDraft
from torch import Tensor

import hf_specdecpp
from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafts import known
from hf_specdecpp.drafts.kind import Kind
from hf_specdecpp.drafts.known import BY_NAME, KINDS, kind_of, kind_to_train, override, read_config, recognise
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.known_costs import Rounds

PACKAGE = Path(hf_specdecpp.__file__).parent
# The default of `draft_kind`, which repositories may leave out; fields; a contestant's name; names of others.
ALLOWED = {
    ("config/assistant.py", "independent"),
    ("benchmark/contestants.py", "lookup"),
    ("hub/publishing.py", "lookup"),
    ("serving.py", "eagle3"),
    ("assistant.py", "eagle3"),
}
SHARED = {"checkpoints", "kind", "known"}  # files of `drafts/` that are of no kind
STARTS = "where the training of such drafts begins: layers of their shapes, fitted to a target's"
# What may be imported of a kind's own files, and why.
IMPORTED = {
    ("assistant.py", "early_exit"): "public constructors: from_early_exit",
    ("assistant.py", "conditioned"): "from_conditioned",
    ("choosing.py", "lookup"): "what a user may type: assist(model, 'lookup')",
    ("choosing.py", "mtp"): "assist(model, 'mtp')",
    ("training/distillation/least_squares.py", "conditioned"): STARTS,
    ("training/distillation/initial_layer.py", "eagle3"): STARTS,
    ("training/distillation/initial_block.py", "dflash"): STARTS,
    ("training/distillation/start.py", "conditioned"): STARTS,
    ("training/distillation/start.py", "eagle3"): STARTS,
    ("training/distillation/start.py", "dflash"): STARTS,
}


# Who asks. ------------------------------------------------------------------------------------------------------------


def names_in(source: str) -> set[str]:
    """Strings of a program that are the name of a kind."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in BY_NAME}


def imported_in(source: str) -> dict[str, str]:
    """What a program imports of a kind's own files, and kinds themselves: names, and the kinds."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_specdecpp.drafts"):
            whole = f"{node.module}."
            for alias in node.names:
                kind = f"{whole}{alias.name}".split(".")[2]
                one = getattr(known, alias.name, None)
                if kind not in SHARED or isinstance(one, Kind):
                    found[alias.asname or alias.name] = one.name if isinstance(one, Kind) else kind
    return found


def told_apart_in(source: str) -> set[str]:
    """Names of a kind's own files whose instances a program tells apart."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    asked = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")]
    words = {word.id for node in asked for word in ast.walk(node) if isinstance(word, ast.Name)}
    return words & imported_in(source).keys()


@pytest.mark.takes(3)
def test_nobody_outside_the_room_asks_for_a_kind_by_name_or_class() -> None:
    files = {
        file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8")
        for file in PACKAGE.rglob("*.py")
        if PACKAGE / "drafts" not in file.parents
    }
    assert {(file, name) for file, source in files.items() for name in names_in(source)} <= ALLOWED
    imported = {(file, kind) for file, source in files.items() for kind in imported_in(source).values()}
    assert imported == IMPORTED.keys(), "a new one needs a reason, an old one is to be deleted from the list"
    assert {file: found for file, source in files.items() if (found := told_apart_in(source))} == {}
    templates = [file for file in PACKAGE.rglob("*.md") if "draft_kind" in file.read_text(encoding="utf-8")]
    assert templates == []


def test_the_check_above_sees_names_imports_and_classes() -> None:
    assert names_in("if config.draft_kind == 'conditioned': pass") == {"conditioned"}
    source = "from hf_specdecpp.drafts.dflash.model import DFlashDraft as Blocks\nisinstance(x, (int, Blocks))"
    assert imported_in(source) == {"Blocks": "dflash"}
    assert told_apart_in(source) == {"Blocks"}
    assert imported_in("from hf_specdecpp.drafts import lookup") == {"lookup": "lookup"}
    assert imported_in("from hf_specdecpp.drafts.known import EARLY_EXIT") == {"EARLY_EXIT": "early_exit"}
    assert imported_in("from hf_specdecpp.drafts.known import kind_of\nfrom hf_specdecpp.drafts import known") == {}


# Which it is. ---------------------------------------------------------------------------------------------------------


def test_a_config_is_recognised_by_the_kind_itself() -> None:
    for kind in KINDS:
        raw = SpecDecPPConfig(draft_kind=kind.name).to_dict()
        assert recognise(raw) is kind
        assert kind_of(read_config(raw, kind, Repository("org/x"), None)) is kind
    assert recognise({"model_type": "specdecpp"}) is BY_NAME["independent"], "as older repositories have it"
    assert recognise({"model_type": "llama"}) is None
    assert recognise({"model_type": "llama", "draft_vocab_size": 9}) is BY_NAME["eagle3"]
    assert recognise({"model_type": "llama", "draft_vocab_size": 9, "draft_kind": "eagle3"}) is None, "damaged"
    assert recognise({"model_type": "qwen3", "dflash_config": {}}) is BY_NAME["dflash"]
    assert recognise({"model_type": "gemma4_assistant"}) is BY_NAME["gemma4"]
    assert recognise({"model_type": "gemma4_unified_assistant"}) is BY_NAME["gemma4"]
    assert recognise({"model_type": "gemma4_text"}) is None
    assert recognise({"model_type": "specdecpp", "draft_kind": "medusa"}) is None
    with pytest.raises(ValueError, match="draft_kind='medusa' must be one of"):
        kind_of(SpecDecPPConfig(draft_kind="medusa"))


def test_what_training_asks_for() -> None:
    asked = [kind_to_train(draft).name for draft in (None, "conditioned", "block", "org/model")]
    assert asked == ["early_exit", "conditioned", "dflash", "independent"]
    for kind in KINDS:
        assert (kind.trainable is None) == ("training" in kind.cannot), "what is not trained says why"
        assert kind.trainable is None or not kind.trainable.own_layers or kind.stored.own is not None


def test_only_drafts_of_others_can_be_misread() -> None:
    for kind in KINDS:
        config = SpecDecPPConfig(draft_kind=kind.name, draft_layers=[0], draft_id="org/draft")
        form = kind.stored.format
        assert (form is not None) == (kind.name in ("eagle3", "dflash", "gemma4", "mtp"))
        assert (form is not None and form.check_overrides is not None) == (kind.name == "eagle3")
        if form is not None and form.check_overrides is not None:
            override(config, {"norm_output": True})
            assert kind.describe(config) == "EAGLE-3 org/draft, read with norm_output=True"
            config.draft_id = None
        with pytest.raises(
            ValueError, match=r"eagle3=\{'fc_norm': True\} says how an EAGLE-3 draft that others trained"
        ):
            override(config, {"fc_norm": True})


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("independent", "org/draft at abc"),
        ("early_exit", "layers 0, 2 of the target"),
        ("conditioned", "layers 0, 2 of the target, which read its states"),
        ("eagle3", "EAGLE-3 org/draft at abc"),
        ("dflash", "DFlash org/draft at abc"),
        ("gemma4", "Gemma 4 assistant org/draft at abc"),
        ("mtp", "multi-token layers of org/draft at abc"),
        ("lookup", "text that was seen before"),
    ],
)
def test_descriptions(kind: str, described: str) -> None:
    config = SpecDecPPConfig(draft_kind=kind, draft_layers=[0, 2], draft_id="org/draft", draft_revision="abc")
    assert kind_of(config).describe(config) == described


def test_every_kind_says_how_it_is_exported_or_why_not() -> None:
    for kind in KINDS:
        stored, form = kind.stored, kind.stored.format
        serves_its_own = form is not None and form.served_by is not None
        assert stored.export is not None or stored.unserved or serves_its_own
        assert stored.export is None or not (stored.unserved or serves_its_own)


# Drafts that are not a model a step. ----------------------------------------------------------------------------------

REPEATING = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]])


def assisted_by(draft: Draft, target: CausalLM, **settings: Any) -> SpecDecPPAssistant:
    assistant = SpecDecPPAssistant(
        SpecDecPPConfig(), draft, speculation=SpeculationConfig(**{"rule": "threshold", **settings})
    )
    assistant.attach(target)
    return assistant


def test_a_block_is_one_price() -> None:
    """One pass, and little for each further candidate."""
    target = tiny("llama")
    costs = Rounds(target, BlockDraft(target), DraftProbability(), BLOCK).assumed()
    assert costs.block == BLOCK
    assert 0.0 <= costs.branch < 0.5 * costs.draft
    assert costs.start == 0.0
    one, _, three = costs.round_seconds(BLOCK)[1:] - costs.verify_seconds(BLOCK)[1:]
    assert three < 2.0 * one


def test_a_lookup_is_nearly_free() -> None:
    target = tiny("llama")
    costs = Rounds(target, LookupDraft(), DraftProbability(), 8, trees=True).assumed()
    assert costs.block == LookupDraft.block
    assert costs.draft < 0.5 * costs.verify[0]


def test_a_draft_says_what_it_cannot_do() -> None:
    class ChainsOnly(LookupDraft):
        cannot = {"trees": "Such a draft cannot branch. Set tree=None."}

    target = tiny("llama")
    assistant = assisted_by(ChainsOnly(), target, tree="dyspec")
    with pytest.raises(ValueError, match="cannot branch"):
        target.generate(REPEATING, assistant_model=assistant, max_new_tokens=4)


def test_one_price_makes_the_rule_draft_the_whole_block() -> None:
    """With a step for each candidate it would stop earlier: the same prices, another block."""
    target = tiny("llama")
    drafted = {}
    for block in (1, BLOCK):
        costs = {"draft": 0.4, "branch": 0.0, "block": block, "verify": [1.0]}
        assistant = assisted_by(BlockDraft(target, 0.5), target, rule="throughput", costs=costs)
        target.generate(REPEATING, assistant_model=assistant, max_new_tokens=60, do_sample=False)
        stats = assistant.stats
        drafted[block] = stats.drafted / max(stats.rounds - stats.idle_rounds, 1)
    assert drafted[BLOCK] > drafted[1]


def test_readings_keep_no_tensor_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that drafts nothing asks nothing of the draft."""
    target = tiny("llama")
    draft = BlockDraft(target)
    assistant = assisted_by(draft, target, rule="throughput", costs={"draft": 9.0, "verify": [1.0, 9.0]})
    monkeypatch.setattr("hf_specdecpp.throughput.plan.Plan.starts", lambda *_: False)
    target.generate(REPEATING, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert draft.forwards == 0


def logits_of(reading: Any, depth: int) -> Tensor:
    found = reading.step([torch.tensor(0)] * depth)
    assert found is not None
    return found[0]


def test_q_by_depth_is_that_of_the_chain() -> None:
    """A tree's nodes of a depth have the distribution that a chain has there."""
    from hf_specdecpp.trees.tree import DraftTree

    target = tiny("llama")
    reading = BlockDraft(target).session(48)
    reading.begin_round(REPEATING, 0)
    tree = DraftTree(9)
    tree.add(0, 4)
    tree.add(0, 5)
    logits, _ = reading.expand(tree, [0, 1, 2])
    assert torch.equal(logits[1], logits[2])
    assert [torch.equal(logits[i], logits_of(reading, depth)) for i, depth in ((0, 0), (1, 1))] == [True, True]
    assert reading.passes == 1
