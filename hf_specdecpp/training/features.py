"""What the head is fitted on: one teacher-forced pass over each rollout, cached in safetensors shards.

`inputs="after"` is the paper's recipe (section 3.2): the draft proposes a token Y_i at each position of the target's
text X; it then reads a mixture Z of both texts, and its states at the positions where Z is Y are the examples.
`inputs="before"` takes the state that q came from, and any number of siblings drawn from that q.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafting.unrolling import in_blocks, in_rounds
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.files import load_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.sampling.randomness import draw_rows, uniform
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import HeadConfig, TrainingConfig
from hf_specdecpp.training.models import Trained, fingerprint
from hf_specdecpp.training.trainers import Record, joined, shards
from hf_specdecpp.trees.verification import acceptance

FOLDER, RECORD = "features", "features.json"
TEXTS_PER_SHARD = 64
ROWS_AT_ONCE = 64  # positions whose distributions [rows, vocab] are in memory together
MIXING = 0.15  # share of positions where the draft of an "after" head reads the target's token (paper)


def build(made: Trained, split: str) -> FeatureSet:
    """Features of every rollout of `split`, cached in `work/features`; `ValueError` without rollouts or if damaged."""
    config = made.config
    texts = answers.load(config.work, split)
    if split == "train" and config.head.max_texts is not None:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed))
        texts = texts.select(sorted(order[: config.head.max_texts].tolist()))
    record = Record(config.work / FOLDER / split / RECORD, settings(config), [config.work / FOLDER / split])
    title, rows = f"features of {split} texts", range(len(texts))
    return FeatureSet(shards(record, rows, TEXTS_PER_SHARD, lambda row: _of_row(made, texts[row], row), title))


def settings(config: TrainingConfig) -> dict[str, Any]:
    """What features depend on."""
    chosen = {name: getattr(config.head, name) for name in ("inputs", "siblings", "max_texts")}
    sampling = {"temperatures": config.rollouts.temperatures, "top_k": config.rollouts.top_k}
    return {**chosen, **sampling, "seed": config.seed, **fingerprint(config)}


def _of_row(made: Trained, text: dict[str, Any], row: int) -> dict[str, Tensor]:
    """The examples of one text; nothing for an empty answer, or a prompt that the draft cannot read."""
    config, drafter = made.config, made.drafter
    ids = torch.tensor([text["input_ids"]])[:, : int(min(drafter.max_length, len(text["input_ids"])))]
    if ids.shape[1] <= text["prompt_length"]:
        return {}
    # A seed of its own for each text: a resumed run draws what an uninterrupted one would have drawn.
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + row)
    examples = Examples(config.head, drafter, made.target)
    part = examples.of_text(ids, text["prompt_length"], config.sampling(text["temperature"]), generator)
    length = torch.tensor([len(part["hidden"])], device=drafter.device)
    return {**part, "hidden": to_half(part["hidden"]), "tokens": part["tokens"].int(), "lengths": length}


def to_half(hidden: Tensor) -> Tensor:
    """In float16; what would overflow is cut off."""
    largest = torch.finfo(torch.float16).max
    return hidden.clamp(-largest, largest).half()


@dataclass(frozen=True)
class Examples:
    """Makes a head's examples of texts, for which the draft and the target read them."""

    head: HeadConfig
    drafter: Drafter
    target: CausalLM

    @torch.no_grad()
    def of_text(
        self, input_ids: Tensor, prompt_length: int, sampling: Sampling, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Examples from one text, one row a position of its answer (n rows), s candidates a row.

        Args:
            input_ids: `[1, length]`, prompt and answer.
            generator: of the host.

        Returns:
            `hidden` `[n, hidden_size]`, `tokens` `[n, s]`, `scalars` `[n, s, 6]` (`"before"`), `label` `[n, s]`, and
            `mask` `[n, s]`: the weight of each candidate, 0 for those that do not count.
        """
        drafter, ids = self.drafter, input_ids.to(self.drafter.device)
        count = input_ids.shape[1] - prompt_length + 1
        kept = {"logits_to_keep": count} if self.target._supports_logits_to_keep() else {}
        with TargetStates(self.target, drafter.reads) as caught:
            outputs = self.target(input_ids.to(self.target.device), use_cache=False, **kept)
            states = caught.states_of()
        if states is None:
            along = drafter.hidden_states(ids)
        else:
            along = (in_rounds if drafter.blocks_after is None else in_blocks)(drafter, ids, states.to(ids.device))
        before, logits = along[0, prompt_length - 1 : -1], outputs.logits[0, -count:-1]
        rows = joined(
            [
                self._candidates(p.to(drafter.device), drafter.logits(hidden, p.shape[-1]), sampling, generator)
                for p, hidden in zip(logits.split(ROWS_AT_ONCE), before.split(ROWS_AT_ONCE), strict=True)
            ]
        )
        if self.head.inputs == "before":
            return {"hidden": before, **rows}
        answer, drafted = ids[0, prompt_length:], rows["tokens"][:, 0]
        keeps_target = uniform(answer.shape, generator, answer.device) < MIXING
        mixed = torch.cat((ids[0, :prompt_length], answer.where(keeps_target, drafted)))
        after = drafter.hidden_states(mixed[None])[0, prompt_length:]
        # As in the released code, what was mixed in does not count, not even where it happens to be the draft's token.
        return {"hidden": after, **rows, "mask": (~keeps_target)[:, None].float()}

    def _candidates(
        self, p_logits: Tensor, q_logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Candidates for n positions, and their labels, from logits `[n, vocab]`."""
        p, q = sampling.p(p_logits), sampling.q(q_logits)
        is_before = self.head.inputs == "before"
        drawn = draw_siblings(q, self.head.siblings if is_before else 1, generator, sampling.greedy)
        columns = drawn.tokens.unbind(-1)
        from_q = [sampling.drawn_from(q_left, token) for q_left, token in zip(drawn.drawn_from, columns, strict=True)]
        if not is_before:
            return {"tokens": drawn.tokens, "label": acceptance(p, from_q[0], columns[0])[:, None]}
        label, reach = sibling_labels(p, from_q, drawn.tokens)
        scalars = [
            scalar_features(q_left, token, sampling.greedy, mass, torch.full_like(mass, number))
            for number, (q_left, token, mass) in enumerate(
                zip(drawn.drawn_from, columns, drawn.mass.unbind(-1), strict=True)
            )
        ]
        mask, label = torch.where(drawn.valid, reach, 0.0), torch.where(drawn.valid, label, 0.0)
        return {"tokens": drawn.tokens, "scalars": torch.stack(scalars, 1), "label": label, "mask": mask}


class FeatureSet(Dataset[dict[str, Tensor]]):
    """Cached features, an item a text (see `Examples.of_text`); read from disk when asked for."""

    def __init__(self, shards: list[Path]) -> None:
        self.places = list[tuple[Path, int, int]]()  # of each text its shard, first row and end
        for path in shards:
            ends = load_tensors(path).get("lengths", torch.empty(0, dtype=torch.long)).cumsum(0).tolist()
            self.places += zip([path] * len(ends), [0, *ends], ends, strict=False)
        if not self.places:
            raise ValueError(f"The texts of {shards[0].parent} have no answers that the draft can read.")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, begin, end = self.places[index]
        with safe_open(path, framework="pt") as file:  # copies, so that the file may be removed: see `load_tensors`
            names = [name for name in file.keys() if name != "lengths"]  # noqa: SIM118 - not a dict
            return {name: file.get_slice(name)[begin:end].clone() for name in names}


# Labels ---------------------------------------------------------------------------------------------------------------


@dataclass
class DrawnSiblings:
    """Candidates `[..., n]` drawn one after another for the same position, none twice: the q `[..., vocab]` of each
    draw, the mass of those before, and whether q had a token left (else the others mean nothing)."""

    tokens: Tensor
    drawn_from: list[Tensor]
    mass: Tensor
    valid: Tensor


def draw_siblings(q: Tensor, n: int, generator: torch.Generator | None = None, greedy: bool = False) -> DrawnSiblings:
    """Draw n siblings from q `[..., vocab]` without replacement (DySpec, Algorithm 1), or take the likeliest."""
    left = q.clone()
    tokens: list[Tensor] = []
    drawn_from, masses, valid = [], [], []
    for _ in range(n):
        total = left.sum(-1, keepdim=True)
        some_left = total > 0.0
        probs = torch.where(some_left, left / total, 1.0 / q.shape[-1])
        rows = probs.reshape(-1, q.shape[-1])
        token = (rows.argmax(-1) if greedy else draw_rows(rows, generator)).reshape(q.shape[:-1])
        masses.append(q.gather(-1, torch.stack(tokens, -1)).sum(-1) if tokens else torch.zeros_like(total[..., 0]))
        tokens.append(token)
        drawn_from.append(probs)
        valid.append(some_left[..., 0])
        left = left.scatter(-1, token[..., None], 0.0)
    return DrawnSiblings(torch.stack(tokens, -1), drawn_from, torch.stack(masses, -1), torch.stack(valid, -1))


def sibling_labels(p: Tensor, drawn_from: list[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Chance that the verifier accepts each sibling once it has rejected those before it (DySpec, Algorithm 3), `[...,
    n]`, and the chance that each is tested, `[..., n]`, 1 for the first; `drawn_from` are n tensors, D of each sibling.

    The verifier gets as far as sibling j with the chance of the second result. A head that is fitted
    with that as the weight of the example learns P(accepted | reached): unweighted, it would learn as much from
    siblings that are hardly ever tested.
    """
    left, labels, reach = p, [], [torch.ones_like(p[..., 0])]
    for q, token in zip(drawn_from, tokens.unbind(-1), strict=True):
        labels.append(acceptance(left, q, token))
        reach.append(reach[-1] * (1.0 - labels[-1]))
        rest = (left - q).clamp_min(0.0)
        mass = rest.sum(-1, keepdim=True)
        left = torch.where(mass > 0.0, rest / mass, left)
    return torch.stack(labels, -1), torch.stack(reach[:-1], -1)


def weighted_bce(log_odds: Tensor, label: Tensor, rejection_weight: float, mask: Tensor) -> Tensor:
    """The paper's loss, 0-d: - Σ [P log P̂ + w_rej (1 - P) log(1 - P̂)] / [w_rej Σ (1 - P) + Σ P]; zero where nothing
    counts.

    `label` is P, which may lie between 0 and 1; `mask` says which candidates count: bool, or weights
    (`sibling_labels`).
    """
    weight = mask.to(log_odds.dtype)
    accept, reject = weight * label, weight * rejection_weight * (1.0 - label)
    loss = -(accept * F.logsigmoid(log_odds) + reject * F.logsigmoid(-log_odds)).sum()
    return loss / (accept + reject).sum().clamp_min(torch.finfo(log_odds.dtype).tiny)
