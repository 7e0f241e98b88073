"""Chains drafted at places of the held-out texts, with the chance that the verifier accepts each candidate.

Teacher-forced features (`features.py`) are all at the first position of a round. Calibration and evaluation need later
positions too, and the candidates after one that would be rejected: what a stopping rule sees when it has to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from hf_specdecpp.acceptance import AcceptanceHead, DraftStep, scalar_features
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.candidate_generator import eos_ids
from hf_specdecpp.chain import Chain, draft_chain
from hf_specdecpp.drafter import LEARNED_POSITIONS, Drafter, DraftSession
from hf_specdecpp.processing import Processing
from hf_specdecpp.repository import load_tensors, save_tensors
from hf_specdecpp.stopping import FixedLength
from hf_specdecpp.training import rollouts
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.features import cache_folder, to_half
from hf_specdecpp.training.head_fitting import batch_log_odds
from hf_specdecpp.training.labels import sampled_label
from hf_specdecpp.training.models import fingerprint
from hf_specdecpp.training.sampling import Sampling
from hf_specdecpp.typing import CausalLM

MAX_TOKENS = 20  # candidates a chain, the paper's largest
STARTS = 6  # chains a text
MEASURED = 200  # texts, evenly spaced among the rollouts: a candidate costs a draft pass of its own
TEXTS_PER_SHARD = 32


def record(
    config: TrainingConfig, split: str, assistant: SpecDecPPAssistant, target: CausalLM, sampling: Sampling
) -> dict[str, Tensor]:
    """Rows of `chains_of_text` for rollouts of `split`, cached in `work/chains` like features; `text` is their number.

    Raises:
        ValueError: there are no rollouts, their answers are too short, or a shard is damaged.
    """
    texts = rollouts.load(config.work, split)
    wanted = {"inputs": config.head.inputs, **sampling.to_dict(), "seed": config.seed, **fingerprint(config)}
    folder = cache_folder(config.work / "chains", wanted)
    chosen = sorted({round(i * (len(texts) - 1) / (MEASURED - 1)) for i in range(MEASURED)})
    shards = []
    with logging.tqdm(total=len(chosen), desc=f"chains of {split} texts, temperature {sampling.temperature:g}") as bar:
        for start in range(0, len(chosen), TEXTS_PER_SHARD):
            rows = chosen[start : start + TEXTS_PER_SHARD]
            path = folder / f"{split}-{start // TEXTS_PER_SHARD:05d}.safetensors"
            if not path.is_file():
                save_tensors(_shard(config, texts, rows, assistant, target, sampling, bar), path)
            else:
                bar.update(len(rows))
            shards.append(path)
    parts = [part for part in map(load_tensors, shards) if part]  # a shard of empty answers has no rows
    if not parts:
        raise ValueError(
            f"No chain could be drafted: the {len(texts)} answers of the {split} rollouts are shorter than two tokens. "
            "Write longer ones (rollouts.max_new_tokens)."
        )
    return {field: torch.cat([part[field] for part in parts]) for field in parts[0]}


@torch.no_grad()
def chains_of_text(
    ids: list[int],
    starts: Sequence[int],
    assistant: SpecDecPPAssistant,
    target: CausalLM,
    sampling: Sampling,
    inputs: str,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Draft a chain after `ids[:start]` for every start, with the code that generation uses.

    Args:
        ids: prompt and answer.
        starts: ascending, each at least 1.
        inputs: which hidden state to keep, `AcceptanceHead.inputs`.

    Returns:
        One row a candidate, in order: `start`, `index` in the chain, `token`, `hidden` `[rows, hidden_size]`,
        `scalars` `[rows, 5]`, `label`.
    """
    drafter = assistant.ready_drafter()
    vocab_size = int(assistant.config.vocab_size or 0)
    session, reader = DraftSession(drafter, vocab_size), TargetReader(target, ids[: starts[0] - 1])
    eos, seen = eos_ids(target.generation_config), 0
    rows: list[dict[str, Tensor]] = []
    for start in starts:
        session.begin_round(torch.tensor([ids[seen:start]]), 0)
        chain, steps = _draft(session, sampling, generator, eos)
        seen = start
        tokens = torch.tensor(chain.tokens, device=drafter.device)
        q = torch.stack(chain.scores).softmax(-1)
        p = sampling.p(reader.read(ids[:start], chain.tokens)).to(q.device)
        states = torch.stack([step.hidden for step in steps])
        count = len(chain.tokens)
        rows.append(
            {
                "start": torch.full((count,), start),
                "index": torch.arange(count),
                "token": tokens,
                "hidden": to_half(states[:-1] if inputs == "before" else states[1:]),
                "scalars": scalar_features(q, tokens),
                "label": sampled_label(p, sampling.drawn_from(q, tokens), tokens).float(),
            }
        )
    return {name: torch.cat([row[name].cpu() for row in rows]) for name in rows[0]}


class TargetReader:
    """The target's logits after many prefixes of one text, each followed by candidates; reads every token once."""

    def __init__(self, target: CausalLM, prompt: list[int]) -> None:
        self.target, self.length = target, 0
        self.cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        if prompt:
            self._feed(prompt, 1)
        self.length = len(prompt)
        self.cache.activate_past_recording()

    def read(self, prefix: list[int], candidates: list[int]) -> Tensor:
        """Logits `[k, vocab]` for each of the k candidates after `prefix`, which grows from call to call."""
        new = prefix[self.length :]
        count = len(candidates)
        logits = self._feed(new + candidates[:-1], count)
        self.length = len(prefix)
        if count > 1:
            self.cache.crop(1 - count)
        return logits

    def _feed(self, tokens: list[int], kept: int) -> Tensor:
        options = {"logits_to_keep": kept} if self.target._supports_logits_to_keep() else {}
        ids = torch.tensor([tokens], device=self.target.device)
        return self.target(ids, past_key_values=self.cache, use_cache=True, **options).logits[0, -kept:]


def head_estimates(head: AcceptanceHead, chains: dict[str, Tensor], drafter: Drafter) -> Tensor:
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


class SeededRandomness:
    """Draws candidates from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.multinomial(probs, num_samples=1, generator=self.generator).squeeze(0)

    def bernoulli(self, probability: float) -> bool:
        return bool(torch.rand((), generator=self.generator, device=self.generator.device) < probability)


def _draft(
    session: DraftSession, sampling: Sampling, generator: torch.Generator, eos: frozenset[int]
) -> tuple[Chain, list[DraftStep]]:
    """A chain, and the draft's steps: one more than it has candidates."""
    processing = Processing(sampling.processors)
    no_text = torch.empty((1, 0), dtype=torch.long, device=session.drafter.device)
    steps: list[DraftStep] = []

    def step(candidates: list[int]) -> DraftStep:
        logits, hidden = session.step(candidates)
        steps.append(session.draft_step(len(candidates), processing.one(no_text, candidates, logits), hidden))
        return steps[-1]

    randomness = None if sampling.greedy else SeededRandomness(generator)
    chain = draft_chain(step, FixedLength(MAX_TOKENS), randomness, MAX_TOKENS, eos)
    step(chain.tokens)  # the state at the last candidate
    return chain, steps


def _shard(
    config: TrainingConfig, texts: Any, rows: Sequence[int], assistant: SpecDecPPAssistant, target: CausalLM,
    sampling: Sampling, bar: Any,
) -> dict[str, Tensor]:  # fmt: skip
    parts = []
    for row in rows:
        text = texts[row]
        bar.update()
        generator = torch.Generator(assistant.device).manual_seed(config.seed * 1_000_003 + row)
        last = min(len(text["input_ids"]), _longest(assistant.ready_drafter().model, target) - MAX_TOKENS)
        # A round never begins right after the prompt: the first token comes from the target's pass over it.
        places = torch.arange(text["prompt_length"] + 1, max(last, text["prompt_length"] + 1))
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(config.seed * 1_000_003 + row))
        starts = sorted(places[order[:STARTS]].tolist())
        if starts:
            part = chains_of_text(text["input_ids"], starts, assistant, target, sampling, config.head.inputs, generator)
            parts.append({"text": torch.full_like(part["start"], row), **part})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _longest(*models: CausalLM) -> int:
    """Most tokens that all of the models can read."""
    configs = [model.config.get_text_config(decoder=True) for model in models]
    return min([c.max_position_embeddings for c in configs if c.model_type in LEARNED_POSITIONS], default=1_000_000)
