"""Tiny random models, and drafts that agree with them in part."""

import copy
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.trees.tree import Chain
from support.targets.copies import Copies

VOCAB_SIZE = 48
WINDOW = 8  # of the models with sliding-window attention

# No special tokens, so that nothing ends a text before its time. Large initial weights, because with the usual ones a
# random model repeats one token for ever, which every draft would guess.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # a tied random model mostly repeats its input
}
ROTARY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
MIXED_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "qwen2": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 8},
    "phi3": ROTARY,
    "mistral": {**ROTARY, "sliding_window": WINDOW, "head_dim": 8},
    "gemma2": {**ROTARY, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "head_dim": 8},
    "gemma3_text": {**ROTARY, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "head_dim": 8},
    "granite": {**ROTARY, "logits_scaling": 2.0},
    "cohere": {**ROTARY, "logit_scale": 0.5},
    "cohere2": {**ROTARY, "logit_scale": 0.5, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 1024},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "init_std": 0.2,
    },
}
SMALLER = {**ROTARY, "num_hidden_layers": 2, "max_position_embeddings": 256}
NEWER: dict[str, dict[str, Any]] = {  # only where they are named
    "mixtral": {**SMALLER, "num_local_experts": 4},
    "gpt_oss": {**SMALLER, "num_local_experts": 4, "head_dim": 8, "sliding_window": WINDOW},
}


_known: dict[str, Copies] = {}


def tiny(family: str, seed: int = 0, attn_implementation: str | None = None, **overrides: Any) -> CausalLM:
    """A random model of `family` in float64 (experts in float32), the same for the same arguments.

    A copy of the first one, since tests change theirs."""
    what = repr((family, seed, attn_implementation, sorted(overrides.items())))
    if what not in _known:
        _known[what] = Copies(_made(family, seed, attn_implementation, overrides))
    return _known[what].make()


def _made(family: str, seed: int, attn_implementation: str | None, overrides: dict[str, Any]) -> CausalLM:
    shape = {**FAMILIES, **NEWER}[family]
    config = AutoConfig.for_model(family, **{**COMMON, **shape, **overrides})
    with torch.random.fork_rng(), torch.inference_mode(False):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    # Torch has no grouped matrix product in float64.
    return model.to(torch.float32 if "num_local_experts" in shape else torch.float64).eval()


def quiet_later_layers(target: CausalLM) -> CausalLM:
    """Make every layer but the first matter less, so that an early exit of a random model guesses some tokens."""
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if not re.search(r"\.[1-9]\.", name):
                continue
            if parameter.dim() == 2:
                parameter *= 0.66
            elif "post" in name and target.config.model_type.startswith("gemma"):
                parameter.fill_(-0.7)  # Gemma normalises what a layer adds, and scales it by 1 + weight
    return target


def partly_agreeing(target: CausalLM, mix: float = 0.96, seed: int = 1) -> CausalLM:
    """A draft of the target's shape that is `mix` target and `1 - mix` noise, so that some of its candidates stand."""
    draft = copy.deepcopy(target)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in draft.parameters():
            # Noise of the parameter's own size; what is constant at the start (norms, biases) stays as it is.
            noise = torch.randn_like(parameter) * (parameter.std() if parameter.numel() > 1 else 0.0)
            parameter.copy_(mix * parameter + (1 - mix) * noise)
    return draft


def of_pard(target: CausalLM, mix: float = 0.9, **changes: Any) -> CausalLM:
    """A PARD draft: `partly_agreeing`, and its config names a mask token. Candidates after the first are luck."""
    draft = partly_agreeing(target, mix)
    draft.config.update({"pard_token": 2, "spd_type": "pard", **changes})
    return draft


def random_fusion(target: CausalLM, reads: Sequence[int] = (0, 1), share: float = 0.1) -> Fusion:
    """A fusion that mostly passes the embedding on, so that a draft of the first layers guesses some tokens."""
    scale = share * target.get_input_embeddings().weight.std().float().cpu()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        fusion = Fusion.untrained(target, reads).cpu()
        for parameter in fusion.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return fusion.to(input_device(target))


@torch.no_grad()
def random_layer(target: CausalLM, reads: Sequence[int] = (0, 1), vocab: Tensor | None = None) -> Eagle3Model:
    """An EAGLE-3 layer that guesses some of the target's tokens.

    Each token attends to itself above all, so that the layer's state after it is about s' = norm(s) + M e: s is the
    state before it, e the token's embedding. M, and the fc that makes the target's last state of those that are read,
    are fitted by least squares on random text. What MLP and earlier rows add is random, and small."""
    config = target.config.get_text_config(decoder=True)
    size, device = config.hidden_size, input_device(target)
    catching = StateReader()
    catching.hidden_size, catching.reads = size, [*reads, config.num_hidden_layers - 1]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        settings = first_weights.layer_settings(target, reads, vocab)
        heads = {"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": size // 4}
        settings = replace(settings, norm_before_residual=True, layer={**settings.layer, **heads})
        model = first_weights.untrained_layer(settings, target, vocab).cpu()
        texts, noise = torch.randint(1, config.vocab_size, (40, 50)).to(device), 0.05 * torch.randn(size, size)
    with TargetStates(target, catching) as caught:
        target(texts, use_cache=False)
        states: Any = caught.states_of()
    states = states[:, : texts.shape[1]]  # ProphetNet's layers also return those of its n-grams
    read, last = states.cpu().float().split((len(reads) * size, size), -1)
    layer: tuple[Any, Any] = model.get_submodule("decoder.layers.0"), model.get_submodule("reader.fc")
    first, fc = layer
    fc.weight.copy_(_solution(read, last))
    first.hidden_norm.weight.fill_(0.6 * float(last.std()))
    before = first.hidden_norm(fc(read))[:, :-1]
    tokens = first.input_layernorm(target.get_input_embeddings()(texts).cpu().float())[:, 1:]
    attention = first.self_attn
    for product, of_embedding in (
        (attention.q_proj, 1.5 * torch.eye(size)),
        (attention.k_proj, 1.5 * torch.eye(size)),
        (attention.v_proj, _solution(tokens, last[:, 1:] - before)),
    ):
        product.weight.copy_(torch.cat((of_embedding, noise), 1))
    attention.o_proj.weight.copy_(torch.eye(size))
    return model.eval().requires_grad_(False)


def _solution(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The linear map `[outputs, inputs]` of least squares, but for a ridge."""
    x, y = inputs.flatten(0, 1), outputs.flatten(0, 1)
    squares = x.T @ x
    return torch.linalg.solve(squares + 1e-4 * squares.diagonal().mean() * torch.eye(len(squares)), x.T @ y).T


def assistant_for(target: CausalLM, attached: bool = True, mix: float = 0.96, **speculation: Any) -> Any:
    """An assistant with a partly agreeing draft. `fixed` rounds of 4 candidates unless told otherwise."""
    assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target, mix), target if attached else None)
    return configured(assistant, **(speculation or {"rule": "fixed", "num_tokens": 4}))


def configured(assistant: Any, **knobs: Any) -> Any:
    """The assistant with these settings, `rule="threshold"` unless another is among them, and with these values of what
    the package decides otherwise."""
    decided = {field.name for field in fields(Decisions)} & knobs.keys()
    assistant.decisions = Decisions(**{name: knobs.pop(name) for name in decided})
    assistant.speculation = SpeculationConfig(**{"rule": "threshold", **knobs})
    return assistant


def assistant_of(kind: str, target: CausalLM, **speculation: Any) -> SpecDecPPAssistant:
    """An attached assistant with a draft: `"independent"`, `"pard"`, an `"early_exit"`, `"conditioned"` or `"eagle3"`.

    An early exit and a conditioned draft have two of the target's layers, one where it has no more than two."""
    if kind == "independent":
        made: SpecDecPPAssistant = assistant_for(target, mix=0.9, **speculation)
        return made
    if kind == "pard":
        return configured(SpecDecPPAssistant.from_draft(of_pard(target), target), **speculation)
    layers = min(2, target.config.num_hidden_layers - 1)
    if kind == "early_exit":
        assistant = SpecDecPPAssistant.from_early_exit(target, layers)
    elif kind == "eagle3":
        assistant = SpecDecPPAssistant.from_draft(random_layer(target), target)
    else:
        assistant = SpecDecPPAssistant.from_conditioned(target, layers, fusion=random_fusion(target))
    return configured(assistant, **speculation)


def prompt(length: int = 12, seed: int = 0) -> Tensor:
    """Random token ids `[1, length]`, none of them 0: tests pad with 0, and transformers masks padding in prompts."""
    return torch.randint(1, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


class Rounds:
    """Records how many candidates each round drafted and how many of them stood.

    Counts what the loop tells the candidate generator, so it sees both our loop and transformers'."""

    def __init__(self, monkeypatch: Any) -> None:
        from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator

        self.outcomes: list[tuple[int, int]] = []
        record = SpecDecPPCandidateGenerator.record_outcome

        def saw(generator: Any, tree: Any, path: list[int], length: int) -> None:
            if isinstance(tree, Chain) and not generator.is_paused:
                self.outcomes.append((len(tree), len(path)))
            record(generator, tree, path, length)

        monkeypatch.setattr(SpecDecPPCandidateGenerator, "record_outcome", saw)

    def assert_all_kinds(self) -> None:
        """Rounds with no, with some and with all candidates accepted must have occurred."""
        # A single candidate counts where it was rejected only: a rule that learns may then draft no more than one.
        kinds = {"none" if a == 0 else "all" if a == d else "some" for d, a in self.outcomes if d > 1 or a < d}
        assert kinds == {"none", "some", "all"}, self.outcomes
