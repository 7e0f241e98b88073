"""The head's training examples: one teacher-forced pass over each rollout, cached in safetensors shards.

`inputs="after"` is the paper's method (section 3.2): the draft proposes a token Y_i at each position of the answer X,
then reads a mixture Z of X and Y; its hidden states at the positions with Z = Y are the examples. `inputs="before"`
uses the hidden state that produced q, and any number of siblings drawn from q. `inputs="path"` uses that state alone,
with the share of q that the target accepts, Σ min(p, q), as the label."""

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
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.files import load_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling, draw_rows, uniform
from hf_specdecpp.training.configuration import HeadConfig, TrainingConfig
from hf_specdecpp.training.distillation.unrolling import in_blocks, in_rounds, reached
from hf_specdecpp.training.models import Trained, fingerprint
from hf_specdecpp.training.trainers import Record, joined, shards

FOLDER, RECORD = "features", "features.json"
TEXTS_PER_SHARD = 64
ROWS_AT_ONCE = 64  # positions whose distributions [rows, vocab] are in memory at the same time
MIXING = 0.15  # share of positions where the draft of an "after" head reads the target's token (paper)


def build(made: Trained, split: str) -> FeatureSet:
    """Return the features of all rollouts of `split`, cached in `work/features`. `ValueError` without rollouts."""
    config = made.config
    texts = answers.load(config.work, split)
    if split == "train" and config.head.max_texts is not None:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed))
        texts = texts.select(sorted(order[: config.head.max_texts].tolist()))
    record = Record(config.work / FOLDER / split / RECORD, settings(config), [config.work / FOLDER / split])
    title, rows = f"features of {split} texts", range(len(texts))
    return FeatureSet(shards(record, rows, TEXTS_PER_SHARD, lambda row: _of_row(made, texts[row], row), title))


def settings(config: TrainingConfig) -> dict[str, Any]:
    """The settings that features depend on, and hashes of the files that they are computed from."""
    chosen = {name: getattr(config.head, name) for name in ("inputs", "siblings", "max_texts")}
    sampling = {"temperatures": config.rollouts.temperatures, "top_k": config.rollouts.top_k}
    return {**chosen, **sampling, "seed": config.seed, **fingerprint(config)}


def _of_row(made: Trained, text: dict[str, Any], row: int) -> dict[str, Tensor]:
    """The examples of one rollout; empty for an empty answer, or a prompt that is too long for the draft."""
    config, drafter = made.config, made.drafter
    ids = torch.tensor([text["input_ids"]])[:, : int(min(drafter.max_length, len(text["input_ids"])))]
    if ids.shape[1] <= text["prompt_length"]:
        return {}
    # A seed for each rollout, so that a resumed run draws the same candidates as an uninterrupted run.
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + row)
    examples = Examples(config.head, drafter, made.target)
    part = examples.of_text(ids, text["prompt_length"], config.sampling(text["temperature"]), generator)
    length = torch.tensor([len(part["hidden"])], device=drafter.device)
    return {**part, "hidden": to_half(part["hidden"]), "tokens": part["tokens"].int(), "lengths": length}


def to_half(hidden: Tensor) -> Tensor:
    """`hidden` in float16, clamped to the range of float16."""
    largest = torch.finfo(torch.float16).max
    return hidden.clamp(-largest, largest).half()


@dataclass(frozen=True)
class Examples:
    """Computes a head's training examples with one pass of draft and target over each sequence."""

    head: HeadConfig
    drafter: Drafter
    target: CausalLM

    @torch.no_grad()
    def of_text(
        self, input_ids: Tensor, prompt_length: int, sampling: Sampling, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The examples of a prompt and its answer, `[1, length]`: a row for each of the answer's n tokens, with s
        candidates per row.

        Returns:
            `hidden` `[n, hidden_size]`, `tokens` `[n, s]`, `scalars` `[n, s, 6]` (only `"before"`), `label` `[n, s]`,
            the probability of acceptance, and `mask` `[n, s]`, the weight of each candidate in the loss. For `"path"`
            `tokens` are the answer's, and `mask` is the probability that a round along the answer reaches the token.
        """
        drafter, ids = self.drafter, input_ids.to(self.drafter.device)
        count = input_ids.shape[1] - prompt_length + 1
        kept = {"logits_to_keep": count} if self.target._supports_logits_to_keep() else {}
        with TargetStates(self.target, drafter.reads) as caught:
            outputs = self.target(input_ids.to(self.target.device), use_cache=False, **kept)
            states = caught.states_of()
        unrolled = in_rounds if drafter.blocks_after is None else in_blocks
        along = drafter.hidden_states(ids) if states is None else unrolled(drafter, ids, states.to(ids.device))
        before, logits, answer = along[0, prompt_length - 1 : -1], outputs.logits[0, -count:-1], ids[0, prompt_length:]
        chunks = zip(*(each.split(ROWS_AT_ONCE) for each in (logits, before, answer)), strict=True)
        rows = joined([self._candidates(p, state, text, sampling, generator) for p, state, text in chunks])
        if self.head.inputs == "path":
            rows["mask"] = reached(drafter, rows["mask"][:, 0], prompt_length - 1)[:, None]
        if self.head.inputs != "after":
            return {"hidden": before, **rows}
        drafted = rows["tokens"][:, 0]
        keeps_target = uniform(answer.shape, generator, answer.device) < MIXING
        mixed = torch.cat((ids[0, :prompt_length], answer.where(keeps_target, drafted)))
        after = drafter.hidden_states(mixed[None])[0, prompt_length:]
        # As in the released code, positions with the target's token have weight 0, even if the draft's token is equal.
        return {"hidden": after, **rows, "mask": (~keeps_target)[:, None].float()}

    def _candidates(
        self, logits: Tensor, hidden: Tensor, text: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The result of `of_text` for n positions, from the target's logits `[n, vocab]` and the draft's states `[n,
        hidden_size]`; for `"path"` the mask is the probability that a round keeps the token of the `text` `[n]`."""
        p = sampling.p(logits.to(hidden.device))
        q = sampling.q(self.drafter.logits(hidden, logits.shape[-1]))
        if self.head.inputs == "path":
            drawn_from = sampling.drawn_from(q, q.argmax(-1))
            kept, label = acceptance(drawn_from, p, text), torch.minimum(p, drawn_from).sum(-1)
            return {"tokens": text[:, None], "label": label[:, None], "mask": kept[:, None]}
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
    """Cached features, one item for each rollout (as of `Examples.of_text`), which is read from disk on access."""

    def __init__(self, shards: list[Path]) -> None:
        self.places = list[tuple[Path, int, int]]()  # shard, first row and end of each rollout
        for path in shards:
            ends = load_tensors(path).get("lengths", torch.empty(0, dtype=torch.long)).cumsum(0).tolist()
            self.places += zip([path] * len(ends), [0, *ends], ends, strict=False)
        if not self.places:
            raise ValueError(f"The texts of {shards[0].parent} have no answers that the draft can read.")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, begin, end = self.places[index]
        with safe_open(path, framework="pt") as file:  # copied, so that Windows can remove the file (`load_tensors`)
            names = [name for name in file.keys() if name != "lengths"]  # noqa: SIM118 - not a dict
            return {name: file.get_slice(name)[begin:end].clone() for name in names}


# Labels ---------------------------------------------------------------------------------------------------------------


@dataclass
class DrawnSiblings:
    """Candidates `tokens` `[..., n]` of one position, drawn without replacement: the distribution `[..., vocab]` of
    each draw, `mass` `[..., n]`, q of the earlier siblings, and `valid` `[..., n]`, whether q had a token left."""

    tokens: Tensor
    drawn_from: list[Tensor]
    mass: Tensor
    valid: Tensor


def draw_siblings(q: Tensor, n: int, generator: torch.Generator | None = None, greedy: bool = False) -> DrawnSiblings:
    """Draw n siblings from q `[..., vocab]` without replacement (DySpec, Algorithm 1); greedy: the n likeliest."""
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


def acceptance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y) / q(y)), `[...]`: the probability that candidate y, `token` `[...]`, is accepted; 0 for NaN."""
    p_of, q_of = (probs.gather(-1, token[..., None])[..., 0] for probs in (p, q))
    return (p_of / q_of).clamp_max(1.0).nan_to_num(0.0)


def sibling_labels(p: Tensor, drawn_from: list[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and weights of siblings `tokens` `[..., n]`, which were drawn from the n distributions `drawn_from`.

    Returns:
        The probability `[..., n]` that the verifier accepts a sibling after rejecting all earlier ones (DySpec,
        Algorithm 3), and the probability `[..., n]` that the sibling is tested at all, 1 for the first. The latter is
        the example's weight: without weights, rarely tested siblings would count as much as the first.
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
    """The paper's loss, 0-d: - Σ [P log P̂ + w_rej (1 - P) log(1 - P̂)] / [w_rej Σ (1 - P) + Σ P].

    `label`: P, between 0 and 1; `mask`: bool, or weights of the candidates (`sibling_labels`), which may all be 0."""
    weight = mask.to(log_odds.dtype)
    accept, reject = weight * label, weight * rejection_weight * (1.0 - label)
    loss = -(accept * F.logsigmoid(log_odds) + reject * F.logsigmoid(-log_odds)).sum()
    return loss / (accept + reject).sum().clamp_min(torch.finfo(log_odds.dtype).tiny)
