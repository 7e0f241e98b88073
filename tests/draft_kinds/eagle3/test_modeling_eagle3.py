"""The step of an EAGLE-3 draft beside its formulas (arXiv 2503.01840, section 3), written out here on plain tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import HEADS, KV_HEADS, edited
from support.files.eagle3_files import DRAFT_VOCAB, HIDDEN, READS, VARIANTS, Checkpoint
from support.targets.formulas import attended, close, rms, rotated, states_of
from support.targets.models import prompt, tiny
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.drafting.drafter import DraftSession
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import FINAL
from hf_specdecpp.training.distillation.unrolling import unrolled
from hf_specdecpp.trees.tree import DraftTree

STEPS, TEXT = 3, prompt(9)


def target_for(checkpoint: Checkpoint) -> CausalLM:
    return tiny("llama", hidden_size=checkpoint.target_size, head_dim=8)


def loaded(checkpoint: Checkpoint, folder: Path, dialect: str = "original", **options: Any) -> tuple[Any, CausalLM]:
    """Its drafter, and the target that it has met."""
    target = target_for(checkpoint)
    assistant = SpecDecPPAssistant.from_pretrained(checkpoint.save(folder, dialect), target=target, **options)
    return assistant.ready_drafter(), target


class Formulas:
    """One draft, row by row: each row is a token and the state g before it. Keys and values are recomputed for all."""

    def __init__(self, checkpoint: Checkpoint, target: CausalLM) -> None:
        self.checkpoint, self.t = checkpoint, checkpoint.tensors()
        self.embeddings = self.t.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())

    def g(self, states: Tensor) -> Tensor:
        """Of the target's states `[rows, width]`."""
        if not self.checkpoint.num_reads:
            return states
        if "input_norm.weight" in self.t:
            states = rms(states, self.t["input_norm.weight"])
        if "fc_norm.0.weight" in self.t:
            parts = states.chunk(self.checkpoint.num_reads, -1)
            states = torch.cat([rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return states @ self.t["fc.weight"].T

    def rows(self, tokens: list[int], g: Tensor, places: list[int], seen: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[rows, draft_vocab]`, and what a further step goes on from.

        `seen`: bool `[rows, rows]`: which rows each attends to."""
        state, positions = g, torch.tensor(places)
        embedding = self.embeddings[torch.tensor(tokens)]
        for layer in range(self.checkpoint.layers):
            name = f"layers.{layer}." if layer else "midlayer."
            if layer:
                residual, x = state, rms(state, self.t[name + "input_layernorm.weight"])
            else:
                normed = rms(state, self.t[name + "hidden_norm.weight"])
                x = torch.cat((rms(embedding, self.t[name + "input_layernorm.weight"]), normed), -1)
                residual = normed if self.checkpoint.flags.get("norm_before_residual") else state
            after = residual + self._attention(x, name, positions, seen)
            x = rms(after, self.t[name + "post_attention_layernorm.weight"])
            gate, up = F.silu(x @ self.t[name + "mlp.gate_proj.weight"].T), x @ self.t[name + "mlp.up_proj.weight"].T
            state = after + (gate * up) @ self.t[name + "mlp.down_proj.weight"].T
        normed = rms(state, self.t["norm.weight"])
        return normed @ self.t["lm_head.weight"].T, normed if self.checkpoint.flags.get("norm_output") else state

    def _attention(self, x: Tensor, name: str, positions: Tensor, seen: Tensor) -> Tensor:
        size = self.checkpoint.head_dim
        q, k, v = (
            (x @ self.t[f"{name}self_attn.{part}_proj.weight"].T).view(len(x), heads, size)
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        if self.checkpoint.qwen3:
            q, k = rms(q, self.t[f"{name}self_attn.q_norm.weight"]), rms(k, self.t[f"{name}self_attn.k_norm.weight"])
        q, k = (rotated(part, positions, self.checkpoint.theta) for part in (q, k))
        return attended(q, k, v, seen) @ self.t[f"{name}self_attn.o_proj.weight"].T

    def chain(self, states: Tensor, candidates: list[int], kept: int | None = None) -> list[Tensor]:
        """Logits after the first `kept` rows of the text, after its first candidate, ...: each step with all before."""
        tokens, g = TEXT[0, 1:].tolist()[:kept], self.g(states[0, :-1])[:kept]
        found = []
        for candidate in [*candidates, None]:
            seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            logits, after = self.rows(tokens, g, list(range(len(tokens))), seen)
            found.append(logits[-1])
            if candidate is not None:
                tokens, g = [*tokens, candidate], torch.cat((g, after[-1:]))
        return found


def of_draft(logits: Tensor, checkpoint: Checkpoint) -> Tensor:
    """Those of the draft's tokens; of the others q is zero."""
    kept, others = torch.tensor(checkpoint.ids), torch.ones(logits.shape[-1], dtype=torch.bool)
    others[kept] = False
    assert bool((logits[..., others] == float("-inf")).all())
    return logits[..., kept].double()


@pytest.mark.daily(
    "plain-original", "norm_before_residual-speculators", "fc_norm-original", "norm_output-speculators",
    "two layers-original", "head_dim-speculators", "another width-original", "qwen3-speculators", "theta-original",
    "final state-speculators",
)  # fmt: skip
@pytest.mark.parametrize("dialect", ["original", "speculators"])
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_three_steps(name: str, dialect: str, tmp_path: Path) -> None:
    """Cached, as a generation drafts them, beside formulas that recompute all rows."""
    checkpoint = VARIANTS[name]
    drafter, target = loaded(checkpoint, tmp_path, dialect)
    assert drafter.fusion.reads == (READS if checkpoint.num_reads else [FINAL])
    states, candidates = states_of(target, drafter, TEXT), [3, 17]
    expected, session = Formulas(checkpoint, target).chain(states, candidates), DraftSession(drafter, 48)
    session.read_verified(TEXT[:, 1:], 0, states[:, :-1])
    for step in range(STEPS):
        logits, _ = session.propose_next([torch.tensor(token) for token in candidates[:step]])
        close(of_draft(logits, checkpoint), expected[step])


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_rows_of_a_tree_are_those_of_chains(name: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS[name]
    drafter, target = loaded(checkpoint, tmp_path)
    states, formulas = states_of(target, drafter, TEXT), Formulas(checkpoint, target)
    session = DraftSession(drafter, 48)
    session.read_verified(TEXT[:, 1:], 0, states[:, :-1])
    tree = DraftTree(int(TEXT[0, -1]))
    session.expand(tree, [0])
    nodes = [tree.add(0, 3), tree.add(0, 17)]
    first, _ = session.expand(tree, nodes)
    second, _ = session.expand(tree, [tree.add(nodes[0], 5)])
    for logits, path in ((first[0], [3]), (first[1], [17]), (second[0], [3, 5])):
        close(of_draft(logits, checkpoint), formulas.chain(states, path)[-1])


@pytest.mark.parametrize("name", ["plain", "norm_output", "another width"])
@torch.no_grad()
def test_all_places_of_a_text_at_once(name: str, tmp_path: Path) -> None:
    """As training and the check of a checkpoint read it: the text's own tokens as candidates."""
    checkpoint = VARIANTS[name]
    drafter, target = loaded(checkpoint, tmp_path)
    states, formulas = states_of(target, drafter, TEXT), Formulas(checkpoint, target)
    for step, hidden in enumerate(unrolled(drafter, TEXT, states, STEPS)):
        logits = of_draft(drafter.logits(hidden[0, -1], 48), checkpoint)
        kept = TEXT.shape[1] - 1 - step
        close(logits, formulas.chain(states, TEXT[0, 1 + kept :].tolist(), kept)[-1])


MUTANTS = {
    "feedback through fc": None,
    "residual with the normed state": {"norm_before_residual": True},
    "the output normed": {"norm_output": True},
    "ids one off": {"reads": [0, 1, 1]},
    "another theta": {"rope_theta": 500.0},
}


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_the_formulas_tell_mutants(mutant: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS["plain"]
    drafter, target = loaded(checkpoint, tmp_path, eagle3=MUTANTS[mutant])
    states = states_of(target, drafter, TEXT)
    expected = Formulas(checkpoint, target).chain(states_of(target, loaded(checkpoint, tmp_path)[0], TEXT), [3, 17])
    session = DraftSession(drafter, 48)
    if mutant == "feedback through fc":
        fc, forward = drafter.fusion.fc, type(drafter.fusion).forward

        def through_fc(states: Tensor, embeddings: Tensor) -> Tensor:
            own = states.shape[-1] == HIDDEN
            return forward(drafter.fusion, fc(torch.cat((states,) * 3, -1)) if own else states, embeddings)

        drafter.fusion.forward = through_fc
    session.read_verified(TEXT[:, 1:], 0, states[:, :-1])
    found = [session.propose_next([torch.tensor(token) for token in [3, 17][:step]])[0] for step in range(STEPS)]
    pairs = zip(found, expected, strict=True)
    errors = [float((of_draft(ours, checkpoint) - theirs).abs().max()) for ours, theirs in pairs]
    assert max(errors) > 1e-3, errors


@torch.no_grad()
def test_offsets_are_not_ids(tmp_path: Path) -> None:
    """A file whose d2t holds ids is told from one with offsets, and both mean the same tokens."""
    checkpoint = VARIANTS["plain"]
    drafter, _ = loaded(checkpoint, tmp_path / "offsets")
    folder = edited(checkpoint.save(tmp_path / "ids"), d2t=torch.tensor(checkpoint.ids))
    absolute = SpecDecPPAssistant.from_pretrained(folder, target=target_for(checkpoint)).ready_drafter()
    assert drafter.draft_vocab.tolist() == checkpoint.ids == absolute.draft_vocab.tolist()
    assert len(checkpoint.ids) == DRAFT_VOCAB


def test_states_that_are_as_wide_as_the_drafts_own_are_refused(tmp_path: Path) -> None:
    """Whether they go through fc is told from their width."""
    with pytest.raises(ValueError, match=r"\(1 x 32\) is as wide as its own state \(32\)"):
        loaded(Checkpoint(num_reads=1), tmp_path)
