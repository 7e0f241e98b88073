"""Chains drafted at places of the held-out texts, with the chance that the verifier accepts each candidate.

Features (`features.py`) are all at the first position of a round. Calibration and evaluation need later positions, too,
and candidates after one that would be rejected. Chains begin at places spread over a text and are judged by
expectation, without coins: little noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import load_tensors
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, longest_text
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.texts.branches import Drawing, ReadText, draft_chains, target_probabilities, together
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.features import to_half
from hf_specdecpp.training.head import batch_log_odds
from hf_specdecpp.training.models import Trained, fingerprint
from hf_specdecpp.training.trainers import Record, joined, shards

FOLDER, RECORD = "chains", "chains.json"
MAX_TOKENS = 20  # candidates a chain, the paper's largest
STARTS = 12  # chains a text
MEASURED = 200  # texts, evenly spaced among the rollouts
TEXTS_PER_SHARD = 32


def record(made: Trained, split: str, sampling: Sampling) -> dict[str, Tensor]:
    """Rows of `Recorder.of_text` for rollouts of `split` that were written at the temperature of `sampling`, kept on
    disk; `ValueError` if there are no such rollouts, their answers are too short, or a shard is damaged."""
    config, texts = made.config, made.texts(split, sampling)
    folder = config.work / FOLDER / f"{split}-{sampling.temperature:g}"
    wanted = {"inputs": config.head.inputs, **sampling.to_dict(), "seed": config.seed, **fingerprint(config)}
    recorded = shards(
        Record(folder / RECORD, wanted, [folder]),
        sorted({round(i * (len(texts) - 1) / (MEASURED - 1)) for i in range(MEASURED)}),
        TEXTS_PER_SHARD,
        lambda rows: _shard(made, texts, rows, sampling),
        f"chains of {split} texts, temperature {sampling.temperature:g}",
    )
    rows = joined([part for part in map(load_tensors, recorded) if part])  # a shard of empty answers has no rows
    if not rows:
        raise ValueError(
            f"No chain could be drafted: the {len(texts)} answers of the {split} rollouts are shorter than two tokens. "
            "Write longer ones (rollouts.max_new_tokens)."
        )
    return rows


def _shard(made: Trained, texts: Any, rows: Iterable[int], sampling: Sampling) -> dict[str, Tensor]:
    seed, parts = made.config.seed * 1_000_003, []
    longest = min(made.drafter.max_length, longest_text(made.target))
    for row in rows:
        text = texts[row]
        last = min(len(text["input_ids"]), longest - MAX_TOKENS)
        # A round never begins right after the prompt: the first token comes from the target's pass over it.
        places = torch.arange(text["prompt_length"] + 1, max(last, text["prompt_length"] + 1))
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed + row))
        starts = sorted(places[order[:STARTS]].tolist())
        if starts:
            generator = torch.Generator().manual_seed(seed + row)
            recorder = Recorder(made.assistant, made.target, sampling, made.config.head.inputs)
            part = recorder.of_text(text["input_ids"], starts, generator)
            parts.append({"text": torch.full_like(part["start"], row), **part})
    return joined(parts)


@dataclass(frozen=True)
class Recorder:
    """Records the chains that a draft would propose at places of a text, with the state that a head `inputs`."""

    assistant: SpecDecPPAssistant
    target: CausalLM
    sampling: Sampling
    inputs: str

    def of_text(self, ids: list[int], starts: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Draft a chain after `ids[:start]` for every start.

        Args:
            ids: prompt and answer.
            starts: ascending, each at least 1.

        Returns:
            One row a candidate, in order: `start`, `index` in the chain, `token`, `hidden` `[rows, hidden_size]`,
            `scalars` `[rows, 6]`, `label`. A chain ends with the first token that ends a text.
        """
        drafter, sampling = self.assistant.ready_drafter(), self.sampling
        vocab_size = int(self.assistant.config.vocab_size or 0)
        text = ReadText.by(self.target, drafter, ids)
        drawing = Drawing(sampling.q, vocab_size, None if sampling.greedy else generator)
        reader, parts = Reader(self.target), []
        branching = [drafter.model] if drafter.blocks_after is None else []  # a block draft reads no candidates
        for group in together(starts, *branching, self.target):
            drafted = draft_chains(drafter, text, group, MAX_TOKENS, drawing)
            p = target_probabilities(reader, ids, group, drafted.tokens, sampling.p, vocab_size).to(drafter.device)
            q = torch.ones_like(p) if sampling.greedy else drafted.scalars[..., 0].exp()
            rows = {
                "start": drafted.starts[:, None].expand_as(p),
                "index": torch.arange(p.shape[1], device=p.device).expand_as(p),
                "token": drafted.tokens,
                "hidden": to_half(drafted.hidden[:, :-1] if self.inputs == "before" else drafted.hidden[:, 1:]),
                "scalars": drafted.scalars,
                "label": (p / q).clamp_max(1.0).float(),
            }
            ids_that_end = torch.tensor(sorted(eos_ids(self.target.generation_config)), device=p.device)
            ends = torch.isin(drafted.tokens, ids_that_end)
            drafted_at_all = ends.cumsum(1) - ends.long() == 0
            parts.append({name: value[drafted_at_all].cpu() for name, value in rows.items()})
        return joined(parts)


def head_estimates(head: AcceptanceHead, chains: dict[str, Tensor], drafter: Any) -> Tensor:
    """Log-odds `[rows]` of recorded candidates, calibration left out."""
    rows = {"hidden": chains["hidden"], "tokens": chains["token"][:, None]}
    if head.inputs == "before":
        rows["scalars"] = chains["scalars"][:, None]
    with torch.no_grad():
        parts = [
            batch_log_odds(head, {name: value[chunk] for name, value in rows.items()}, drafter)
            for chunk in torch.arange(len(chains["token"])).split(4096)
        ]
    return torch.cat(parts)[:, 0]
