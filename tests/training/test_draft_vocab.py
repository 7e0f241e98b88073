"""The draft vocabulary: the tokens that the target writes most, and those that end its texts."""

from pathlib import Path

import pytest
from datasets import Dataset
from support.models import VOCAB_SIZE, tiny
from support.repos import WORDS, tokenizer

from hf_specdecpp.training.models import always_kept, choose_vocab, covered_mass

TEMPLATE = "{% for m in messages %}<start>{{ m.content }}<stop>{% endfor %}"


def answers(*texts: list[int], prompt: int = 2) -> Dataset:
    """Answers after a prompt of 40s, which must not count."""
    return Dataset.from_list([{"input_ids": [40] * prompt + text, "prompt_length": prompt} for text in texts])


def test_most_frequent() -> None:
    written = answers([7, 7, 7, 3], [5, 5, 3, 9])
    chosen = choose_vocab(written, 4, always=[30], num_ids=VOCAB_SIZE)
    assert chosen.tolist() == [3, 5, 7, 30], "ascending, with what is always kept; 9 is rarer"
    assert covered_mass(chosen, written) == 7 / 8
    assert covered_mass(chosen, answers([9, 41, 7, 7])) == 1 / 2, "also on tokens that were not counted"


def test_equally_frequent_go_by_id() -> None:
    assert choose_vocab(answers([9, 8, 7, 6]), 3, always=[1], num_ids=VOCAB_SIZE).tolist() == [1, 6, 7]


def test_few_texts_are_filled_up_with_low_ids() -> None:
    """Tokenizers number their tokens by frequency: better than leaving places empty."""
    assert choose_vocab(answers([19, 18, 19]), 6, always=[1], num_ids=VOCAB_SIZE).tolist() == [0, 1, 2, 3, 18, 19]


def test_places_that_are_left_go_to_the_prompts() -> None:
    prompts = [[11, 12, 12], [12, 13, 13, 8]]
    assert choose_vocab(answers([9, 8, 9]), 5, [1], VOCAB_SIZE, prompts).tolist() == [1, 8, 9, 12, 13]
    assert choose_vocab(answers([9, 8, 9]), 2, [1], VOCAB_SIZE, prompts).tolist() == [1, 9], "answers come first"


def test_ids_that_the_draft_lacks() -> None:
    chosen = choose_vocab(answers([60, 60, 60, 5, 6, 6]), 3, always=[1, 61], num_ids=VOCAB_SIZE)
    assert chosen.tolist() == [1, 5, 6]


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
    words.eos_token = "w5"  # noqa: S105
    words.chat_template = TEMPLATE
    words.save_pretrained(tmp_path)
    target.config._name_or_path = str(tmp_path)
    start = VOCAB_SIZE - 3
    assert always_kept(target) == [3, 4, 5, start, start + 1], "the chat's own tokens, but not every special one"
