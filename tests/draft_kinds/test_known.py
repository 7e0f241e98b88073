"""Kinds of draft: what is asked of them is asked in one room, and drafts that are no model a step fit the interface."""

import ast
from functools import cache
from pathlib import Path

import pytest
from support.files.stand_ins import BLOCK, BlockDraft
from support.targets.models import prompt, tiny

import hf_specdecpp
from hf_specdecpp import SpecDecPPAssistant, SpecDecPPConfig, SpeculationConfig
from hf_specdecpp.draft_kinds import known
from hf_specdecpp.draft_kinds.draft_kind import DraftKind
from hf_specdecpp.draft_kinds.known import BY_NAME, KINDS, kind_of, kind_to_train, read_config, recognise
from hf_specdecpp.files import Repository

PACKAGE = Path(hf_specdecpp.__file__).parent
# The default of `draft_kind`, which repositories may leave out; fields; a contestant's name; names of others.
ALLOWED = {
    ("config/assistant_config.py", "independent"), ("benchmark/contestants.py", "lookup"), ("choosing.py", "lookup"),
    ("hub/publishing.py", "lookup"),
    ("serving.py", "eagle3"), ("serving.py", "dspark"), ("assistant.py", "eagle3"),
}  # fmt: skip
SHARED = {"acceptance", "checkpoints", "draft_kind", "known"}  # files of `drafts/` that are of no kind
STARTS = "where the training of such drafts begins: layers of their shapes, fitted to a target's"
# What may be imported of a kind's own files, and why.
IMPORTED = {
    ("assistant.py", "early_exit"): "public constructors: from_early_exit",
    ("assistant.py", "independent"): "from_draft",
    ("assistant.py", "conditioned"): "from_conditioned",
    ("choosing.py", "lookup"): "what a user may type: assist(model, 'lookup')",
    ("choosing.py", "mtp"): "assist(model, 'mtp')",
    ("training/distillation/first_weights.py", "conditioned"): STARTS,
    ("training/distillation/first_weights.py", "eagle3"): STARTS,
    ("training/distillation/initialise.py", "conditioned"): STARTS,
    ("training/distillation/initialise.py", "eagle3"): STARTS,
}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def names_in(source: str) -> set[str]:
    """Strings of a program that are the name of a kind."""
    constants = (node.value for node in nodes_of(source) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in BY_NAME}


def imported_in(source: str) -> dict[str, str]:
    """What a program imports of a kind's own files, and kinds themselves: names, and the kinds."""
    found = {}
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_specdecpp.draft_kinds"):
            whole = f"{node.module}."
            for alias in node.names:
                kind, one = f"{whole}{alias.name}".split(".")[2], getattr(known, alias.name, None)
                if kind not in SHARED or isinstance(one, DraftKind):
                    found[alias.asname or alias.name] = one.name if isinstance(one, DraftKind) else kind
    return found


def told_apart_in(source: str) -> set[str]:
    """Names of a kind's own files whose instances a program tells apart."""
    calls = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    asked = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")]
    words = {word.id for node in asked for word in ast.walk(node) if isinstance(word, ast.Name)}
    return words & imported_in(source).keys()


def test_nobody_outside_the_room_asks_for_a_kind_by_name_or_class() -> None:
    files = {
        file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8")
        for file in PACKAGE.rglob("*.py")
        if PACKAGE / "draft_kinds" not in file.parents
    }
    assert {(file, name) for file, source in files.items() for name in names_in(source)} <= ALLOWED
    imported = {(file, kind) for file, source in files.items() for kind in imported_in(source).values()}
    assert imported == IMPORTED.keys(), "a new one needs a reason, an old one is to be deleted from the list"
    assert {file: found for file, source in files.items() if (found := told_apart_in(source))} == {}
    assert [file for file in PACKAGE.rglob("*.md") if "draft_kind" in file.read_text(encoding="utf-8")] == []


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
        assert not kind.own_layers or kind.own_file
        assert bool(kind.own_file) == bool(kind.own_field)
        assert kind.unserved or type(kind).export is not DraftKind.export or kind.served_by  # type: ignore[attr-defined]


def test_only_drafts_of_others_can_be_misread() -> None:
    for kind in KINDS:
        config = SpecDecPPConfig(draft_kind=kind.name, draft_layers=[0], draft_id="org/draft")
        if kind.name == "eagle3":
            kind.override(config, {"norm_output": True})
            assert kind.describe(config) == "EAGLE-3 org/draft, read with norm_output=True"
            config.draft_id = None
        said = r"eagle3=\{'fc_norm': True\} says how an EAGLE-3 draft that others trained"
        with pytest.raises(ValueError, match=said):
            kind.override(config, {"fc_norm": True})


def test_one_price_makes_the_rule_draft_the_whole_block() -> None:
    """With a step for each candidate it would stop earlier: the same prices, another block."""
    target, drafted = tiny("llama"), {}
    for block in (1, BLOCK):
        costs = {"draft": 0.4, "branch": 0.0, "block": block, "verify": [1.0]}
        speculation = SpeculationConfig("throughput", costs=costs)
        assistant = SpecDecPPAssistant(SpecDecPPConfig(), BlockDraft(target, 0.5), speculation=speculation)
        assistant.attach(target)
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=60, do_sample=False)
        stats = assistant.stats
        drafted[block] = stats.drafted / max(stats.rounds - stats.idle_rounds, 1)
    assert drafted[BLOCK] > drafted[1]
