"""EAGLE-3, DFlash and DSpark drafts of one layer that have learned answers of their target by heart, for tests in
which other engines serve them: each engine must read the same weights in the same way for candidates to be accepted."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import usual_reads
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Drafter
from hf_specdecpp.draft_kinds.known import DFLASH
from hf_specdecpp.files import save_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.training.distillation.unrolling import unrolled
from support.targets.formulas import states_of

BLOCK, RANK, MASK = 4, 8, 11  # MASK: a token that the sequence does not contain
OTHERS = 2048  # tokens that are drawn anew in each step, which a block must not propose


def learn(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, rate: float) -> float:
    """Minimise `loss`, and return its last value."""
    chosen = [parameter.requires_grad_() for parameter in parameters]
    optimizer, value = torch.optim.AdamW(chosen, lr=rate, weight_decay=0.0), torch.tensor(0.0)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1.0 - step / steps)
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
    return float(value.detach())


def accepted_share(
    target: CausalLM, assistant: SpecDecPPAssistant, prompts: Iterable[Sequence[int]], length: int
) -> float:
    """The share of candidates that `generate()` accepts in greedy answers of `length` tokens, with exactly the draft
    that another engine serves."""
    assistant.decisions = Decisions(draft_successors=False, int8_draft=False)
    drafted = accepted = 0
    for prompt in prompts:
        target.generate(torch.tensor([prompt]), assistant_model=assistant, do_sample=False, max_new_tokens=length)
        drafted, accepted = drafted + assistant.stats.drafted, accepted + assistant.stats.accepted
    return accepted / drafted


def eagle3(target: CausalLM, text: Tensor, folder: Path) -> float:
    """Write an assistant with an EAGLE-3 layer that reads the usual layers and learns the tokens of `text` `[1, n]`, of
    which it proposes about half; return its loss."""
    torch.manual_seed(1)
    vocab = text.unique()
    reads = usual_reads(target.config.num_hidden_layers) or []
    model = first_weights.untrained_layer(first_weights.layer_settings(target, reads, vocab), target, vocab)
    drafter, wanted = Eagle3Drafter(model, target), torch.searchsorted(vocab, text[0, 1:])
    states = states_of(target, drafter, text).detach()

    def loss() -> Tensor:
        rows = enumerate(unrolled(drafter, text, states, BLOCK - 1))
        logits = [(model.lm_head(drafter.before_head(hidden[0, step + 1 : -1])), step + 1) for step, hidden in rows]
        return torch.stack([functional.cross_entropy(each, wanted[first:]) for each, first in logits]).mean()

    layer: Any = model.decoder.layers[0]
    found = learn([*layer.parameters(), *model.reader.parameters()], loss, 40, 3e-3)
    SpecDecPPAssistant.from_draft(model.requires_grad_(False), target).save_pretrained(folder)
    return found


def blocks(
    target: CausalLM, texts: Sequence[tuple[Tensor, int]], folder: Path, is_dspark: bool, steps: int = 140
) -> float:
    """Write a published draft in the original format, with blocks of four rows that read three layers; return its loss.
    DFlash proposes three candidates, DSpark four.

    `texts`: token ids `[1, n]` of each text, and the index of the first token that the draft learns. Each of the
    `steps` trains on four texts.

    Example: with ([[5, 6, 7, 8]], 2) the draft learns to propose 7 and 8."""
    config: Any = target.config
    size, vocab_size = config.hidden_size, config.vocab_size
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    own = {"mask_token_id": MASK, "target_layer_ids": usual_reads(config.num_hidden_layers), "block_size": BLOCK}
    dspark = {"markov_rank": RANK, "sample_from_anchor": True, "projector_type": "dspark"} if is_dspark else {}
    raw = {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"], "model_type": "qwen3",
        "num_hidden_layers": 1, "hidden_size": size, "intermediate_size": config.intermediate_size, **heads,
        "head_dim": size // config.num_attention_heads, "vocab_size": vocab_size, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
        "layer_types": ["full_attention"], "num_target_layers": config.num_hidden_layers,
        "block_size": BLOCK, "dflash_config": own | dspark, **({"sample_from_anchor": True} if is_dspark else {}),
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    save_tensors(_first_weights(raw, target, is_dspark), folder / "model.safetensors")
    drafter: Any = SpecDecPPAssistant.from_pretrained(folder, target=target).ready_drafter()
    model = drafter.model.float()
    known_states = [states_of(target, drafter, text).detach() for text, _ in texts]
    vocab = torch.cat([text[0] for text, _ in texts])
    turns = itertools.cycle(zip(texts, known_states, strict=True))

    def loss() -> Tensor:
        known = torch.cat((vocab, torch.randint(vocab_size, (OTHERS,)))).unique()
        return torch.stack([of_text(known, *next(turns)) for _ in range(min(4, len(texts)))]).mean()

    def of_text(known: Tensor, learned: tuple[Tensor, int], states: Tensor) -> Tensor:
        text, first = learned
        anchors = torch.arange(first - 1, text.shape[1] - BLOCK)[None]
        places = anchors[0, :, None] + torch.arange(drafter.places)
        logits = drafter.blocks_after(text, states, anchors)[0] @ drafter.head.weight[known].T
        if is_dspark:
            logits = logits + model.markov_head.markov_w1(text[0, places]) @ model.markov_head.markov_w2.weight[known].T
        return functional.cross_entropy(logits.flatten(0, 1), torch.searchsorted(known, text[0, places + 1]).flatten())

    found = learn(model.parameters(), loss, steps, 4e-3)
    save_tensors(DFLASH.own_tensors(model), folder / "model.safetensors")
    return found


def _first_weights(raw: dict[str, Any], target: CausalLM, is_dspark: bool) -> dict[str, Tensor]:
    """Tensors by the names of the original format: the target's last layer and norm, which read the highest of the
    three states, and a random Markov head."""
    size, model = raw["hidden_size"], dict(target.named_parameters())
    last = f"model.layers.{raw['num_target_layers'] - 1}."
    found = {f"layers.0.{name.removeprefix(last)}": each for name, each in model.items() if name.startswith(last)}
    found |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(raw["head_dim"]) for name in "qk"}
    found |= {"norm.weight": model["model.norm.weight"], "hidden_norm.weight": torch.ones(size)}
    found["fc.weight"] = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), dim=1)
    if is_dspark:
        found |= {f"markov_head.markov_w{part}.weight": 0.1 * torch.randn(raw["vocab_size"], RANK) for part in (1, 2)}
    return {name: each.detach().clone() for name, each in found.items()}
