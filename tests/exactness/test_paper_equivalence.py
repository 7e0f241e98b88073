"""The paper's loss and gradients, computed once more from its formulas (sections 3.2 and 3.3) with plain loops.

Frozen draft, tied blocks, w_rej = 6, 15 % token mixing. Only the random draws (the draft's tokens and which of them
are mixed in) are taken from the code under test; everything that follows from them is done again."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.targets.models import partly_agreeing, prompt, tiny
from torch import Tensor
from transformers import TrainingArguments

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import HeadConfig
from hf_specdecpp.training.features import Examples
from hf_specdecpp.training.head import HeadTrainer, collate

PAPER, PROMPT_LENGTH = HeadConfig(inputs="after", tied=True, num_blocks=3, rejection_weight=6.0), 6
TOLERANCE = 1e-5  # heads are float32
VISIBLE = 1e-3

Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def case() -> Any:
    """A target, a draft, a head, and features of two texts of different lengths."""
    target = tiny("llama")
    draft = partly_agreeing(target, 0.9)
    torch.manual_seed(0)
    head = AcceptanceHead(draft.config.hidden_size, 3, tied=True, inputs="after")
    texts, generator = [prompt(46, seed=1), prompt(38, seed=2)], torch.Generator().manual_seed(3)
    examples = Examples(PAPER, Drafter(draft), target)
    return target, draft, head, texts, [examples.of_text(ids, PROMPT_LENGTH, Sampling(), generator) for ids in texts]


def papers_loss(case: Any, w_rej: float = 6.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients from the formulas."""
    target, draft, head, texts, items = case
    weights = {name: value.detach().clone().requires_grad_() for name, value in head.named_parameters()}
    numerator, denominator = torch.zeros(()), 0.0
    for ids, item in zip(texts, items, strict=True):
        drawn, counts = item["tokens"][:, 0].tolist(), item["mask"][:, 0].tolist()
        x = ids[0].tolist()
        with torch.no_grad():
            p, q = target(ids).logits[0].softmax(-1), draft(ids).logits[0].softmax(-1)
            # Z_i = Y_i where it counts, X_i where it was mixed in; the prompt stays.
            answer = x[PROMPT_LENGTH:]
            z = x[:PROMPT_LENGTH] + [drawn[i] if counts[i] else answer[i] for i in range(len(answer))]
            states = draft(torch.tensor([z]), output_hidden_states=True).hidden_states[-1][0]
        for i, y in enumerate(drawn):
            if not counts[i]:
                continue
            place = PROMPT_LENGTH + i
            p_acc, e = min(1.0, float(p[place - 1, y]) / float(q[place - 1, y])), states[place].float()
            for _ in range(3):
                inner = weights["blocks.0.linear.weight"] @ e + weights["blocks.0.linear.bias"]
                e = e + inner / (1.0 + torch.exp(-inner))
            reject, accept = weights["output.weight"] @ e + weights["output.bias"]
            p_hat = torch.exp(accept) / (torch.exp(accept) + torch.exp(reject))
            numerator = numerator - p_acc * torch.log(p_hat) - w_rej * (1 - p_acc) * torch.log(1 - p_hat)
            denominator += w_rej * (1 - p_acc) + p_acc
    loss = numerator / denominator
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in weights.items() if value.grad is not None}


def our_loss(case: Any, folder: Path, options: HeadConfig = PAPER) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the Trainer on the padded batch of both texts."""
    _, draft, head, _, items = case
    arguments = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    trainer = HeadTrainer(model=head, args=arguments, options=options, drafter=Drafter(draft))
    head.zero_grad()
    loss = trainer.compute_loss(head, collate(items))
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in head.named_parameters()}


def distance(ours: tuple[Tensor, dict[str, Tensor]], paper: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Largest relative difference of the loss and of the gradients."""
    assert ours[1].keys() == paper[1].keys()
    loss = abs(float(ours[0] / paper[0]) - 1)
    return max(loss, *(float((ours[1][name] - grad).norm() / grad.norm()) for name, grad in paper[1].items()))


def test_loss_and_gradients_are_the_papers(case: Any, tmp_path: Path) -> None:
    ours, paper = our_loss(case, tmp_path), papers_loss(case)
    assert distance(ours, paper) < TOLERANCE
    assert len(paper[1]) == 4, "tied blocks: one weight matrix, one bias, and the last layer's two"


@pytest.mark.takes(3)
def test_the_drafts_tokens_are_drawn_from_q() -> None:
    """And not from p or greedily: the mean label is near sum min(p, q) over many draws. A share is mixed in."""
    target = tiny("llama")
    drafter, ids = Drafter(partly_agreeing(target, 0.9)), prompt(46, seed=1)
    generator = torch.Generator().manual_seed(0)

    def features(head: HeadConfig) -> Batch:
        return Examples(head, drafter, target).of_text(ids, 6, Sampling(), generator)

    drawn = [features(PAPER) for _ in range(100)]
    sampled = torch.stack([each["label"].mean() for each in drawn])
    with torch.no_grad():
        p, q = (model(ids).logits[0, 5:-1].softmax(-1) for model in (target, drafter.model))
    analytic = torch.minimum(p, q).sum(-1).mean()
    assert abs(float(sampled.mean() - analytic)) < 5 * float(sampled.std()) / math.sqrt(100)
    shares = [float((each["mask"] == 0).float().mean()) for each in drawn]  # 4000 coins
    assert sum(shares) / 100 == pytest.approx(0.15, abs=0.03)


def states_of_the_unmixed_text(item: Batch, draft: Any, ids: Tensor) -> Batch:
    with torch.no_grad():
        return {**item, "hidden": Drafter(draft).hidden_states(ids)[0, PROMPT_LENGTH:]}


def states_of_the_draft_text(item: Batch, draft: Any, ids: Tensor) -> Batch:
    text = torch.cat((ids[0, :PROMPT_LENGTH], item["tokens"][:, 0]))
    with torch.no_grad():
        return {**item, "hidden": Drafter(draft).hidden_states(text[None])[0, PROMPT_LENGTH:]}


FEATURES: dict[str, Callable[..., Batch]] = {
    "every position counts": lambda item, **_: {**item, "mask": torch.ones_like(item["mask"])},
    "labels of the next position": lambda item, **_: {**item, "label": item["label"].roll(-1, 0)},
    "labels of the position before": lambda item, **_: {**item, "label": item["label"].roll(1, 0)},
    "states that q came from": lambda item, **_: {**item, "hidden": item["hidden"].roll(1, 0)},
    "hard labels": lambda item, **_: {**item, "label": item["label"].round()},
    "states of the unmixed text": states_of_the_unmixed_text,
    "states of the draft text": states_of_the_draft_text,
}


@pytest.mark.parametrize("mutant", FEATURES)
def test_wrong_features_are_noticed(mutant: str, case: Any, tmp_path: Path) -> None:
    target, draft, head, texts, items = case
    wrong = [FEATURES[mutant](item, draft=draft, ids=ids) for item, ids in zip(items, texts, strict=True)]
    assert distance(our_loss((target, draft, head, texts, wrong), tmp_path), papers_loss(case)) > VISIBLE


def sum_without_normaliser(log_odds: Tensor, label: Tensor, w_rej: float, mask: Tensor) -> Tensor:
    return -(mask * (label * log_odds.sigmoid().log() + w_rej * (1 - label) * (-log_odds).sigmoid().log())).sum()


def mean_over_positions(log_odds: Tensor, label: Tensor, w_rej: float, mask: Tensor) -> Tensor:
    return sum_without_normaliser(log_odds, label, w_rej, mask) / mask.sum()


def no_rejection_weight(log_odds: Tensor, label: Tensor, w_rej: float, mask: Tensor) -> Tensor:
    return sum_without_normaliser(log_odds, label, 1.0, mask) / mask.sum()


def unmasked_normaliser(log_odds: Tensor, label: Tensor, w_rej: float, mask: Tensor) -> Tensor:
    return sum_without_normaliser(log_odds, label, w_rej, mask) / (w_rej * (1 - label) + label).sum()


@pytest.mark.parametrize(
    "mutant", [sum_without_normaliser, mean_over_positions, no_rejection_weight, unmasked_normaliser]
)
def test_wrong_losses_are_noticed(
    mutant: Callable[..., Tensor], case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_fitting, "weighted_bce", mutant)
    assert distance(our_loss(case, tmp_path), papers_loss(case)) > VISIBLE


def test_ignoring_the_rejection_weight_is_noticed(case: Any, tmp_path: Path) -> None:
    ours = our_loss(case, tmp_path, HeadConfig(**{**vars(PAPER), "rejection_weight": 1.0}))
    assert distance(ours, papers_loss(case)) > VISIBLE
    assert distance(ours, papers_loss(case, w_rej=1.0)) < TOLERANCE
