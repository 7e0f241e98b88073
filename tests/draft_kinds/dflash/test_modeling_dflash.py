"""The block of a DFlash draft beside its formulas (arXiv 2602.06036), written out here on plain tensors.

And beside transformers' own class and generator, with the same weights, where they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import HEAD_DIM, HEADS, KV_HEADS
from support.files.dflash_files import (
    DEPTH,
    DIALECTS,
    MASK,
    VARIANTS,
    VOCAB,
    WINDOWED,
    Checkpoint,
    assisted,
    target_for,
)
from support.targets.formulas import attended, close, rms, rotated, states_of
from support.targets.models import prompt
from support.targets.rounds_anew import begun, block_of, check_rounds, proposed
from support.targets.zoo import tiny_of
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashDraft, DFlashModel
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import DraftTree

TEXT = 1 + prompt(17) % (VOCAB - 1)  # no 0, which would be padding
ROUNDS = (9, 10, 14, 17)  # lengths of the text, its last token included, as rounds begin
NOT_SAID = {  # what a dialect has no word for
    "transformers": ("causal", "windows, not causal", "scaled", "samples the anchor"),
    "speculators": ("causal", "scaled", "the last layer read"),
    "original": (),
}
CASES = [(name, dialect) for dialect in DIALECTS for name in VARIANTS if name not in NOT_SAID[dialect]]


def loaded(checkpoint: Checkpoint, folder: Path, dialect: str, **options: Any) -> tuple[Any, CausalLM]:
    target = target_for(**options)
    return SpecDecPPAssistant.from_pretrained(checkpoint.save(folder, dialect), target=target).ready_drafter(), target


@torch.no_grad()
def formulas(checkpoint: Checkpoint, dialect: str, target: CausalLM, length: int) -> Tensor:
    """Logits `[places, vocab]` after `length` tokens of the text: everything computed anew from the target's own
    `output_hidden_states`."""
    t, hidden = checkpoint.tensors(), target(TEXT[:, : length - 1], output_hidden_states=True).hidden_states
    context = torch.cat([hidden[read + 1][0] for read in checkpoint.reads], -1)
    context = rms(context @ t["fc.weight"].T, t["hidden_norm.weight"])
    ids = torch.tensor([int(TEXT[0, length - 1])] + [MASK] * (checkpoint.block_size - 1))
    state = target.get_input_embeddings().weight[ids] * checkpoint.scale
    places = torch.arange(length - 1 + len(ids))
    for layer, kind in enumerate(checkpoint.layer_types):
        name = f"layers.{layer}."
        x = rms(state, t[name + "input_layernorm.weight"])
        seen, q = torch.cat((context, x)), (x @ t[name + "self_attn.q_proj.weight"].T).view(-1, HEADS, HEAD_DIM)
        k = (seen @ t[name + "self_attn.k_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        v = (seen @ t[name + "self_attn.v_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        q = rotated(rms(q, t[name + "self_attn.q_norm.weight"]), places[length - 1 :], checkpoint.theta)
        k = rotated(rms(k, t[name + "self_attn.k_norm.weight"]), places, checkpoint.theta)
        back = places[length - 1 :, None] - places
        visible = torch.ones_like(back, dtype=torch.bool)
        if not checkpoint.sees_later_rows(kind, dialect):
            visible &= back >= 0
        if kind == WINDOWED:
            visible &= back.abs() <= checkpoint.reach(dialect)
        state = state + attended(q, k, v, visible) @ t[name + "self_attn.o_proj.weight"].T
        x = rms(state, t[name + "post_attention_layernorm.weight"])
        gate = F.silu(x @ t[name + "mlp.gate_proj.weight"].T)
        state = state + (gate * (x @ t[name + "mlp.up_proj.weight"].T)) @ t[name + "mlp.down_proj.weight"].T
    logits = rms(state, t["norm.weight"]) @ target.get_output_embeddings().weight.T * checkpoint.multiplier
    if checkpoint.cap is not None:
        logits = torch.tanh(logits / checkpoint.cap) * checkpoint.cap
    return logits if checkpoint.samples_anchor else logits[1:]


@pytest.mark.daily(
    "plain-original", "windows, not causal-original", "the last layer read-original", "theta-original",
    "windows alone-transformers", "theta-transformers", "windows alone-speculators", "samples the anchor-speculators",
)  # fmt: skip
@pytest.mark.parametrize(("name", "dialect"), CASES)
@torch.no_grad()
def test_every_round(name: str, dialect: str, tmp_path: Path) -> None:
    """Cached from round to round, as a generation drafts them, beside formulas that compute everything anew."""
    checkpoint = VARIANTS[name]
    draft, target = loaded(checkpoint, tmp_path, dialect)
    states = states_of(target, draft, TEXT)
    for count in range(1, len(ROUNDS) + 1):
        session = begun(draft, TEXT, ROUNDS[:count], VOCAB, states)
        close(block_of(session, draft.places), formulas(checkpoint, dialect, target, ROUNDS[count - 1]))


def test_the_formulas_differ() -> None:
    """The control: each variant is another distribution."""
    target = target_for()
    found = [formulas(VARIANTS[name], "original", target, 14)[:2] for name in VARIANTS if "anchor" not in name]
    assert all(float((a - b).abs().max()) > 1e-2 for i, a in enumerate(found) for b in found[:i])
    window = VARIANTS["windows, not causal"]
    both = [formulas(window, dialect, target, 14) for dialect in ("original", "transformers")]
    assert float((both[0] - both[1]).abs().max()) > 1e-3, "the window of transformers is a token longer"


@torch.no_grad()
def test_a_pause_is_read_at_once(tmp_path: Path) -> None:
    """A round that drafts nothing leaves its states for the next one, and the text's positions go on."""
    checkpoint = VARIANTS["windows"]
    draft, target = loaded(checkpoint, tmp_path, "original")
    states, session = states_of(target, draft, TEXT), draft.session(VOCAB)
    session.read_verified(TEXT[:, :9], 0, states[:, :8])
    session.propose_next([])
    for before, length in ((9, 12), (12, 14)):
        session.read_verified(TEXT[:, before:length], 0, states[:, before - 1 : length - 1])
    assert session.unread == 5
    close(block_of(session, 4), formulas(checkpoint, "original", target, 14))


@torch.no_grad()
def test_a_tree_has_the_marginals_by_depth(tmp_path: Path) -> None:
    draft, target = loaded(VARIANTS["plain"], tmp_path, "original")
    states = states_of(target, draft, TEXT)
    chain, session = block_of(begun(draft, TEXT, ROUNDS, VOCAB, states), 4), begun(draft, TEXT, ROUNDS, VOCAB, states)
    tree, path = DraftTree(3), [0]
    for depth in range(4):
        nodes = [tree.add(path[-1], token) for token in (1, 2)]
        path.append(nodes[0])
        logits, hidden = session.expand(tree, nodes if depth else [0, *nodes])
        wanted = chain[depth + 1] if depth < 3 else torch.full((VOCAB,), float("-inf"))
        assert all(torch.equal(row, wanted) for row in logits[-2:])
        assert len(hidden) == len(logits)
        if not depth:
            assert torch.equal(logits[0], chain[0])
    assert session.passes == 1


def generator() -> Any:
    """The class; the test is skipped where there is none."""
    return pytest.importorskip("transformers.generation.candidate_generator").DFlashTokenCandidateGenerator


@pytest.mark.daily("plain", "windows alone")
@pytest.mark.parametrize("name", ["plain", "windows", "windows alone", "the last layer read"])
def test_the_generator_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that transformers drafts in a greedy generation is ours, token for token and in its logits."""
    theirs, target = VARIANTS[name].theirs(), target_for()
    before = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    heard = proposed(monkeypatch, generator())
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
    output = target.generate(TEXT, assistant_model=theirs, speculation_type="dflash", **options)
    assert torch.equal(output, target.generate(TEXT, **options))
    draft = SpecDecPPAssistant.from_draft(theirs, target=target).ready_drafter()
    assert len(heard) > 5
    for text, candidates, logits, _ in heard:
        session = draft.session(VOCAB)
        session.read_verified(text, 0, states_of(target, draft, text[:, :-1]))
        ours = block_of(session, 4)
        close(ours, logits)
        assert ours.argmax(-1).tolist() == candidates
    assert all(torch.equal(tensor, before[key]) for key, tensor in theirs.state_dict().items())


def muse_target() -> CausalLM:
    """transformers' own target of such drafts: it norms embeddings, which the draft takes bare, and scales logits."""
    muse = pytest.importorskip("transformers.models.muse_glimmer")
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": 0, "initializer_range": 0.6}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = muse.MuseGlimmerConfig(text_config=text, vision_config=vision, projector_hidden_size=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return muse.MuseGlimmerForConditionalGeneration(config).double().eval()


def test_the_target_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as its generator, whose logits lack the target's scale: so q is flatter here, as p is."""
    theirs, target = VARIANTS["windows"].theirs(), muse_target()
    heard, options = proposed(monkeypatch, generator()), {"max_new_tokens": 20, "do_sample": False}
    output = target.generate(TEXT, assistant_model=theirs, speculation_type="dflash", **options)
    fixed = SpeculationConfig("fixed", num_tokens=4)
    assistant = SpecDecPPAssistant.from_draft(theirs, target=target, speculation=fixed)
    draft, text = assistant.ready_drafter(), target.config.get_text_config()
    assert torch.equal(output, target.generate(TEXT, assistant_model=assistant, **options))
    assert assistant.stats.drafted > 0
    for ids, candidates, logits, _ in heard:
        session = draft.session(VOCAB)
        session.read_verified(ids, 0, states_of(target, draft, ids[:, :-1]))
        ours, cap = block_of(session, 4), text.final_logit_softcapping
        close(ours, torch.tanh(logits * text.output_multiplier / cap) * cap)
        assert ours.argmax(-1).tolist() == candidates


# Several blocks of a text in one pass are what each of them is in a pass of its own. ----------------------------------


TEXTS = 1 + torch.cat((prompt(17), prompt(17, 5))) % (VOCAB - 1)
ANCHORS = torch.tensor([[3, 9, 10, 16], [12, 1, 4, 11]])


def drafting(checkpoint: Checkpoint) -> tuple[Any, CausalLM]:
    target = target_for()
    return assisted(target, checkpoint).ready_drafter(), target


@torch.no_grad()
def alone(draft: DFlashDraft, states: Tensor, text: int, anchor: int) -> Tensor:
    """Final states of the block of a round after `anchor`."""
    session: Any = draft.session(VOCAB)
    session.read_verified(TEXTS[text : text + 1, : anchor + 1], 0, states[text : text + 1, :anchor])
    return session._block()[1]


@torch.no_grad()
def error(draft: DFlashDraft, target: CausalLM) -> float:
    """The largest difference between blocks in one pass and those of rounds."""
    states = states_of(target, draft, TEXTS)
    together = draft.blocks_after(TEXTS, states, ANCHORS)
    each = [[alone(draft, states, row, int(anchor)) for anchor in ANCHORS[row]] for row in range(len(TEXTS))]
    return float((together - torch.stack([torch.stack(blocks) for blocks in each])).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_together_they_are_as_alone(name: str) -> None:
    draft, target = drafting(VARIANTS[name])
    assert error(draft, target) < 1e-10


def other_blocks(seen: Tensor, length: int, size: int) -> Tensor:
    """Rows see those of other blocks."""
    return torch.cat((seen[..., :length], torch.ones_like(seen[..., length:])), -1)


def own_state(seen: Tensor, length: int, size: int) -> Tensor:
    """Rows see the target's state at their own anchor, which a round does not have."""
    anchors = ANCHORS.repeat_interleave(size, 1)[:, None, :, None]
    return torch.cat((seen[..., :length] | (torch.arange(length) == anchors), seen[..., length:]), -1)


@pytest.mark.parametrize("mutant", [other_blocks, own_state])
def test_wrong_masks_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target = drafting(VARIANTS["plain"])
    through = DFlashModel.through

    def wrong(model: Any, block: Tensor, context: Tensor, positions: Tensor, mask: Any, *known: Any) -> Tensor:
        size = draft.settings.block_size

        def changed(view: Any, keys: Tensor) -> Any:
            seen = mask(view, keys)
            return seen if seen is None or seen.dim() < 4 else mutant(seen, context.shape[1], size)

        return through(model, block, context, positions, changed, *known)

    monkeypatch.setattr(DFlashModel, "through", wrong)
    assert error(draft, target) > 1e-3


PAIRS: dict[str, tuple[Callable[[], CausalLM], str]] = {
    **{name: (target_for, name) for name in ("windows alone", "the last layer read", "samples the anchor", "scaled")},
    # Windows, scaled embeddings and logits of the target's own, and learned positions.
    "gemma2": (lambda: target_for("gemma2", layer_types=["sliding_attention", "full_attention"] * 2), "windows"),
    "granite": (lambda: target_for("granite"), "windows"),
    "gpt2": (lambda: target_for("gpt2", n_layer=4), "windows"),
    "hybrid": (lambda: tiny_of("qwen3_5_text", vocab_size=VOCAB), "windows"),  # recurrent states are taken back, too
}


@pytest.mark.daily("windows alone", "scaled", "gpt2")
@pytest.mark.parametrize("name", PAIRS)
def test_variants_and_other_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, variant = PAIRS[name]
    target = make()
    assistant = assisted(target, VARIANTS[variant], rule="fixed", num_tokens=9, draft_successors=False)
    check_rounds(target, assistant, TEXT, monkeypatch)
