"""Who said each token: compared with the rounds themselves, also where a text ends inside one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.families import informed_draft
from support.models import tiny
from support.repos import PROMPT, letter_tokenizer, tokenizer
from support.watchers import heard
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig, assist
from hf_specdecpp.terminal.listener import Listener, Token

MOST = 24
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each round accepted, as the generator itself is told."""
    counts: list[int] = []

    heard(monkeypatch, SpecDecPPCandidateGenerator, "saw", lambda _, tree, path, *rest: counts.append(len(path)))
    return counts


def by_rounds(accepted: Sequence[int], length: int) -> list[bool]:
    """Of each token, whether it was a candidate: the prompt's pass gives the first one."""
    flags = [False]
    for count in accepted:
        flags += [True] * count + [False]
    return flags[:length]


def generate(
    target: Any, assistant: Any = None, words: Any = None, **options: Any
) -> tuple[torch.Tensor, Listener, list[Token]]:
    listener, words = Listener(), words or tokenizer()
    options = {"max_new_tokens": MOST, "do_sample": False, **options}
    output = target.generate(PROMPT, assistant_model=assistant, streamer=listener, **options)
    stats = None if assistant is None else assistant.stats
    return output[0, PROMPT.shape[1] :], listener, listener.tokens(words, stats)


def informed(target: Any, speculation: SpeculationConfig) -> SpecDecPPAssistant:
    plain = target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)
    return SpecDecPPAssistant.from_draft(informed_draft(plain, 48), target, speculation=speculation)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_candidates_are_those_of_the_rounds(speculation: SpeculationConfig, sample: bool, accepted: list[int]) -> None:
    target = tiny("llama")
    torch.manual_seed(0)
    tokens, _, said = generate(target, informed(target, speculation), do_sample=sample)
    assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
    assert 0 < sum(each.accepted for each in said) < len(said)
    assert "".join(each.text for each in said) == tokenizer().decode(tokens, skip_special_tokens=True)


def test_candidates_that_were_looked_up(accepted: list[int]) -> None:
    target = tiny("llama")
    tokens, _, said = generate(target, assist(target, "lookup", default=False, rule="fixed"), max_new_tokens=80)
    assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
    assert any(each.accepted for each in said)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_text_may_end_with_a_candidate(speculation: SpeculationConfig, accepted: list[int]) -> None:
    """At some of these ends the last token is a candidate, at others the target's own. The mutant, which does not ask
    the counts, takes it for the target's at all of them."""
    target = tiny("llama")
    plain = target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    last, mutants = [], 0
    for end in sorted({plain.index(token) for token in plain}):
        assistant = informed(target, speculation)
        accepted.clear()
        tokens, listener, said = generate(target, assistant, eos_token_id=plain[end], pad_token_id=0)
        assert tokens.tolist() == plain[: end + 1]
        assert [each.accepted for each in said] == by_rounds(accepted, end + 1)
        last.append(said[-1].accepted)
        mutants += listener.tokens(tokenizer()) != said
        assistant.detach()
    assert set(last) == {False, True}
    assert mutants == sum(last) > 0


def test_a_stop_string_inside_a_round(accepted: list[int]) -> None:
    target, words = tiny("llama"), letter_tokenizer()
    plain = words.decode(target.generate(PROMPT, max_new_tokens=MOST, do_sample=False)[0, PROMPT.shape[1] :])
    found = []
    for end in range(3, 16):
        accepted.clear()
        stop = {"stop_strings": [plain[end - 1 : end + 1]], "tokenizer": words}
        tokens, _, said = generate(target, informed(target, CHAIN), words, **stop)
        assert [each.accepted for each in said] == by_rounds(accepted, len(tokens))
        found.append(said[-1].accepted)
    assert set(found) == {False, True}


def test_plain_generation_is_the_targets_own() -> None:
    tokens, listener, said = generate(tiny("llama"))
    assert not any(each.accepted for each in said)
    assert len(said) == len(tokens) == len(listener.passes) == MOST


def test_seconds_are_those_of_the_passes() -> None:
    target = tiny("llama")
    _, listener, said = generate(target, informed(target, CHAIN))
    seconds = [each.seconds for each in said]
    assert seconds == sorted(seconds)
    assert min(seconds) > 0
    assert sorted(set(seconds)) == [at for at, _ in listener.passes]


def test_it_passes_everything_on() -> None:
    class Kept(Listener):
        ended = False

        def end(self) -> None:
            self.ended = True

    kept = Kept()
    listener = Listener(kept)
    tiny("llama").generate(PROMPT, max_new_tokens=5, do_sample=False, streamer=listener)
    assert [tokens for _, tokens in kept.passes] == [tokens for _, tokens in listener.passes]
    assert len(kept.passes) == 5
    assert kept.ended


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte a token, so that most characters take several."""
    inner = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["é日本 a🙂b", "plain", "  two\n\nlines\t", "no \ufffd at all"])
def test_characters_of_several_tokens(text: str) -> None:
    words, listener = byte_tokenizer(), Listener()
    listener.passes = [(float(place), [token]) for place, token in enumerate(words.encode(text))]
    said = listener.tokens(words)
    assert (len(said), "".join(each.text for each in said)) == (len(text.encode()), text)
    assert "\ufffd" in text or all(len(each.text) < 2 for each in said)
    half = Listener()
    half.passes = listener.passes[:1]  # of a text that is being written
    assert len(half.tokens(words)) == 1
