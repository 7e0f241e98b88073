"""Small random DSpark checkpoints in every dialect, and the formulas of their drafts on plain tensors.

The formulas import nothing of the package's drafts: they compute each round anew from the target's hidden states."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.models.causal_lm import CausalLM
from support.files.checkpoints import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Numbers, layer_config, written
from support.targets.formulas import EPSILON, attended, rms, rotated
from support.targets.models import prompt, tiny

VOCAB, DEPTH, MASK, RANK, BLOCK = 23, 5, 22, HIDDEN, 4
IDS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 10, 12, 13, 15, 16, 17, 18, 20, 21])  # of a reduced vocabulary
DIALECTS = ("deepspec", "speculators", "specforge", "liquid", "minicpm", "gemma4")
CAP, SCALES, GEMMA_THETA = 1.5, (0.3, 1.3), 5000.0  # of Gemma 4's layers


@dataclass(frozen=True)
class Checkpoint:
    """What is written to a folder.

    `fills_in`: the row of the last token proposes nothing. `says`: how the config says so, "field", "tokens" (the
    number of candidates, of speculators) or "nothing". `head`, `rank`: of the Markov bias. `confidence`: "none",
    "state" or "markov". `own`: whether embeddings and LM head are in the file. `reduced`: proposes `IDS` alone."""

    dialect: str = "deepspec"
    head: str = "vanilla"
    rank: int = RANK
    confidence: str = "markov"
    own: bool = False
    reduced: bool = False
    fills_in: bool = False
    says: str = "nothing"
    reads: tuple[int, ...] = (0, 1, 3)
    prefix: str = ""
    rope: str = "plain"  # or "yarn", or "noise": fields of the target's that are not the draft's
    seed: int = 0
    block: int = BLOCK
    keys_are_values: bool = True  # in layers of Gemma 4
    counted: bool = False  # the config does not have their heads

    @property
    def places(self) -> int:
        return self.block - self.fills_in

    @property
    def size(self) -> int:
        return len(IDS) if self.reduced else VOCAB

    def tensors(self) -> dict[str, Tensor]:
        numbers, size = Numbers(self.seed), self.size
        found = {"fc.weight": numbers.random(HIDDEN, len(self.reads) * HIDDEN), "norm.weight": numbers.norm(HIDDEN)}
        found["hidden_norm.weight"] = numbers.norm(HIDDEN)
        for layer in range(2):
            found |= numbers.layer(f"layers.{layer}")
            if self.dialect == "gemma4":
                found |= self.of_gemma4(f"layers.{layer}", numbers, SCALES[layer])
                if self.keys_are_values:
                    del found[f"layers.{layer}.self_attn.v_proj.weight"]
        if self.own or self.reduced:
            found["lm_head.weight"] = numbers.random(size, HIDDEN)
        if self.own:
            found["embed_tokens.weight"] = numbers.random(VOCAB, HIDDEN)
        if self.rank:
            found |= self.markov(numbers)
        if self.confidence != "none":
            width = HIDDEN + self.rank * (self.confidence == "markov")
            found |= {"confidence_head.proj.weight": numbers.random(1, width),
                      "confidence_head.proj.bias": numbers.random(1)}  # fmt: skip
        if self.reduced:
            known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)
            found |= {"d2t": IDS - torch.arange(len(IDS)), "t2d": known}
        is_head = ("markov_head.", "confidence_head.")
        return {f"{self.prefix * name.startswith(is_head)}{name}": tensor for name, tensor in found.items()}

    def of_gemma4(self, name: str, numbers: Numbers, scale: float) -> dict[str, Tensor]:
        norms = {f"{name}.{part}_feedforward_layernorm.weight": numbers.norm(HIDDEN) for part in ("pre", "post")}
        return {**norms, f"{name}.layer_scalar": torch.full((1,), scale, dtype=torch.float64)}

    def markov(self, numbers: Numbers) -> dict[str, Tensor]:
        """A Markov head that knows which token mostly follows each token in a text of the target, so that a random
        block guesses some places: W1 tells tokens apart, and W2 raises the usual follower."""
        w1 = torch.eye(VOCAB, RANK, dtype=torch.float64) + 0.2 * numbers.random(VOCAB, RANK)
        w2 = 2.0 * numbers.random(VOCAB, RANK)
        w2[:, :VOCAB] += BOOST * followers()
        w2 = w2[IDS] if self.reduced else w2
        found = {"markov_w1.weight": w1, "markov_w2.weight": w2}
        if self.head == "gated":
            found |= {"gate_proj.weight": numbers.random(RANK, HIDDEN + RANK), "gate_proj.bias": numbers.random(RANK)}
        if self.head == "rnn":
            joint = numbers.random(3 * RANK, 2 * RANK + HIDDEN)
            joint[2 * RANK :] *= 0.05  # what is put out is mostly e
            joint[2 * RANK :, RANK : 2 * RANK] += 2.0 * torch.eye(RANK)
            found |= {"joint_proj.weight": joint, "joint_proj.bias": 0.05 * numbers.random(3 * RANK)}
        return {f"markov_head.{name}": tensor.clone().contiguous() for name, tensor in found.items()}

    def config(self) -> dict[str, Any]:
        layer = {**layer_config(2), "vocab_size": VOCAB, "rope_theta": 10000.0, "num_target_layers": DEPTH}
        layer |= (
            {"partial_rotary_factor": 0.25, "rope_scaling": YARN, "sliding_window": 2} if self.rope == "noise" else {}
        )
        layer |= {"rope_scaling": YARN} if self.rope == "yarn" else {}
        heads: dict[str, Any] = {"markov_rank": self.rank, "enable_confidence_head": self.confidence != "none"}
        if self.rank:
            heads["markov_head_type"] = self.head
        if self.confidence != "none":
            heads["confidence_head_with_markov"] = self.confidence == "markov"
        if self.says == "field":
            heads["sample_from_anchor"] = not self.fills_in
        block = {"mask_token_id": MASK, "target_layer_ids": list(self.reads)}
        if self.dialect == "speculators":
            declared = {"proposal_methods": [{"speculative_tokens": self.places}]} if self.says == "tokens" else {}
            return {
                "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "mask_token_id": MASK,
                "aux_hidden_state_layer_ids": [each + 1 for each in self.reads], "draft_vocab_size": self.size,
                "transformer_layer_config": layer, "block_size": self.block, "speculators_config": declared, **heads,
            }  # fmt: skip
        if self.dialect == "specforge":
            return {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", **layer, "block_size": self.block,
                    "dflash_config": {**block, **heads, "projector_type": "dspark"}}  # fmt: skip
        if self.dialect == "liquid":
            return {"architectures": ["Lfm2DSparkDraftModel"], "model_type": "qwen3", **layer, "block_size": self.block,
                    "dflash_config": block, **heads, "rope_is_neox_style": False}  # fmt: skip
        if self.dialect == "gemma4":
            rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5,
                                       "rope_theta": GEMMA_THETA}}  # fmt: skip
            noise = {"head_dim": 6, "num_key_value_heads": 4, "sliding_window": 2,
                     "layer_types": ["sliding_attention"] * 40, "hidden_size_per_layer_input": 0}  # fmt: skip
            if not self.counted:
                noise |= {"global_head_dim": HEAD_DIM, "num_global_key_value_heads": KV_HEADS}
            return {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", **layer, **block, **heads,
                    "block_size": self.block, "target_model_type": "gemma4_unified", "rope_parameters": rope,
                    "rope_theta": ..., "hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh", **noise,
                    "final_logit_softcapping": CAP, "attention_k_eq_v": self.keys_are_values}  # fmt: skip
        of_target = {"layer_types": ["sliding_attention"] * 2, "model_type": "llama"} if self.rope == "noise" else {}
        flat = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **layer, **block, **heads, **of_target,
                "block_size": self.block}  # fmt: skip
        openbmb = {"projector_type": "dspark", "attention_mode": "gqa", "draft_vocab_size": VOCAB}
        return {**flat, **openbmb} if self.dialect == "minicpm" else flat

    def save(self, folder: Path, **changes: Any) -> Path:
        return written(folder, self.tensors(), {**self.config(), **changes})


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def target_for(**overrides: Any) -> CausalLM:
    """A target of few tokens."""
    return tiny("llama", vocab_size=VOCAB, num_hidden_layers=DEPTH, **{"head_dim": HEAD_DIM, **overrides})


BOOST = 7.0
START = 1 + prompt(17)[:, :6] % (VOCAB - 2)
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@cache
def followers() -> Tensor:
    """`[VOCAB, VOCAB]`: 1 at the most frequent follower (row) of each token (column) in texts of the target."""
    starts = torch.cat([START, *(1 + prompt(6, seed) % (VOCAB - 2) for seed in range(1, 8))])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for text in target_for().generate(starts, attention_mask=torch.ones_like(starts), **GREEDY):
        for before, token in zip(text, text[1:], strict=False):
            counts[token, before] += 1
    return ((counts == counts.amax(0)) & (counts > 0)).double()


VARIANTS: dict[str, Checkpoint] = {
    "deepspec": Checkpoint(own=True, rope="noise"),
    "deepspec, gated": Checkpoint(head="gated", confidence="state"),
    "deepspec, rnn": Checkpoint(head="rnn", confidence="none", reads=(1,)),
    "deepspec, early names": Checkpoint(prefix="logit_head."),
    "deepspec, plain": Checkpoint(rank=0, confidence="none", own=True),
    "minicpm": Checkpoint("minicpm", rope="noise"),
    "gemma4": Checkpoint("gemma4"),
    "gemma4, own values": Checkpoint("gemma4", head="rnn", own=True, keys_are_values=False),
    "gemma4, plain": Checkpoint("gemma4", rank=0, confidence="none", counted=True),
    "liquid": Checkpoint("liquid", head="gated"),
    "specforge": Checkpoint("specforge", head="rnn", rope="yarn"),
    "specforge, fills in": Checkpoint("specforge", fills_in=True, says="field", confidence="state"),
    "speculators": Checkpoint("speculators", reduced=True, says="field"),
    "speculators, rnn": Checkpoint("speculators", head="rnn", reduced=True, own=True, says="tokens"),
    "speculators, fills in": Checkpoint("speculators", reduced=True, fills_in=True, says="tokens"),
    "speculators, silent": Checkpoint("speculators", fills_in=True, reads=(0, 2, 3)),
}


class Formulas:
    """One round after `text` `[1, n]`: the states `h` `[places, hidden]` and logits `u` `[places, d]` of the block.

    `mutant`: a fact that is computed wrongly on purpose."""

    @torch.no_grad()
    def __init__(self, checkpoint: Checkpoint, target: CausalLM, text: Tensor, mutant: str = "") -> None:
        self.checkpoint, self.mutant = checkpoint, mutant
        tensors = checkpoint.tensors()
        self.t = t = {name.removeprefix(checkpoint.prefix): tensor for name, tensor in tensors.items()}
        self.anchor, start = int(text[0, -1]), text.shape[1] - 1
        hidden = target(text[:, :start], output_hidden_states=True).hidden_states
        off = mutant == "layer ids off by one"
        context = torch.cat([hidden[read + 1 - off][0] for read in checkpoint.reads], -1)
        context = rms(context @ t["fc.weight"].T, t["hidden_norm.weight"])
        shared = target.get_input_embeddings().weight
        table, ids = t.get("embed_tokens.weight", shared), torch.tensor([self.anchor] + [MASK] * (checkpoint.block - 1))
        state, places = table[ids], torch.arange(start + checkpoint.block)
        if checkpoint.dialect == "gemma4" and mutant != "unscaled embeddings":
            state = state * HIDDEN**0.5
        for layer in range(2):
            part = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in t.items()}
            x = rms(state, part["input_layernorm.weight"])
            normed = mutant == "input norm on the context"
            seen = torch.cat((rms(context, part["input_layernorm.weight"]) if normed else context, x))
            q, k, v = (
                (rows @ part.get(f"self_attn.{name}_proj.weight", part["self_attn.k_proj.weight"]).T).view(
                    -1, heads, HEAD_DIM
                )
                for name, rows, heads in (("q", x, HEADS), ("k", seen, KV_HEADS), ("v", seen, KV_HEADS))
            )
            q = self.turned(rms(q, part["self_attn.q_norm.weight"]), places[start:])
            k = self.turned(rms(k, part["self_attn.k_norm.weight"]), places)
            visible = torch.ones(checkpoint.block, len(places), dtype=torch.bool)
            if mutant == "causal":
                visible = places[start:, None] >= places
            if checkpoint.dialect == "gemma4":
                state = self.in_gemma4(state, (q, k, v), part, visible)
                continue
            state = state + attended(q, k, v, visible) @ part["self_attn.o_proj.weight"].T
            x = rms(state, part["post_attention_layernorm.weight"])
            gate = F.silu(x @ part["mlp.gate_proj.weight"].T)
            state = state + (gate * (x @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        state = rms(state, t["norm.weight"])
        fills_in = checkpoint.fills_in != (mutant == "rows off by one")
        self.h = state[int(fills_in) :]
        self.u = self.h @ t.get("lm_head.weight", target.get_output_embeddings().weight).T
        if checkpoint.dialect == "gemma4" and mutant != "no cap":
            self.u = CAP * torch.tanh(self.u / CAP)

    def in_gemma4(self, x: Tensor, heads: tuple[Tensor, ...], part: dict[str, Tensor], visible: Tensor) -> Tensor:
        """The output of a layer: no scale in the attention, a norm of the values, norms of both branches, a factor."""
        q, k, v = heads
        if self.mutant != "values without a norm":
            v = v * (v.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
        scale = 1.0 if self.mutant == "scaled queries" else HEAD_DIM**0.5  # `attended` divides by its root
        found = attended(q * scale, k, v, visible) @ part["self_attn.o_proj.weight"].T
        x = x + rms(found, part["post_attention_layernorm.weight"])
        y = rms(x, part["pre_feedforward_layernorm.weight"])
        gate = F.gelu(y @ part["mlp.gate_proj.weight"].T, approximate="tanh")
        y = (gate * (y @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        factor = 1.0 if self.mutant == "no factor" else part["layer_scalar"]
        return (x + rms(y, part["post_feedforward_layernorm.weight"])) * factor

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotated by position, in pairs of neighbours for LiquidAI."""
        theta, scale = 10000.0, 1.0
        half = x.shape[-1] // 2
        if self.checkpoint.dialect == "gemma4":  # half of the pairs are rotated, as in a whole head
            turned = rotated(x, places, GEMMA_THETA)
            pairs = torch.arange(x.shape[-1]) % half < (half if self.mutant == "all pairs" else half // 2)
            return torch.where(pairs, turned, x)
        if self.checkpoint.rope == "yarn":
            return yarn(x, places, theta)
        if (self.checkpoint.dialect == "liquid") == (self.mutant == "the other pairs of dimensions"):
            return rotated(x, places, theta) * scale
        pairs = torch.stack((torch.arange(half) * 2, torch.arange(half) * 2 + 1)).flatten()
        return rotated(x[..., pairs], places, theta)[..., pairs.argsort()]

    def bias(self, place: int, previous: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The bias `[d]` of candidate `place` after the token `previous`, and the rnn's state behind it."""
        t, head = self.t, "markov_head."
        if not self.checkpoint.rank:
            return torch.zeros(()), memory
        if self.mutant == "draft ids":  # a draft id in the place of a target id
            previous = int(torch.eq(IDS, previous).nonzero()) if previous in IDS else 0
        e, h = t[head + "markov_w1.weight"][previous], self.h[place]
        if self.checkpoint.head == "gated":
            e = torch.sigmoid(t[head + "gate_proj.weight"] @ torch.cat((h, e)) + t[head + "gate_proj.bias"]) * e
        if self.checkpoint.head == "rnn":
            z = t[head + "joint_proj.weight"] @ torch.cat((memory, e, h)) + t[head + "joint_proj.bias"]
            gate, new, out = z.chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            e = torch.tanh(out)
        return t[head + "markov_w2.weight"] @ e, memory

    def logits(self, path: list[int]) -> Tensor:
        """Logits `[V]` after the anchor and the candidates `path`, -inf outside a reduced vocabulary."""
        memory, before = torch.zeros(self.checkpoint.rank, dtype=torch.float64), [self.anchor, *path]
        late = self.mutant == "the token before, one step late"
        for place, previous in enumerate([self.anchor, *before[:-1]] if late else before):
            if self.mutant == "the first token only":
                previous = self.anchor
            bias, memory = self.bias(place, previous, memory)
        bias = CAP * torch.tanh(bias / CAP) if self.mutant == "the bias capped" else bias
        own = self.u[len(path)] + bias
        if not self.checkpoint.reduced:
            return own
        ids = IDS - torch.arange(len(IDS)) if self.mutant == "d2t as ids" else IDS
        return torch.full((VOCAB,), float("-inf"), dtype=own.dtype).index_put((ids,), own)

    def confidence(self, place: int, previous: int) -> Tensor:
        """Log-odds of candidate `place` after the token `previous`."""
        features = [self.h[place]]
        if self.checkpoint.confidence == "markov":
            features.append(self.t["markov_head.markov_w1.weight"][previous])
        weight, bias = (self.t[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        return (weight @ torch.cat(features) + bias)[0]

    def chain(self) -> list[int]:
        """The candidates of a greedy round."""
        path: list[int] = []
        for _ in range(len(self.h)):
            path.append(int(self.logits(path).argmax()))
        return path


def yarn(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """Rotated with YaRN's frequencies (arXiv 2309.00071), as `YARN` says, with its factor of attention."""
    size, factor, longest = x.shape[-1], YARN["factor"], YARN["original_max_position_embeddings"]
    ends = size * (longest / (torch.tensor([32.0, 1.0]) * 2 * torch.pi)).log() / (2 * torch.tensor(theta).log())
    low, high = ends[0].floor().clamp_min(0), ends[1].ceil().clamp_max(size - 1)
    usual = theta ** -(torch.arange(0, size, 2).float() / size)
    ramp = ((torch.arange(size // 2) - low) / (high - low).clamp_min(1e-3)).clamp(0, 1)
    angles = places[:, None].float() * (usual / factor * ramp + usual * (1 - ramp))
    scale = 0.1 * torch.tensor(factor).log() + 1.0
    cos, sin = ((scale * torch.cat((turn, turn), -1)).to(x)[:, None] for turn in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
