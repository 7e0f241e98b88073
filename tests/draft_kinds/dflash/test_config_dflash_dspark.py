"""DSpark checkpoints: how their configs are read, which row proposes the first candidate, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import edited
from support.files.dspark_files import (
    DEPTH,
    GREEDY,
    IDS,
    RANK,
    VARIANTS,
    VOCAB,
    YARN,
    Checkpoint,
    target_for,
)  # fmt: skip
from support.targets.formulas import states_of
from support.targets.models import prompt
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.draft_kinds import acceptance
from hf_specdecpp.draft_kinds.dflash.config_dflash import RELATIVES, DFlashSettings, read_settings
from hf_specdecpp.draft_kinds.known import BY_NAME, ready_made, recognise
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect

PLAIN, SPECULATORS, FORGED = VARIANTS["deepspec"], VARIANTS["speculators"], VARIANTS["specforge"]
DSPARK = BY_NAME["dspark"]


def load(folder: Path, **options: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target_for(**options))


def settings_of(checkpoint: Checkpoint, **changes: Any) -> DFlashSettings:
    """What a config with these changes says beside the checkpoint's tensors."""
    named = {name.removeprefix(checkpoint.prefix): tensor for name, tensor in checkpoint.tensors().items()}
    raw = {name: value for name, value in {**checkpoint.config(), **changes}.items() if value is not ...}
    return read_settings(raw, named, "dspark")


@pytest.mark.parametrize("name", VARIANTS)
def test_recognised(name: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS[name]
    assert recognise(checkpoint.config()) is DSPARK
    assert ready_made(Repository(str(checkpoint.save(tmp_path)))) is DSPARK
    assert inspect(Repository(str(tmp_path))).sound
    found = settings_of(checkpoint)
    assert (found.markov_rank, found.markov_head) == (
        checkpoint.rank,
        checkpoint.head if checkpoint.rank else "vanilla",
    )
    assert (found.confidence_head, found.confidence_with_markov) == (
        checkpoint.confidence != "none", checkpoint.confidence == "markov"
    )  # fmt: skip
    assert found.reads == list(checkpoint.reads)


@pytest.mark.parametrize(("raw", "kind"), [
    ({"architectures": ["LingDSparkModel"]}, "dspark"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 8}}, "dspark"),
    ({"model_type": "deepseek_v4", "dspark_block_size": 7}, "dspark"),
    ({"dspark_config": {"markov_rank": 8}}, "dspark"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 0}}, "dflash"),
    ({"architectures": 3, "dflash_config": 4}, "dflash"),
])  # fmt: skip
def test_recognised_by_other_signs(raw: dict[str, Any], kind: str) -> None:
    assert recognise(raw) is BY_NAME[kind]


def test_fields_of_the_target_are_noise_in_a_copy_of_its_config() -> None:
    noise = {"partial_rotary_factor": 0.25, "rope_scaling": YARN, "sliding_window": 4, "use_sliding_window": True,
             "layer_types": ["sliding_attention"] * 40, "model_type": "bailing", "num_experts": 256}  # fmt: skip
    assert settings_of(PLAIN, **noise) == settings_of(Checkpoint(own=True))
    rope = {"rope_parameters": {"rope_theta": 77.0, "partial_rotary_factor": 0.25, "rope_type": "yarn", "factor": 4.0}}
    found = settings_of(PLAIN, **rope, rope_theta=...)
    assert found.layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}
    # Elsewhere the config is the draft's own.
    assert settings_of(FORGED).layer["rope_parameters"]["rope_type"] == "yarn"
    with pytest.raises(ValueError, match="partial_rotary_factor=0.25"):
        settings_of(FORGED, partial_rotary_factor=0.25)


def test_the_nearest_field_counts() -> None:
    """`dspark_config`, then `dflash_config`, then the top."""
    near = {**FORGED.config()["dflash_config"], "block_size": 6}
    assert settings_of(FORGED, dflash_config=near).block_size == 6
    assert settings_of(FORGED, dflash_config=near, dspark_config={"block_size": 5}).block_size == 5
    head = {"markov_rank": 3}
    assert settings_of(FORGED, **head).markov_rank == RANK, "the nested field is right"
    with pytest.raises(ValueError, match="markov_rank=3, and by the draft's tensors that is 32"):
        settings_of(FORGED, dspark_config=head)


def test_all_tokens_may_be_counted_without_a_list_of_them(tmp_path: Path) -> None:
    assert load(VARIANTS["minicpm"].save(tmp_path)).ready_drafter().model.token_ids is None
    assert torch.equal(load(SPECULATORS.save(tmp_path)).ready_drafter().model.token_ids, IDS)
    assert settings_of(SPECULATORS, draft_vocab_size=...).draft_vocab_size == len(IDS), "told by the tensors"


# Which row proposes the first candidate. ------------------------------------------------------------------------------


def declared(count: Any) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": count}]}}


@pytest.mark.parametrize(("checkpoint", "changes", "first", "says"), [
    (PLAIN, {}, True, False),
    (PLAIN, {"sample_from_anchor": False}, False, True),
    (FORGED, {"dspark_config": {"sample_from_anchor": False}}, False, True),
    (FORGED, {"dspark_config": {"query_zero_predicts_next": True}}, True, True),
    (SPECULATORS, {"sample_from_anchor": False, **declared(4)}, False, True),
    (SPECULATORS, {"sample_from_anchor": ..., **declared(4)}, True, True),
    (SPECULATORS, {"sample_from_anchor": ..., **declared(3)}, False, True),
    (SPECULATORS, {"sample_from_anchor": ..., **declared(2)}, False, False),
    (SPECULATORS, {"sample_from_anchor": ..., **declared("x")}, False, False),
    (SPECULATORS, {"sample_from_anchor": ..., "speculators_config": {"proposal_methods": 7}}, False, False),
    (SPECULATORS, {"sample_from_anchor": ...}, False, False),
])  # fmt: skip
def test_the_first_row(checkpoint: Checkpoint, changes: dict[str, Any], first: bool, says: bool) -> None:
    found = settings_of(checkpoint, **changes)
    assert (found.samples_anchor, found.says_layout, found.places) == (first, says, 3 + first)


@pytest.mark.takes(3)
@pytest.mark.parametrize("checkpoint", [
    Checkpoint(says="nothing"), Checkpoint(fills_in=True), VARIANTS["speculators, silent"], Checkpoint("speculators"),
], ids=["flat, first", "flat, fills in", "speculators, fills in", "speculators, first"])  # fmt: skip
def test_a_layout_that_is_not_said_is_measured(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reading is kept whose first candidates agree with the target: here the draft is made to agree in the right
    one. It is measured once, and told."""
    target = target_for()
    texts = [1 + prompt(16, seed) % (VOCAB - 2) for seed in range(2)]
    monkeypatch.setattr(acceptance, "texts_for", lambda *_: texts)
    measured: list[bool] = []

    def agreement(draft: Any, *_: Any) -> list[float]:
        measured.append(draft.settings.samples_anchor)
        return [0.8, 0.5] if draft.settings.samples_anchor != checkpoint.fills_in else [0.05, 0.9]

    monkeypatch.setattr(acceptance, "agreement", agreement)
    with caplog.at_level("INFO", "hf_specdecpp"):
        assistant = SpecDecPPAssistant.from_pretrained(checkpoint.save(tmp_path), target=target)
    assert assistant.ready_drafter().places == checkpoint.places
    assert sorted(measured) == [False, True]
    assert assistant.agreement == [0.8, 0.5]
    assert "sample_from_anchor" in caplog.text
    assert "(5% of its first candidates agree)" in caplog.text
    levels = {each.levelname for each in caplog.records if "sample_from_anchor" in each.getMessage()}
    is_usual = checkpoint.fills_in == (checkpoint.dialect == "speculators")
    assert levels == {"INFO" if is_usual else "WARNING"}, "another layout than the usual one is told"
    target.float()
    assistant.setup()
    assert len(measured) == 2
    assert assistant.ready_drafter().places == checkpoint.places


def taught(checkpoint: Checkpoint, folder: Path, texts: Tensor) -> Path:
    """A draft that was trained in its layout to make the target's choices in `texts` `[batch, n]`, whose config does
    not say which layout that is."""
    folder, target = checkpoint.save(folder, sample_from_anchor=not checkpoint.fills_in), target_for()
    draft: Any = SpecDecPPAssistant.from_pretrained(folder, target=target).ready_drafter()
    draft.model.requires_grad_(True)
    chosen, states = target(texts).logits.argmax(-1), states_of(target, draft, texts)
    anchors = torch.arange(1, texts.shape[1] - draft.places)
    answers = chosen[:, anchors[:, None] + torch.arange(draft.places)]
    optimiser = torch.optim.Adam(draft.model.parameters(), 1e-2)
    for _ in range(STEPS):
        logits = draft.head_logits(draft.blocks_after(texts, states, anchors.expand(len(texts), -1)))
        cross_entropy(logits.flatten(0, 2), answers.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    tensors = {name: tensor.detach() for name, tensor in DSPARK.own_tensors(draft.model).items()}
    return edited(checkpoint.save(folder), **tensors)


STEPS = 60


@pytest.mark.daily("True-speculators", takes=6)
@pytest.mark.parametrize("dialect", ["deepspec", "speculators", "gemma4"])
@pytest.mark.parametrize("fills_in", [False, True])
def test_a_trained_draft_is_read_in_its_layout(
    dialect: str, fills_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is pretended: the agreement of a draft that learned one layout, and whose config says none."""
    starts = torch.cat([1 + prompt(6, seed) % (VOCAB - 2) for seed in range(6)])
    texts = target_for().generate(starts, attention_mask=torch.ones_like(starts), **GREEDY)
    checkpoint = Checkpoint(dialect, rank=0, confidence="none", fills_in=fills_in, keys_are_values=False)
    folder = taught(checkpoint, tmp_path, texts)
    monkeypatch.setattr(acceptance, "texts_for", lambda *_: list(texts[:, None]))
    assistant = load(folder)
    assert assistant.ready_drafter().settings.samples_anchor is not fills_in
    assert assistant.agreement[0] > 0.6
    monkeypatch.setattr(acceptance, "texts_for", lambda *_: [])  # the other one
    usual = load(folder).ready_drafter().settings.samples_anchor
    assert usual is (dialect != "speculators")


# What is refused. -----------------------------------------------------------------------------------------------------


def flat(**changes: Any) -> tuple[Checkpoint, dict[str, Any], dict[str, Any]]:
    return PLAIN, changes, {}


REFUSED: dict[str, tuple[tuple[Checkpoint, dict[str, Any], dict[str, Any]], str]] = {
    **{f"a relative: {name}": (flat(architectures=[name]), f"relative of DSpark \\({name}\\) with ")
       for name in ("Qwen35DSparkModel", "K3DSparkModel", "MuseSparkDSparkModel")},
    **{f"a relative: {name}": (flat(**{name: True}), f"relative of DSpark \\({name}\\) with ")
       for name in RELATIVES},
    "an unknown relative": (flat(architectures=["FooDSparkModel"]), "FooDSparkModel.*layers that are not known"),
    "within the target": (flat(dspark_block_size=7), "dspark_block_size\\) with layers within the target's own"),
    "another kind of speculators": (flat(speculators_model_type="x"), "speculators of type 'x'"),
    "no mask": (flat(mask_token_id=...), "mask_token_id=None must be a whole number"),
    "a mask beyond the target": ((VARIANTS["minicpm"], {"mask_token_id": VOCAB}, {}), f"mask token {VOCAB}, and there"),
    "layers that do not ascend": (flat(target_layer_ids=[1, 0, 3]), "reads layers \\[1, 0, 3\\].*must ascend"),
    "a layer twice": (flat(target_layer_ids=[0, 1, 1]), "reads layers \\[0, 1, 1\\].*must ascend"),
    "a layer beyond the target": (flat(target_layer_ids=[0, 1, DEPTH]), f"reads layers \\[0, 1, {DEPTH}\\]"),
    "the embeddings": ((SPECULATORS, {"aux_hidden_state_layer_ids": [0, 2, 4]}, {}), "reads layers \\[0, 2, 4\\]"),
    "a layout that is neither": (flat(sample_from_anchor="x"), "samples_anchor='x' must be true or false"),
    "a rank": (flat(markov_rank=7), "markov_rank=7, and by the draft's tensors that is 32"),
    "a head without tensors": ((VARIANTS["deepspec, plain"], {"markov_rank": 8}, {}), "markov_rank=8, and .* is 0"),
    "another head": (flat(markov_head_type="rnn"), "markov_head_type='rnn', and by the draft's .* is vanilla"),
    "no confidence": (flat(enable_confidence_head=False), "enable_confidence_head=False"),
    "a confidence without tensors": (
        (VARIANTS["deepspec, rnn"], {"enable_confidence_head": True}, {}), "enable_confidence_head=True"),
    "inputs of the confidence": (flat(confidence_head_with_markov=False), "confidence_head_with_markov=False"),
    "a width of the confidence": (
        (PLAIN, {"confidence_head_with_markov": ...}, {"confidence_head.proj.weight": torch.zeros(1, 5)}),
        "confidence_head.proj.weight has shape \\[1, 5\\]"),
    "a reduced vocabulary": (flat(draft_vocab_size=17), "draft_vocab_size=17, and by the draft's tensors that is 23"),
    "no list of tokens": ((SPECULATORS, {}, {"d2t": None}), "no d2t, which says what its 17 tokens are"),
    "other lists": ((SPECULATORS, {}, {"t2d": torch.ones(VOCAB, dtype=torch.bool)}), "d2t and t2d name different"),
    "the target's head for few tokens": ((SPECULATORS, {}, {"lm_head.weight": None}), "missing lm_head.weight"),
    "a Markov head of few tokens": (
        (PLAIN, {}, {"markov_head.markov_w1.weight": torch.zeros(9, RANK)}), "markov_w1.weight has shape \\[9, 32\\]"),
    "an unknown tensor": ((PLAIN, {}, {"mask_hidden": torch.zeros(3)}), "not a DSpark draft .* unexpected mask_hidden"),
    "a number for a matrix": ((PLAIN, {}, {"markov_head.markov_w1.weight": torch.zeros(())}), "markov_rank=32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    (checkpoint, changes, tensors), reason = REFUSED[name]
    folder = checkpoint.save(tmp_path, **changes)
    if tensors:
        edited(folder, **tensors)
    with pytest.raises(ValueError, match=reason):
        load(folder)


def test_own_copies_of_the_target_are_left_out(tmp_path: Path) -> None:
    target = target_for()
    copies = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
              "lm_head.weight": target.get_output_embeddings().weight.detach().clone()}  # fmt: skip
    draft = load(edited(PLAIN.save(tmp_path), **copies)).ready_drafter()
    assert draft.model.lm_head is None
    assert draft.model.embed_tokens is None


def test_stored_whole_with_other_weights(tmp_path: Path) -> None:
    """A draft in memory, as after training, is stored with what its settings say, and drafts the same."""
    target = target_for()
    module = SpecDecPPAssistant.from_pretrained(SPECULATORS.save(tmp_path / "theirs"), target=target).parts.module
    assistant = SpecDecPPAssistant.from_draft(module, target=target)
    assert assistant.kind.describe(assistant.config) == "DSpark blocks, which read states of the target"
    assistant.save_pretrained(tmp_path / "ours")
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "ours", target=target).parts.module
    assert again.settings == module.settings
    assert torch.equal(again.token_ids, module.token_ids)
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in again.state_dict().items())
