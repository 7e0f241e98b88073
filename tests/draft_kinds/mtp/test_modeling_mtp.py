"""What multi-token layers compute: beside transformers' own model and generator of them, and written out for Qwen's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.mtp_files import FAMILIES, HYBRID, VOCAB, Files
from support.targets.formulas import states_of
from support.targets.models import prompt
from support.targets.rounds_anew import proposed
from torch import Tensor
from transformers import generation, modeling_layers
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder

TEXT, CANDIDATES = 1 + prompt(9) % (VOCAB - 1), [3, 7, 1, 4]
SERVED = [
    *(("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("glm4_moe", 2), ("mellum", 1), ("step3p7", 2)),
    *(("inkling_text", 2), ("inkling_text", 1)),  # with a norm after each layer, and without
]
generator = getattr(generation.candidate_generator, "MTPCandidateGenerator", None)
MtpModel = getattr(modeling_layers, "MtpModel", None)
of_transformers = pytest.mark.skipif(generator is None, reason="this transformers has no multi-token layers of its own")


def fixed(target: CausalLM, count: int = 4) -> SpecDecPPAssistant:
    return assist(target, "mtp", speculation=SpeculationConfig(rule="fixed", num_tokens=count), default=False)


@torch.no_grad()
def drafted(target: CausalLM, draft: Any, text: Tensor, path: list[int]) -> Tensor:
    """Logits `[len(path) + 1, VOCAB]` after a text and along the candidates of a path, in a round that reads all."""
    session = draft.session(VOCAB)
    session.read_verified(text, 0, states_of(target, draft, text[:, :-1]))
    candidates = [torch.tensor(token) for token in path]
    return torch.stack([session.propose_next(candidates[:place])[0] for place in range(len(path) + 1)])


@pytest.mark.daily("deepseek_v3-1", "glm4_moe-2", "inkling_text-2")
@of_transformers
@pytest.mark.parametrize(("family", "num_layers"), SERVED)
def test_rounds_of_transformers(family: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are those, token for token, and logit for logit, in the first round and in those after it."""
    files = Files(family, num_layers)
    if family == "step3p7":  # whose layers transformers takes by other names, and with the heads of full attention
        files.overrides, files.start_of_head = {"num_sliding_attention_heads": 4}, "shared_head"
        if not hasattr(MtpModel, "forward_layer"):
            pytest.skip("this transformers cannot give layers of several kinds their rotary frequencies")
    if (family, num_layers) == ("inkling_text", 1):
        files.overrides = {"chain_hidden_post_norm": False}
    target = files.load(tmp_path)
    if getattr(target.config.get_text_config(), "num_mtp_layers", None) is None:
        pytest.skip("this transformers has no multi-token layers of this family")
    rounds = proposed(monkeypatch, generator)
    target.generate(TEXT, max_new_tokens=14, do_sample=False, use_mtp=True)
    draft = fixed(target).ready_drafter()
    assert len(rounds) >= 5
    for text, candidates, logits, _ in rounds:
        ours = drafted(target, draft, text, candidates[:-1])
        assert ours.argmax(-1).tolist() == candidates
        torch.testing.assert_close(ours, logits.float(), rtol=1e-5, atol=1e-5)


# Qwen's layers, which transformers does not serve: the step written out. ----------------------------------------------


class WrittenOut:
    """The multi-token layer of a Qwen3.5 checkpoint, from its tensors as the file has them.

        x = W [norm_e(e); norm_h(h)],  r = x + o(attention(norm_1(x)) * sigmoid(gate)),  y = r + mlp(norm_2(r))

    The state that goes on is norm(y), and logits are the LM head of it. Norms scale by 1 + weight. The step for a
    candidate reads norm(y) of the row before in the place of h, and attends to all rows before it."""

    def __init__(self, target: CausalLM, tensors: dict[str, Tensor]) -> None:
        self.target, self.tensors, self.config = target, tensors, target.config
        self.rotary = target.model.rotary_emb

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = x.float()  # as the class computes them
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (scaled * (1.0 + self.tensors[f"{name}.weight"].float())).double()

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        both = (self.norm("mtp.pre_fc_norm_embedding", embeddings), self.norm("mtp.pre_fc_norm_hidden", states))
        return torch.cat(both, dim=-1) @ self.tensors["mtp.fc.weight"].T

    def rows(self, x: Tensor) -> Tensor:
        """Final states `[n, hidden]` of all rows, read at once."""

        def project(name: str, of: Tensor) -> Tensor:
            return of @ self.tensors[f"mtp.layers.0.{name}.weight"].T

        normed, size, count = self.norm("mtp.layers.0.input_layernorm", x), self.config.head_dim, len(x)
        query, gate = project("self_attn.q_proj", normed).view(count, -1, 2 * size).chunk(2, dim=-1)
        query = self.norm("mtp.layers.0.self_attn.q_norm", query)
        key = self.norm("mtp.layers.0.self_attn.k_norm", project("self_attn.k_proj", normed).view(count, -1, size))
        value = project("self_attn.v_proj", normed).view(count, -1, size)
        cos, sin = self.rotary(x[None], torch.arange(count)[None, None].expand(3, 1, -1))
        query, key = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = key[0].repeat_interleave(groups, 0), value.transpose(0, 1).repeat_interleave(groups, 0)
        weights = (query[0] @ key.transpose(-1, -2)) / size**0.5
        weights = weights.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf")).softmax(-1)
        x = x + project("self_attn.o_proj", (weights @ value).transpose(0, 1).flatten(1) * gate.flatten(1).sigmoid())
        normed = self.norm("mtp.layers.0.post_attention_layernorm", x)
        inner = torch.nn.functional.silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed)
        return self.norm("mtp.norm", x + project("mlp.down_proj", inner))

    def logits(self, text: Tensor, states: Tensor, path: list[int]) -> Tensor:
        embeddings = self.target.model.embed_tokens.weight
        x, logits = self.inputs(embeddings[text[0, 1:]], states[0]), []
        for token in [*path, None]:
            final = self.rows(x)
            logits.append(self.target.lm_head.weight @ final[-1])
            if token is not None:
                x = torch.cat((x, self.inputs(embeddings[[token]], final[-1:])))
        return torch.stack(logits)


@torch.no_grad()
def test_qwens_layer_is_what_its_formula_says(tmp_path: Path) -> None:
    files = Files("qwen3_5_text")
    target = files.load(tmp_path)
    draft = fixed(target).ready_drafter()
    expected = WrittenOut(target, files.layers[0]).logits(TEXT, states_of(target, draft, TEXT[:, :-1]), CANDIDATES)
    torch.testing.assert_close(drafted(target, draft, TEXT, CANDIDATES).double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["order", "norms", "feedback"])
def test_the_formula_tells_others_apart(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: state and embedding exchanged; norms that scale by the weight; a constant state for candidates."""
    files = Files("qwen3_5_text")
    target = files.load(tmp_path)
    draft, formula = fixed(target).ready_drafter(), WrittenOut(target, files.layers[0])
    if wrong == "order":
        weight = files.layers[0]["mtp.fc.weight"]
        formula.tensors = {**files.layers[0], "mtp.fc.weight": weight.roll(weight.shape[0], dims=1)}
    elif wrong == "norms":
        formula.tensors = {**files.layers[0], "mtp.norm.weight": files.layers[0]["mtp.norm.weight"] - 1.0}
    else:
        inputs = formula.inputs
        monkeypatch.setattr(formula, "inputs", lambda e, h: inputs(e, h if len(h) > 1 else h * 0 + 1))
    expected = formula.logits(TEXT, states_of(target, draft, TEXT[:, :-1]), CANDIDATES)
    assert float((drafted(target, draft, TEXT, CANDIDATES).double() - expected).abs().max()) > 1e-2


@torch.no_grad()
def test_a_layer_of_inkling_with_a_window_is_what_its_mask_says(tmp_path: Path) -> None:
    """transformers' own generator reads the prompt with another mask, and agrees once that is out of sight."""
    window = 6
    overrides = {"mtp_local_layer_ids": [0], "sliding_window_size": window, "rel_extent": 6}
    files = Files("inkling_text", overrides=overrides)
    target = files.load(tmp_path)
    draft: Any = fixed(target).ready_drafter()
    decoder, states = inner_decoder(draft.model), states_of(target, draft, TEXT[:, :-1])
    assert decoder.config.layer_types == ["hybrid_sliding"]
    distance = torch.arange(states.shape[1])[:, None] - torch.arange(states.shape[1])
    for shown, same in ((window, True), (window - 1, False)):
        mask = torch.zeros(distance.shape, dtype=torch.float64)
        mask = mask.masked_fill((distance < 0) | (distance >= shown), float("-inf"))[None, None]
        rows = decoder.layers[0](draft.fusion(states, draft.embed(TEXT[:, 1:])), attention_mask=mask, conv_mask=None)
        expected = draft.logits(decoder.norm(rows)[0, -1], VOCAB)
        assert torch.allclose(drafted(target, draft, TEXT, [])[0], expected, rtol=1e-5, atol=1e-5) is same


@pytest.mark.daily("glm4_moe-3", "qwen3_next-1")
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "num_layers"),
    [("glm4_moe", 3), ("deepseek_v3", 2), ("mellum", 1), ("qwen3_next", 1), ("inkling_text", 3)],
)
def test_what_was_read_is_taken_back(family: str, num_layers: int, tmp_path: Path) -> None:
    """Rounds with 0 to 5 candidates, of which 0 to all stand; some rounds draft nothing."""
    target = Files(family, num_layers).load(tmp_path)
    draft = fixed(target).ready_drafter()
    session: Any = draft.session(VOCAB)
    text, known, accepted = TEXT, 0, 0
    generator = torch.Generator().manual_seed(0)
    for drafts, stands in [(5, 0), (1, 1), (0, 0), (4, 2), (5, 5), (2, 0), (0, 0), (0, 0), (3, 1), (1, 0), (5, 3)]:
        session.read_verified(text[:, known:], accepted, states_of(target, draft, text[:, :-1])[:, max(known - 1, 0) :])
        path = torch.randint(VOCAB, (5,), generator=generator).tolist()
        candidates = [torch.tensor(token) for token in path]
        found = [session.propose_next(candidates[:place])[0] for place in range(drafts)]
        if drafts:
            expected = drafted(target, draft, text, path[: drafts - 1])
            torch.testing.assert_close(torch.stack(found), expected, rtol=1e-5, atol=1e-5)
        assert session.length == text.shape[1] or num_layers == 1
        assert session.passes == drafts
        known, accepted = text.shape[1], stands
        further = torch.randint(VOCAB, (1, 1), generator=generator)
        text = torch.cat((text, torch.tensor([path[:stands]], dtype=torch.long), further), dim=1)


@pytest.mark.daily("deepseek_v3", "qwen3_next", "bailing_hybrid", "step3p7")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_the_file_is_in_the_layer(family: str, tmp_path: Path) -> None:
    """Experts are put together as transformers does it with the target's own; nothing is left as it was made."""
    files = Files(family)
    target = files.load(tmp_path)
    draft = fixed(target).ready_drafter()
    decoder = inner_decoder(draft.model)
    parts = [decoder.layers[0], decoder.norm, draft.fusion]
    held = torch.cat([tensor.flatten() for part in parts for tensor in part.state_dict().values()])
    again = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.output.weight")
    stored = torch.cat([tensor.flatten() for name, tensor in files.layers[0].items() if not name.endswith(again)])
    torch.testing.assert_close(held.sort().values, stored.sort().values, rtol=0, atol=1e-7)  # routers are float32
    shared = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    assert draft.model.get_input_embeddings().weight is shared[0]
    assert draft.model.get_output_embeddings().weight is shared[1]
    assert decoder.config.num_hidden_layers == 1
    kind = "hybrid" if family == "inkling_text" else "full_attention"
    assert family not in HYBRID or decoder.config.layer_types == [kind]
