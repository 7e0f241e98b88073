"""Real `generate()` with real random numbers: the joint distribution of the first tokens against that of the target.

The exact distributions are tested elsewhere, with enumerated randomness. This adds what they replace: torch's
generators. The seeds are fixed, so a p-value is the same in every run."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.targets.models import partly_agreeing, tiny
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation import output_text as rounds_verification
from hf_specdecpp.trees import verification

VOCAB = 12
TEMPERATURE, TOP_K = 0.8, 3
COUNTED = 3  # tokens; a fourth is generated so that the attached loop drafts two candidates in its first round
PROMPT, SUSPICIOUS = torch.tensor([[1, 5, 9, 2]]), 1e-4


def make_target() -> Any:
    return tiny("llama", seed=3, vocab_size=VOCAB, num_hidden_layers=1)


def make_assistant(target: PreTrainedModel, attached: bool) -> SpecDecPPAssistant:
    # An adaptive rule: rounds of different lengths. An untrained draft: many rejections.
    speculation = SpeculationConfig(rule="threshold", threshold=0.6, max_tokens=3)
    draft = partly_agreeing(target, mix=0.7)
    return SpecDecPPAssistant.from_draft(draft, target if attached else None, speculation=speculation)


@torch.no_grad()
def joint_distribution(target: Any) -> dict[tuple[int, ...], float]:
    """Probability of every text of `COUNTED` tokens that top-k leaves possible."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(COUNTED):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in distribution.items():
            ids = torch.cat((PROMPT, torch.tensor([text], dtype=torch.long)), dim=1)
            top = (target(ids).logits[0, -1] / TEMPERATURE).topk(TOP_K)
            for token, share in zip(top.indices.tolist(), top.values.softmax(dim=-1).tolist(), strict=True):
                longer[(*text, token)] = weight * share
        distribution = longer
    return distribution


class Unchanging(LogitsProcessor):
    """A user's own: it may count its calls, so that the loop verifies one candidate after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def sample(target: Any, number: int, assistant: Any = None, **settings: Any) -> Counter[tuple[int, ...]]:
    torch.manual_seed(0)
    settings |= {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(number):
        output = target.generate(PROMPT, assistant_model=assistant, max_new_tokens=COUNTED + 1, **settings)
        counts[tuple(output[0, PROMPT.shape[1] :][:COUNTED].tolist())] += 1
    return counts


def p_value(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square test. Texts that are expected fewer than five times count as one."""
    if not set(counts) <= set(distribution):
        return 0.0  # a text that the target cannot write
    number = sum(counts.values())
    rare = {text for text, weight in distribution.items() if weight * number < 5.0}
    cells = [(counts[text], weight * number) for text, weight in distribution.items() if text not in rare]
    if rare:
        cells.append((sum(counts[text] for text in rare), sum(distribution[text] for text in rare) * number))
    assert len(cells) >= 8
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2.0, dtype=torch.float64)))


@pytest.mark.daily("attached-400", takes=6)
@pytest.mark.parametrize(("kind", "number"), [
    *((kind, 400) for kind in ("attached", "attached, as on a device", "by a call")),
    pytest.param("attached, in order", 400, marks=pytest.mark.slow),
    *(pytest.param(kind, 2500, marks=pytest.mark.slow) for kind in ("plain", "attached")),
])  # fmt: skip
def test_the_texts_follow_the_target(kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "attached, as on a device":
        for module in (rounds_verification, verification):
            monkeypatch.setattr(module, "waits_for_reads", lambda device: True)
    target = make_target()
    processors = [Unchanging()] if kind == "attached, in order" else []
    assistant = None if kind == "plain" else make_assistant(target, kind != "by a call")
    counts = sample(target, number, assistant, logits_processor=processors)
    assert p_value(counts, joint_distribution(target)) > SUSPICIOUS


def accepts_everything(candidates: list[int], p: Tensor, q: Tensor, randomness: Any, *_: str) -> tuple[int, int]:
    return len(candidates), int(randomness.categorical(p[-1]))


def resamples_from_p(candidates: list[int], p: Tensor, q: Tensor, randomness: Any, *_: str) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "leftovers", lambda carries, p_rows, q_rows: p_rows)
        return verification.verify_sampled(candidates, p, q, randomness, "token")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [accepts_everything, resamples_from_p])
def test_a_wrong_verifier_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr(rounds_verification, "verify_sampled", mutant)
    counts = sample(target, 400, make_assistant(target, attached=True))
    assert p_value(counts, joint_distribution(target)) < SUSPICIOUS
