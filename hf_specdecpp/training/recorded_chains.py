"""Chains drafted in held-out answers, with the probability that the verifier accepts each candidate.

Features (`features.py`) are all at the first position of a round. Calibration and evaluation also need later positions,
and candidates after one that would be rejected. Each candidate is labelled with its probability of acceptance, not with
a random outcome, which reduces noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.caches.masks import tree_inputs
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.files import load_tensors
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, input_device, longest_text
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts.sampling import Sampling, draw_rows
from hf_specdecpp.training.features import to_half
from hf_specdecpp.training.head import batch_log_odds
from hf_specdecpp.training.models import Trained, fingerprint
from hf_specdecpp.training.trainers import Record, joined, shards
from hf_specdecpp.trees.attention import check_tree

FOLDER, RECORD = "chains", "chains.json"
MAX_TOKENS = 20  # candidates per chain, the paper's maximum
STARTS = 12  # chains per answer
MEASURED = 200  # answers, evenly spaced among the rollouts
TEXTS_PER_SHARD = 32
ROWS_AT_ONCE = 128  # candidates whose p or q [rows, vocab] are in memory at the same time


def record(made: Trained, split: str, sampling: Sampling) -> dict[str, Tensor]:
    """Return the rows of `Recorder.of_text` for up to 200 rollouts of `split` at the temperature of `sampling`, with
    `text`, the index of each row's rollout; cached in `work/chains`. `ValueError` if there are no such rollouts, their
    answers are too short, or a cached shard is damaged."""
    config, texts = made.config, made.texts(split, sampling)
    folder = config.work / FOLDER / f"{split}-{sampling.temperature:g}"
    wanted = {"inputs": config.head.inputs, **asdict(sampling), "seed": config.seed, **fingerprint(config)}
    recorded = shards(
        Record(folder / RECORD, wanted, [folder]),
        sorted({round(i * (len(texts) - 1) / (MEASURED - 1)) for i in range(MEASURED)}),
        TEXTS_PER_SHARD,
        lambda row: _of_row(made, texts, row, sampling),
        f"chains of {split} texts, temperature {sampling.temperature:g}",
    )
    rows = joined([part for part in map(load_tensors, recorded) if part])  # a shard of empty answers has no rows
    if not rows:
        raise ValueError(
            f"No chain could be drafted: the {len(texts)} answers of the {split} rollouts are shorter than two tokens. "
            "Write longer ones (rollouts.max_new_tokens)."
        )
    return rows


def _of_row(made: Trained, texts: Any, row: int, sampling: Sampling) -> dict[str, Tensor]:
    """The rows of one rollout; empty if its answer is too short for a chain."""
    text, seed = texts[row], made.config.seed * 1_000_003 + row
    last = min(len(text["input_ids"]), min(made.drafter.max_length, longest_text(made.target)) - MAX_TOKENS)
    # A round never begins right after the prompt: the first token comes from the target's pass over it.
    places = torch.arange(text["prompt_length"] + 1, max(last, text["prompt_length"] + 1))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    if not len(places):
        return {}
    recorder = Recorder(made.assistant, made.target, sampling, made.config.head.inputs)
    starts, generator = sorted(places[order[:STARTS]].tolist()), torch.Generator().manual_seed(seed)
    rows = recorder.of_text(text["input_ids"], starts, generator)
    return {"text": torch.full_like(rows["start"], row), **rows}


@dataclass(frozen=True)
class Recorder:
    """Records the chains that a draft proposes at positions of a sequence. `inputs` is that of `HeadConfig`."""

    assistant: SpecDecPPAssistant
    target: CausalLM
    sampling: Sampling
    inputs: str

    def of_text(self, ids: list[int], starts: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Draft a chain after `ids[:start]` for every start (ascending, at least 1), up to an end-of-sequence token.

        Returns one row per candidate, chain after chain: `start`, `index` in the chain, `token`, `hidden` `[rows,
        hidden_size]`, the draft's state that a head with `inputs` reads, `scalars` `[rows, 6]`, and `label`, the
        probability that the candidate is accepted."""
        drafter = self.assistant.ready_drafter()
        states = target_states(self.target, drafter, ids)
        drawing = Drawing(self.sampling, int(self.assistant.config.vocab_size or 0), generator)
        reader, parts = Drafter(self.target, shares_target=True), []
        branching = [drafter.model] if drafter.blocks_after is None else []  # a block draft reads no candidates
        for group in together(starts, *branching, self.target):
            drafted = draft_chains(drafter, ids, states, group, MAX_TOKENS, drawing)
            p = target_probabilities(reader, ids, group, drafted.tokens, drawing).to(drafter.device)
            q = torch.ones_like(p) if self.sampling.greedy else drafted.scalars[..., 0].exp()
            rows = {
                "start": group.to(p.device)[:, None].expand_as(p),
                "index": torch.arange(p.shape[1], device=p.device).expand_as(p),
                "token": drafted.tokens,
                "hidden": to_half(drafted.hidden[:, 1:] if self.inputs == "after" else drafted.hidden[:, :-1]),
                "scalars": drafted.scalars,
                "label": (p / q).clamp_max(1.0).float(),
            }
            ids_that_end = torch.tensor(sorted(eos_ids(self.target.generation_config)), device=p.device)
            ends = torch.isin(drafted.tokens, ids_that_end)
            drafted_at_all = ends.cumsum(1) - ends.long() == 0
            parts.append({name: value[drafted_at_all].cpu() for name, value in rows.items()})
        return joined(parts)


def head_estimates(head: AcceptanceHead, chains: dict[str, Tensor], drafter: Any) -> Tensor:
    """Return the head's uncalibrated log-odds `[rows]` of recorded candidates."""
    rows = {"hidden": chains["hidden"], "tokens": chains["token"][:, None]}
    if head.inputs == "before":
        rows["scalars"] = chains["scalars"][:, None]
    with torch.no_grad():
        parts = [
            batch_log_odds(head, {name: value[chunk] for name, value in rows.items()}, drafter)
            for chunk in torch.arange(len(chains["token"])).split(4096)
        ]
    return torch.cat(parts)[:, 0]


# Chains that branch off a text ----------------------------------------------------------------------------------------
#
# The sequence and the chains form one token tree (`caches/masks.py`): each draft pass reads one level of all chains,
# and one target pass reads all chains. For example, with `ids` of 10 tokens, `starts` 4 and 7 and `length` 3, the draft
# reads the first 7 tokens once, and then two candidates per pass, at depths 0, 1 and 2 of both chains. A candidate of
# the first chain attends to the tokens 0 to 3 and to the earlier candidates of its own chain.


@dataclass
class DraftedChains:
    """c chains of k candidates each in one sequence."""

    tokens: Tensor  # `[c, k]`, the candidates
    scalars: Tensor  # `[c, k, 6]`, `scalar_features` of each candidate
    hidden: Tensor  # `[c, k + 1, hidden_size]`, the draft's state before each candidate, and at the last one


@dataclass(frozen=True)
class Drawing:
    """Draws candidates from a draft's hidden states."""

    sampling: Sampling
    vocab_size: int  # of the target
    generator: torch.Generator | None = None  # not used by greedy sampling

    def candidates(self, drafter: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a candidate for each state `[n, hidden_size]`: tokens `[n]`, and their `scalar_features` `[n, 6]`."""
        tokens, scalars, greedy = [], [], self.sampling.greedy
        for rows in states.split(ROWS_AT_ONCE):
            q = self.sampling.q(drafter.logits(rows, self.vocab_size))
            tokens.append(q.argmax(-1) if greedy else draw_rows(q, self.generator))
            scalars.append(scalar_features(q, tokens[-1], greedy=greedy))
        return torch.cat(tokens), torch.cat(scalars)


def together(starts: Sequence[int] | Tensor, *models: CausalLM) -> Sequence[Tensor]:
    """Group the starts whose chains can be read in one pass: all of them, or single ones if a model reads no trees."""
    starts = torch.as_tensor(starts, dtype=torch.long)
    try:
        for model in models:
            check_tree(model)
    except ValueError:
        return starts.split(1)
    return (starts,)


@torch.no_grad()
def draft_chains(
    drafter: Any, ids: list[int], states: Tensor | None, starts: Tensor, length: int, drawing: Drawing
) -> DraftedChains:
    """Draft `length` candidates after `ids[:start]` for every start, also after an end-of-sequence token.

    A block draft proposes at most one block, and has no state at its last candidate: `hidden` repeats the state before.

    Args:
        states: the target's states `[1, n, width]` along `ids` (`target_states`), or `None`.
        starts: `[c]` int64, ascending, at least 1, or 2 for a block draft; one group of `together`.
    """
    count, device = len(starts), drafter.device
    starts = starts.to(device)
    if drafter.blocks_after is not None:
        read: Any = states
        given = torch.tensor(ids, device=device)
        blocks = drafter.blocks_after(given[None], read.to(device), starts[None] - 1)[0, :, :length]
        token, memory, drawn = given[starts - 1], blocks.new_zeros((count, drafter.memory_size)), []
        for rows in blocks.unbind(1):
            _, state, memory = drafter.after(token, rows.new_zeros(()), rows, memory)
            token, row = drawing.candidates(drafter, state)
            drawn.append((token, row, state))
        drawn.append((token, row, state))
        candidates, features, along = (torch.stack(parts, 1) for parts in zip(*drawn, strict=True))
        return DraftedChains(candidates[:, :-1], features[:, :-1], along)
    branching = BranchingText(drafter, ids[: int(starts[-1])], states)
    hidden, tokens, scalars = [branching.states[starts - 1]], [], []
    one_level = torch.eye(count, dtype=torch.bool, device=device)
    for depth in range(length):
        token, row = drawing.candidates(drafter, hidden[-1])
        tokens.append(token)
        scalars.append(row)
        below = one_level.repeat(1, depth + 1)
        depths = (starts + torch.arange(depth + 1, device=device)[:, None]).flatten()
        hidden.append(branching.read(token, starts, below, depths, None if states is None else hidden[-1]))
    return DraftedChains(torch.stack(tokens, 1), torch.stack(scalars, 1), torch.stack(hidden, 1))


@torch.no_grad()
def target_states(target: CausalLM, drafter: Draft, ids: list[int]) -> Tensor | None:
    """The target's states `[1, n, width]` that the draft reads along `ids`; `None` for a draft that reads none."""
    if drafter.reads is None:
        return None
    # Outside the hooks below: the constructor runs a pass over one token.
    reader = Drafter(target, shares_target=True)
    with TargetStates(target, drafter.reads) as caught:
        reader.hidden_states(torch.tensor([ids], device=input_device(target)))
        return caught.states_of()


@torch.no_grad()
def target_probabilities(reader: Drafter, ids: list[int], starts: Tensor, tokens: Tensor, drawing: Drawing) -> Tensor:
    """Return p `[c, k]` of each candidate in `tokens` `[c, k]`, given the earlier candidates of its chain. `reader`
    runs the target; `ids` and `starts` are as in `draft_chains`."""
    device = reader.device
    starts, tokens = starts.to(device), tokens.to(device)
    text = BranchingText(reader, ids[: int(starts[-1])])
    count, inner = len(starts), tokens.shape[1] - 1
    before = text.states[starts - 1][:, None]
    if inner:
        below = torch.ones((inner, inner), dtype=torch.bool, device=device).tril()
        below = torch.block_diag(*[below] * count).bool()
        depths = (starts[:, None] + torch.arange(inner, device=device)).flatten()
        states = text.read(tokens[:, :-1].flatten(), starts.repeat_interleave(inner), below, depths)
        before = torch.cat((before, states.view(count, inner, -1)), dim=1)
    rows = zip(before.flatten(0, 1).split(ROWS_AT_ONCE), tokens.flatten().split(ROWS_AT_ONCE), strict=True)
    p_of, size = drawing.sampling.p, drawing.vocab_size
    p = [p_of(reader.logits(states, size)).gather(-1, token[:, None])[:, 0] for states, token in rows]
    return torch.cat(p).view(count, inner + 1)


class BranchingText:
    """A sequence in a model's cache, and passes over nodes that branch off it. The attribute `states` has the model's
    last hidden states along the sequence, `[length, hidden_size]`.

    A conditioned draft takes the target's `states`, `[1, length or more, width]`, and cannot read the first token."""

    def __init__(self, reader: Drafter, ids: list[int], states: Tensor | None = None) -> None:
        self.reader, self.length, self.first = reader, len(ids), int(states is not None)
        self.cache = DynamicCache(config=reader.text_config)
        self.cache.activate_past_recording()  # sliding windows must not drop tokens that earlier branches attend to
        conditions: dict[str, Any] = {} if states is None else {"states": states[:, : len(ids) - 1].to(reader.device)}
        tokens = torch.tensor([ids[self.first :]], device=reader.device)
        hidden = reader.hidden_states(tokens, self.cache, **conditions)[0]
        self.states = functional.pad(hidden, (0, 0, self.first, 0))

    def read(
        self, tokens: Tensor, starts: Tensor, below: Tensor, depths: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """Read n more nodes, and return their hidden states `[n, hidden_size]`.

        Args:
            tokens: `[n]`, the nodes' tokens.
            starts: `[n]`, how many tokens of the sequence each node attends to.
            below: bool `[n, read + n]`: which of the `read` nodes of earlier calls, and of these n, a node attends to.
            depths: `[read + n]`, the positions of the same nodes in the sequence.
            states: `[n, hidden_size]`, a conditioned draft's own state before each node.
        """
        inputs: dict[str, Any] = {} if states is None else {"states": states[None]}
        text = torch.arange(self.first, self.length, device=tokens.device)
        if int(starts[0]) < self.length or len(starts.unique()) > 1:  # otherwise the nodes need no tree mask
            ancestors = torch.cat((text < starts[:, None], below), dim=1)
            places = torch.cat((text, depths)) - self.first
            inputs |= tree_inputs(self.reader.model, self.cache, ancestors, places, num_prefix=0)
        return self.reader.hidden_states(tokens[None], self.cache, **inputs)[0]
