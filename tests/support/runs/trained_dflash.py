"""A DFlash draft that is trained on a few sequences until it knows most of them, in z-lab's format."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashDraft
from hf_specdecpp.draft_kinds.known import DFLASH
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.recorded_chains import target_states
from support.files.checkpoints import written

MASK = 3  # an id that no sequence contains


def config_for(target: CausalLM, reads: list[int], candidates: int) -> dict[str, Any]:
    """Return the `config.json` of a draft with one layer of the target's sizes, with z-lab's names."""
    theirs: Any = target.config
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "rms_norm_eps", "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **{name: getattr(theirs, name) for name in names},
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "use_sliding_window": False,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "num_target_layers": theirs.num_hidden_layers, "block_size": candidates + 1,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": reads},
    }  # fmt: skip


def train_dflash(
    target: CausalLM, sequences: list[tuple[list[int], int]], folder: Path, candidates: int = 3, epochs: int = 8
) -> list[float]:
    """Write a draft into `folder`, and return the mean loss of each epoch.

    Args:
        target: in float32.
        sequences: token ids, and the number of these that are the prompt.
        candidates: of a block.
    """
    torch.manual_seed(0)
    depth = target.config.num_hidden_layers
    config = config_for(target, [1, depth // 2, depth - 3], candidates)
    model = DFLASH.model_class(DFLASH.settings_of(config, {}))
    draft = DFlashDraft(model.train(), target)
    states = [target_states(target, draft, ids) for ids, _ in sequences]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses: list[float] = []
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - epoch / epochs)
        total = 0.0
        for (ids, begin), known in zip(sequences, states, strict=True):
            text = torch.tensor([ids])
            anchors = torch.arange(begin - 1, len(ids) - candidates)[None]
            hidden = draft.blocks_after(text, known, anchors)[0]
            wanted = text[0].unfold(0, candidates, 1)[anchors[0] + 1]
            loss = functional.cross_entropy(draft.head_logits(hidden).flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss)
        losses.append(total / len(sequences))
    written(folder, DFLASH.own_tensors(model.eval()), config)
    return losses
