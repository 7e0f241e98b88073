"""Train a small DSpark draft with a confidence head for a target, to compare this head with q and with a head of ours.

    specdecpp train --config dspark.yaml --stage rollouts
    python examples/train_a_dspark_draft.py dspark.yaml DRAFT
    specdecpp train --config dspark.yaml --draft DRAFT --head-only

`dspark.yaml` names a target and prompts, and no draft (docs/training.md). The first command lets the target answer the
prompts. This script trains a draft on the answers and writes its checkpoint into the folder DRAFT, in SpecForge's
format. The last command fits a confidence head to the finished draft, and compares this head, the head that was trained
with the draft, and q on held-out answers.

The draft has one layer, which starts as the target's last layer: the block attends to the keys and values that this
layer computes from its own input. With q of the draft and p of the target after the same tokens, and the confidence c,
the loss of candidate k = 0, 1, ... of a block is that of the package speculators:

    exp(-k / 4) [KL(p || q) + BCE(c, Σ min(p, q))]
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashDraft, DSparkModel
from hf_specdecpp.draft_kinds.known import DSPARK
from hf_specdecpp.texts import answers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import answer_counts

BLOCK, RANK = 5, 64  # candidates of a block, and rank of the bias by the token before
BLOCKS, TEXTS = 24, 4  # blocks of a text, and texts, in each step of the optimiser
EPOCHS, RATE = 8, 6e-4
SPLITS = ("train", "heldout")
LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip


def config_of(target: nn.Module, mask_token_id: int) -> dict:
    """The `config.json` of the draft: one layer of the target's sizes, which reads five layers of the target."""
    config = target.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    heads = {"markov_rank": RANK, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in LAYER if getattr(config, name, None) is not None},
        "num_hidden_layers": 1,
        "rope_theta": config.rope_parameters["rope_theta"],
        "num_target_layers": depth,
        "block_size": BLOCK,
        "sample_from_anchor": True,
        "dflash_config": {
            "projector_type": "dspark", "mask_token_id": mask_token_id, "enable_confidence_head": True, **heads,
            "target_layer_ids": sorted({1, depth // 4, depth // 2, 3 * depth // 4, depth - 2}),
        },
    }  # fmt: skip


def new_draft(target: nn.Module, config: dict) -> DSparkModel:
    """The draft before training, with weights of the target's last layer where their names are equal."""
    block = config["dflash_config"]
    layer = {name: config[name] for name in (*LAYER, "num_hidden_layers") if name in config}
    draft = DSparkModel(
        DFlashSettings(
            {**layer, "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}},
            reads=block["target_layer_ids"], block_size=BLOCK, mask_token_id=block["mask_token_id"],
            samples_anchor=True, num_target_layers=config["num_target_layers"],
            markov_rank=RANK, confidence_head=True, confidence_with_markov=True,
        )
    )  # fmt: skip
    last, size = target.model.layers[-1], config["hidden_size"]
    draft.layers[0].load_state_dict(last.state_dict(), strict=False)
    draft.norm.load_state_dict(target.model.norm.state_dict())
    with torch.no_grad():
        # The context is the input of the target's last layer, after that layer's norm.
        draft.reader.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        draft.reader.norm.weight.copy_(last.input_layernorm.weight)
        draft.markov_head.markov_w2.weight.zero_()
        draft.confidence_head.proj.weight.zero_()
    return draft


@torch.no_grad()
def read(target: nn.Module, reads: list[int], text: dict) -> dict[str, Tensor]:
    """Tokens `[1, n]` of a text, `states` `[1, n, width]` that the draft reads, and the target's `final` ones."""
    ids = torch.tensor([text["input_ids"]])
    layers = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    states = torch.cat([layers[layer + 1] for layer in reads], dim=-1)
    return {"ids": ids, "states": states.half(), "final": layers[-1][0].half()}


def losses(draft: DFlashDraft, head: nn.Module, text: dict[str, Tensor], anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of blocks after each of the tokens at `anchors` `[a]`, and Σ min(p, q) by place, `[a, BLOCK]`."""
    places = anchors[:, None] + torch.arange(BLOCK)
    hidden = draft.blocks_after(text["ids"], text["states"].float(), anchors[None])[0]
    nothing = hidden.new_zeros((*places.shape, 0))
    logits, state, _ = draft.after(text["ids"][0, places], draft.head_logits(hidden), hidden, nothing)
    log_q = logits.float().log_softmax(-1)
    with torch.no_grad():
        log_p = head(text["final"][places].float()).float().log_softmax(-1)
        p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    accepted = torch.minimum(p, log_q.detach().exp()).sum(-1)
    confidence = draft.model.confidence_head.proj(state)[..., 0].float()
    error = binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    weight = (-torch.arange(BLOCK) / 4.0).exp()
    return ((divergence + error) * weight).sum() / weight.sum() / len(anchors), accepted


def anchors_of(text: dict, chosen: random.Random) -> Tensor:
    """`BLOCKS` indices of tokens of the answer, or fewer, with `BLOCK` further tokens of the answer."""
    places = range(text["prompt_length"], len(text["input_ids"]) - BLOCK)
    return torch.tensor(sorted(chosen.sample(places, min(BLOCKS, len(places)))))


def main(path: str, folder: str) -> None:
    config = TrainingConfig.from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32).eval().requires_grad_(False)
    written, chosen = {split: answers.load(config.work, split) for split in SPLITS}, random.Random(0)  # noqa: S311
    torch.manual_seed(0)
    rarest = int(answer_counts(written["train"], target.config.vocab_size).argmin())
    described = config_of(target, rarest)  # as the mask token
    model = new_draft(target, described)
    DSPARK.bind(model, target, "the draft")
    draft, head = DFlashDraft(model, target), target.get_output_embeddings()
    texts = {
        split: [(text, read(target, model.settings.reads, text)) for text in rows if len(anchors_of(text, chosen))]
        for split, rows in written.items()
    }
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(texts["train"]) // TEXTS)
    schedule = get_cosine_schedule_with_warmup(optimiser, steps // 25, steps)
    begin = time.perf_counter()
    for epoch in range(EPOCHS):
        chosen.shuffle(texts["train"])
        for first in range(0, len(texts["train"]), TEXTS):
            for text, known in texts["train"][first : first + TEXTS]:
                with torch.autocast("cpu", torch.bfloat16):
                    loss, _ = losses(draft, head, known, anchors_of(text, chosen))
                (loss / TEXTS).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
        with torch.no_grad():
            held = [losses(draft, head, known, anchors_of(text, chosen)) for text, known in texts["heldout"]]
        accepted = torch.cat([each for _, each in held]).mean(0).tolist()
        found = ", ".join(f"{share:.3f}" for share in accepted)
        line = f"epoch {epoch + 1}: held-out loss {sum(loss for loss, _ in held) / len(held):.3f}, acceptance {found}"
        sys.stdout.write(f"{line}, {time.perf_counter() - begin:.0f} s\n")
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(DSPARK.own_tensors(model), Path(folder, "model.safetensors"))
    Path(folder, "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
