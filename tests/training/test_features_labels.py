"""Labels against the verifier that they predict: exact enumeration, no sampling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.enumeration.exact_distribution import Replay, Tokens, exact_distribution, worst_error
from support.files.repos import WORDS, tokenizer
from support.targets.models import VOCAB_SIZE, tiny
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp.texts.sampling import Sampling, point_mass
from hf_specdecpp.training.features import acceptance, draw_siblings, sibling_labels, weighted_bce
from hf_specdecpp.training.models import always_kept, choose_vocab, covered_mass

VOCAB = 4


def p_and_q(seed: int, shape: tuple[int, ...] = (VOCAB,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


def remaining(q: Tensor, drawn: list[int]) -> Tensor:
    """q without what was drawn, renormalised."""
    left = q.clone()
    left[drawn] = 0.0
    return left / left.sum()


def emitted_by_labels(labels: Callable[..., Any], p: Tensor, q: Tensor, n: int) -> Callable[[Replay], Tokens]:
    """Draw n siblings, accept each with its label once reached, else emit from what the rejections left of p."""

    def program(replay: Replay) -> Tokens:
        drawn: list[int] = []
        for _ in range(n):
            drawn.append(int(replay.categorical(remaining(q, drawn))))
        each = [remaining(q, drawn[:j]) for j in range(n)]
        label, _ = labels(p, each, torch.tensor(drawn))
        left = p
        for token, each_q, chance in zip(drawn, each, label.tolist(), strict=True):
            if replay.bernoulli(chance):
                return (token,)
            rest = (left - each_q).clamp_min(0.0)
            left = rest / rest.sum() if float(rest.sum()) > 0 else left
        return (int(replay.categorical(left)),)

    return program


def stale_q(p: Tensor, each: list[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    return sibling_labels(p, [each[0]] * len(each), tokens)


def no_residual(p: Tensor, each: list[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    label = torch.stack([acceptance(p, each_q, token) for each_q, token in zip(each, tokens, strict=True)])
    return label, label


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_accepting_siblings_with_their_labels_emits_exactly_p(seed: int, n: int) -> None:
    p, q = p_and_q(seed)
    assert worst_error(exact_distribution(emitted_by_labels(sibling_labels, p, q, n)), lambda _: p, VOCAB) < 1e-12


@pytest.mark.parametrize("mutant", [stale_q, no_residual])
def test_wrong_labels_do_not(mutant: Callable[..., Any]) -> None:
    errors = []
    for seed in range(5):
        p, q = p_and_q(seed)
        emitted = exact_distribution(emitted_by_labels(mutant, p, q, 2))
        errors.append(worst_error(emitted, lambda _, p=p: p, VOCAB))  # type: ignore[misc]
    assert max(errors) > 1e-3


def test_siblings_are_distinct_and_know_what_they_were_drawn_from() -> None:
    _, q = p_and_q(1, (50, VOCAB))
    drawn = draw_siblings(q, VOCAB, torch.Generator().manual_seed(0))
    assert drawn.valid.all()
    assert_close(drawn.tokens.sort(-1).values, torch.arange(VOCAB).expand(50, VOCAB))
    for row in range(50):
        for j in range(VOCAB):
            before = drawn.tokens[row, :j].tolist()
            assert_close(drawn.drawn_from[j][row], remaining(q[row], before))
            assert_close(drawn.mass[row, j], q[row, before].sum())


def test_a_distribution_that_runs_out_of_tokens_says_so() -> None:
    drawn = draw_siblings(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]), 3, torch.Generator().manual_seed(0))
    assert drawn.valid.tolist() == [[True, False, False], [True, True, False]]


def test_greedy_siblings_are_the_likeliest_tokens_and_accepted_if_the_target_takes_them() -> None:
    sampling = Sampling(temperature=0.0, top_k=2)  # no top-k in greedy decoding
    p, q = sampling.p(torch.tensor([[0.0, 3.0, 1.0, 2.0]])), sampling.q(torch.tensor([[5.0, 4.0, 3.0, 2.0]]))
    assert p.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert bool((q > 0).all())
    drawn = draw_siblings(q, 3, greedy=True)
    assert drawn.tokens.tolist() == [[0, 1, 2]]
    pairs = zip(drawn.drawn_from, drawn.tokens.unbind(-1), strict=True)
    each = [sampling.drawn_from(each_q, token) for each_q, token in pairs]
    assert_close(each[1], point_mass(torch.tensor([1]), q))
    label, reach = sibling_labels(p, each, drawn.tokens)
    assert (label.tolist(), reach.tolist()) == ([[0.0, 1.0, 0.0]], [[1.0, 1.0, 0.0]])


def test_temperature_and_top_k_come_in_the_order_of_generate() -> None:
    q = Sampling(temperature=0.5, top_k=2).q(torch.tensor([[1.0, 2.0, 3.0]]))
    assert_close(q, torch.tensor([[float("-inf"), 4.0, 6.0]]).softmax(-1))


def test_weighted_bce_takes_weights_and_can_be_empty() -> None:
    z, label = torch.tensor([0.3, -0.2]), torch.tensor([0.4, 0.9])
    first = weighted_bce(z, label, 6.0, torch.tensor([True, False]))
    assert_close(first, weighted_bce(z[:1], label[:1], 6.0, torch.tensor([0.5])))
    assert float(weighted_bce(z, label, 6.0, torch.zeros(2))) == 0.0


# The draft vocabulary: the tokens that the target writes most, and those that end its texts. --------------------------


TEMPLATE = "{% for m in messages %}<start>{{ m.content }}<stop>{% endfor %}"


def answers(*texts: list[int], prompt: int = 2) -> Dataset:
    """Answers after a prompt of 40s, which must not count."""
    return Dataset.from_list([{"input_ids": [40] * prompt + text, "prompt_length": prompt} for text in texts])


PROMPTS = [[11, 12, 12], [12, 13, 13, 8]]


@pytest.mark.parametrize(("written", "size", "always", "prompts", "chosen"), [
    ([[7, 7, 7, 3], [5, 5, 3, 9]], 4, [30], [], [3, 5, 7, 30]),  # ascending, with what is always kept; 9 is rarer
    ([[9, 8, 7, 6]], 3, [1], [], [1, 6, 7]),  # equally frequent ones go by id
    ([[19, 18, 19]], 6, [1], [], [0, 1, 2, 3, 18, 19]),  # few texts are filled up with low ids, which are frequent
    ([[9, 8, 9]], 5, [1], PROMPTS, [1, 8, 9, 12, 13]),  # before that with tokens of the prompts
    ([[9, 8, 9]], 2, [1], PROMPTS, [1, 9]),  # after the answers
    ([[60, 60, 60, 5, 6, 6]], 3, [1, 61], [], [1, 5, 6]),  # without ids that the draft lacks
])  # fmt: skip
def test_chosen_tokens(
    written: list[list[int]], size: int, always: list[int], prompts: list[list[int]], chosen: list[int]
) -> None:
    assert choose_vocab(answers(*written), size, always, VOCAB_SIZE, prompts).tolist() == chosen


def test_covered_mass() -> None:
    chosen = torch.tensor([3, 5, 7, 30])
    assert covered_mass(chosen, answers([7, 7, 7, 3], [5, 5, 3, 9])) == 7 / 8
    assert covered_mass(chosen, answers([9, 41, 7, 7])) == 1 / 2, "also on tokens that were not counted"


@pytest.mark.parametrize("size", [1, 2, VOCAB_SIZE, -1])
def test_size_that_makes_no_sense(size: int) -> None:
    with pytest.raises(ValueError, match=rf"draft_vocab_size={size} must be over 2 .* and under {VOCAB_SIZE}"):
        choose_vocab(answers([5, 6]), size, always=[1, 2], num_ids=VOCAB_SIZE)


def test_ends_of_texts_are_kept(tmp_path: Path) -> None:
    target = tiny("llama", eos_token_id=3)
    target.generation_config.eos_token_id = [3, 4]
    assert always_kept(target) == [3, 4]
    words = tokenizer([*WORDS[:-4], "x", "<start>", "<stop>", "<other>"])
    words.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>", "<other>"]})
    words.eos_token = "w5"
    words.chat_template = TEMPLATE
    words.save_pretrained(tmp_path)
    target.config._name_or_path = str(tmp_path)
    start = VOCAB_SIZE - 3
    assert always_kept(target) == [3, 4, 5, start, start + 1], "the chat's own tokens, but not every special one"
