"""Processors, functions and criteria are asked what plain `generate()` asks, in that order."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from support.devices.pretend_graph import pretend_graphs
from support.devices.whole_rounds import TREE, batch
from support.targets.models import VOCAB_SIZE, assistant_for, assistant_of, prompt, quiet_later_layers, tiny
from support.targets.outputs import PROCESSORS, RECORDS, assert_same, only_neighbours
from support.targets.questions import (
    CAPTURED,
    PAD,
    TOYS,
    WAYS,
    Call,
    Counts,
    Matcher,
    Question,
    Trie,
    check,
    drawn,
    is_part,
    same,
)
from support.targets.watchers import unnoticed
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from hf_specdecpp.generation import refusals
from hf_specdecpp.generation.batch_target import InStep
from hf_specdecpp.generation.captured.entering import BETWEEN
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.output_text import OutputText, Walk
from hf_specdecpp.sampling import processors
from hf_specdecpp.sampling.processors import KNOWN, PREFIX_FREE, Processing, Warpers, for_row

FAST, SLOW = 10, 2000


@pytest.mark.daily("0", "1")
@pytest.mark.takes(2)
@pytest.mark.parametrize("part", range(4))
def test_questions_of_random_calls(part: int) -> None:
    assert sum(check(drawn(seed)) for seed in range(part * FAST, (part + 1) * FAST)) > 2 * FAST


@pytest.mark.takes(4)
def test_questions_of_random_captured_calls() -> None:
    assert sum(check(drawn(seed, captured=True)) for seed in range(10)) > 10


@pytest.mark.slow
def test_questions_of_many_random_calls() -> None:
    assert sum(check(drawn(seed, captured=seed % 10 == 0)) for seed in range(SLOW)) > 4 * SLOW


ENDS = {"eos_token_id": [3, 17, 29]}
EARLIER_MISTAKES: dict[str, Call] = {
    "a trie, lookups": Call("lookup", toy=Trie),
    "a trie, after the end": Call("chain", options=ENDS),
    "a trie as a processor": Call("tree", as_function=False, options=ENDS),
    "a function that counts": Call("chain", toy=Counts),
    "one that counts for all rows": Call("chain", toy=Counts, rows=3, lengths=(4, 9, 6), options=ENDS),
    "a state for each row": Call("lookup", toy=Matcher, rows=2, lengths=(9, 5)),
    "rows told apart": Call("threshold", as_function=False, is_marked=True, rows=3, lengths=(3, 8, 8), options=ENDS),
    "a marked trie behind a criterion": Call("chain", is_marked=True, criterion=True),
    "a criterion between the calls": Call("static tree", toy=None, criterion=True),
}


@pytest.mark.parametrize("name", EARLIER_MISTAKES)
def test_earlier_mistakes(name: str) -> None:
    for seed in range(4):
        check(replace(EARLIER_MISTAKES[name], seed=seed))


def test_rows_that_end_a_round_together_at_candidates() -> None:
    """Each has accepted all that was emitted, and drafts on after the last of it."""
    check(drawn(136, captured=False))


def rows_one_after_the_other(decoding: Any, rounds: Any) -> None:
    """Each row as far as it gets, by the row's own processors."""
    for each in rounds:
        each.text.processing = Processing([each.processor for each in each.text.processing.processors])
    AssistedDecoding._finish_round(decoding, rounds)


VERDICT: Any = Walk.result
# (owner, name, what stands there in its place), and in which of the earlier mistakes it shows.
MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "criteria after the round": (
        OutputText, "_verify_in_order", OutputText._verify_chain, "a criterion between the calls"),
    "criteria twice": (
        Walk, "result", property(lambda self: replace(VERDICT.fget(self), ended=None)),
        "a criterion between the calls"),
    "what is forbidden": (
        processors, "KNOWN", KNOWN | {logits_process.PrefixConstrainedLogitsProcessor}, "a trie, lookups"),
    "the draft asks": (Processing, "for_draft", lambda self: self, "a function that counts"),
    "the draft asks behind an end": (refusals, "ends_predictably", lambda *_: True, "a marked trie behind a criterion"),
    "of transformers, so it is known": (
        processors, "KNOWN", KNOWN | {logits_process.PrefixConstrainedLogitsProcessor}, "a function that counts"),
    "rows by themselves": (InStep, "_finish_round", rows_one_after_the_other, "one that counts for all rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant, mistake = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, ValueError)):
        sum(check(replace(EARLIER_MISTAKES[mistake], seed=seed)) for seed in range(8))


def test_several_answers_to_one_prompt() -> None:
    """transformers numbers them by prompt; releases before 5.24 by answer."""
    target = quiet_later_layers(tiny("llama"))
    how: dict[str, Any] = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 12, **ENDS}
    found = []
    for each in (assistant_of("independent", target, **WAYS["chain"]), None):
        toy = Trie(9, {*ENDS["eos_token_id"]}, padded=True)
        text = target.generate(prompt(9), assistant_model=each, prefix_allowed_tokens_fn=toy, pad_token_id=PAD, **how)
        found.append((text.tolist(), toy.log))
    assert found[0] == found[1]
    assert len({question.row for question in found[0][1]}) in {1, 3}


@pytest.mark.takes(2)
@pytest.mark.parametrize("ends", [{}, ENDS], ids=["", "ends"])
def test_what_rows_in_step_return(ends: dict[str, Any]) -> None:
    """Scores and logits belong to the tokens that they are returned for, and the cache can be carried on."""
    target, (ids, mask) = quiet_later_layers(tiny("llama")), batch(3)
    asked: dict[str, Any] = {f"output_{name}": True for name in RECORDS[:2]}
    how: dict[str, Any] = {
        "max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, "return_dict_in_generate": True, **asked, **ends,
        "attention_mask": mask, "prefix_allowed_tokens_fn": lambda row, text: [
            token for token in range(1, VOCAB_SIZE) if (token + int(text[-1]) + row) % 6],
    }  # fmt: skip
    assistant = assistant_of("conditioned", target, **WAYS["chain"])
    ours, plain = (target.generate(ids, assistant_model=each, **how) for each in (assistant, None))
    assert torch.equal(ours.sequences, plain.sequences)
    assert assistant.stats.accepted > 3
    if not ends:  # else there are also those of texts that have ended
        for name in RECORDS[:2]:
            assert_same(ours[name], plain[name])
    how |= {
        "max_new_tokens": 6,
        "attention_mask": functional.pad(mask, (0, ours.sequences.shape[1] - ids.shape[1]), value=1),
    }
    again = [target.generate(each.sequences, past_key_values=each.past_key_values, **how) for each in (ours, plain)]
    assert torch.equal(again[0].sequences, again[1].sequences)


# Those of transformers. ----------------------------------------------------------------------------------------------


SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
IN_ORDER: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.6},
    "guidance by a prompt": {"guidance_scale": 0.7, "negative_prompt_ids": prompt(4, seed=5)},
    "a watermark that counts": {"watermarking_config": SYNTH_ID},
    "a function": {"prefix_allowed_tokens_fn": lambda *text: only_neighbours(*text)},  # which does not guide the draft
}
WITHOUT_STATE = {name: how for name, how in PROCESSORS.items() if name not in ("prefix_allowed_tokens_fn", "none")}


def asked(patch: pytest.MonkeyPatch) -> list[Question]:
    """What processors of transformers are asked from now on."""
    log: list[Question] = []

    def noted(call: Any) -> Any:
        def noting(self: Any, input_ids: Tensor, scores: Tensor) -> Any:
            log.append(Question(type(self).__name__, 0, input_ids.tolist(), scores.clone()))
            return call(self, input_ids, scores)

        return unnoticed(noting)

    for kind in OF_TRANSFORMERS:
        if "__call__" in vars(kind):
            patch.setattr(kind, "__call__", noted(vars(kind)["__call__"]))
    return log


OF_TRANSFORMERS = [
    kind
    for kind in vars(logits_process).values()
    if inspect.isclass(kind) and issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor
]


@pytest.mark.daily("*-chain", "guidance-*tree", "no_repeat_ngram_size-*tree", "watermark by itself-static tree")
@pytest.mark.parametrize("way", [*WAYS, *CAPTURED])
@pytest.mark.parametrize("name", [*IN_ORDER, *WITHOUT_STATE])
def test_questions_of_transformers_own(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known are asked about candidates, too, and in graphs, where Python sees nothing."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    made_for = assistant_of("independent", target, **{**WAYS, **CAPTURED}[way])
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, **(IN_ORDER | WITHOUT_STATE)[name]}
    log = asked(monkeypatch)
    plain = target.generate(prompt(), **arguments)
    theirs = log[:]
    log.clear()
    with pretend_graphs() if way in CAPTURED else nullcontext():
        ours = target.generate(prompt(), assistant_model=made_for, **arguments)
    made_for.detach()
    assert torch.equal(ours, plain)
    if name in IN_ORDER:
        assert len(log) == len(theirs)
        assert all(map(same, theirs, log))
    elif way in WAYS:
        assert is_part(theirs, log, same) or all(_is_row_of_any(each, log) for each in theirs)


def _is_row_of_any(one: Question, log: list[Question]) -> bool:
    """Of a processor that never looks at the tokens, and is asked about several places at once."""
    rows = torch.cat([each.scores for each in log if each.asked == one.asked])
    is_free = one.asked in {each.__name__ for each in PREFIX_FREE}
    return is_free and bool(torch.isclose(rows, one.scores, atol=1e-4, equal_nan=True).all(-1).any())


ASKED_IN_ORDER = {
    "ClassifierFreeGuidanceLogitsProcessor",  # takes the rows in halves
    "DiaClassifierFreeGuidanceLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor",  # as these do, by channels
    "DiaEOSDelayPatternLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor",  # remember calls
    "PrefixConstrainedLogitsProcessor",  # calls a function
    "UnbatchedClassifierFreeGuidanceLogitsProcessor", "WhisperNoSpeechDetection",  # call a model, and remember
}  # fmt: skip
IDS: Any = torch.tensor([[7, 8, 9, 7, 8]])
EOS, BIAS = torch.tensor([5]), cast(Any, {(4,): 3.0, (7, 8): -5.0})
MAKE: dict[str, Callable[[], Any]] = {
    "AlternatingCodebooksLogitsProcessor": lambda: logits_process.AlternatingCodebooksLogitsProcessor(2, 8, 4),
    "BarkEosPrioritizerLogitsProcessor": lambda: logits_process.BarkEosPrioritizerLogitsProcessor(5, 0.1),
    "EncoderNoRepeatNGramLogitsProcessor": lambda: logits_process.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda: logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.3, IDS),
    "EpsilonLogitsWarper": lambda: logits_process.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda: logits_process.EtaLogitsWarper(0.02),
    "ExponentialDecayLengthPenalty": lambda: logits_process.ExponentialDecayLengthPenalty((2, 1.2), EOS, 3),
    "ForcedBOSTokenLogitsProcessor": lambda: logits_process.ForcedBOSTokenLogitsProcessor(4),
    "ForcedEOSTokenLogitsProcessor": lambda: logits_process.ForcedEOSTokenLogitsProcessor(6, 5),
    "MinLengthLogitsProcessor": lambda: logits_process.MinLengthLogitsProcessor(6, 5),
    "MinNewTokensLengthLogitsProcessor": lambda: logits_process.MinNewTokensLengthLogitsProcessor(2, 5, 5),
    "InfNanRemoveLogitsProcessor": logits_process.InfNanRemoveLogitsProcessor,
    "LogitNormalization": logits_process.LogitNormalization,
    "MinPLogitsWarper": lambda: logits_process.MinPLogitsWarper(0.1),
    "NoBadWordsLogitsProcessor": lambda: logits_process.NoBadWordsLogitsProcessor([[3], [7, 8]], 5),
    "NoRepeatNGramLogitsProcessor": lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    "RepetitionPenaltyLogitsProcessor": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.3),
    "SequenceBiasLogitsProcessor": lambda: logits_process.SequenceBiasLogitsProcessor(BIAS),
    "SuppressTokensAtBeginLogitsProcessor": lambda: logits_process.SuppressTokensAtBeginLogitsProcessor([3], 5),
    "SuppressTokensLogitsProcessor": lambda: logits_process.SuppressTokensLogitsProcessor([3]),
    "TemperatureLogitsWarper": lambda: logits_process.TemperatureLogitsWarper(0.7),
    "TopHLogitsWarper": lambda: logits_process.TopHLogitsWarper(0.5),
    "TopKLogitsWarper": lambda: logits_process.TopKLogitsWarper(5),
    "TopPLogitsWarper": lambda: logits_process.TopPLogitsWarper(0.8),
    "TypicalLogitsWarper": lambda: logits_process.TypicalLogitsWarper(0.7),
    "WatermarkLogitsProcessor": lambda: WatermarkingConfig(bias=3.0, seeding_scheme="selfhash").construct_processor(
        VOCAB_SIZE, "cpu"),
    "WhisperTimeStampLogitsProcessor": lambda: logits_process.WhisperTimeStampLogitsProcessor(whisper(), 3),
    "SynthIDTextWatermarkLogitsProcessor": lambda: SYNTH_ID.construct_processor(VOCAB_SIZE, "cpu"),
}  # fmt: skip


def whisper() -> Any:
    config: Any = GenerationConfig(eos_token_id=5)
    config.no_timestamps_token_id = 20
    return config


def test_every_class_of_transformers_is_known_or_asked_in_order() -> None:
    """What a new release adds is asked in order, until somebody has read it."""
    known = {each.__name__ for each in KNOWN if each in OF_TRANSFORMERS}
    assert known <= MAKE.keys()
    assert known | ASKED_IN_ORDER == {kind.__name__ for kind in OF_TRANSFORMERS}
    assert not known & ASKED_IN_ORDER


def depends_on_its_arguments_alone(make: Callable[[], Any]) -> bool:
    """Whether a processor that was asked other things before, about any texts, says the same as a new one."""
    draws, old = torch.Generator().manual_seed(0), make()
    for length in (5, 3, 9, 4, 5, 1, 7, 6):
        ids = torch.randint(0, VOCAB_SIZE, (1, length), generator=draws)
        scores = torch.randn(1, VOCAB_SIZE, generator=draws)
        if not torch.equal(old(ids, scores.clone()), make()(ids, scores.clone())):
            return False
    return True


@pytest.mark.parametrize("name", MAKE)
def test_those_known_keep_nothing(name: str) -> None:
    is_known = getattr(logits_process, name) in KNOWN
    assert is_known == (name not in ASKED_IN_ORDER)
    assert depends_on_its_arguments_alone(MAKE[name]) == is_known


class Cooler(logits_process.TemperatureLogitsWarper):
    """A user's subclass."""


def test_who_may_be_asked_what() -> None:
    def marked(*_: Any) -> list[int]:
        return [1]

    marked.reads_prefix_only = True  # type: ignore[attr-defined]
    constraint, nested = logits_process.PrefixConstrainedLogitsProcessor, LogitsProcessorList()
    of_user: list[Any] = [Cooler(0.5), constraint(lambda *_: [1], 1), nested]
    assert Processing(of_user).in_order == of_user
    guides = Processing([constraint(marked, 1), *of_user])
    assert (guides.in_order, guides.for_draft().processors) == (of_user, guides.processors[:1])
    assert not guides.answers_all
    assert Processing([logits_process.TemperatureLogitsWarper(0.5)]).answers_all
    rows = Processing(for_row([logits_process.NoRepeatNGramLogitsProcessor(2), constraint(marked, 1)], 1, 2))
    assert rows.in_order == rows.processors[1:]


# Between graphs. -----------------------------------------------------------------------------------------------------


class ForbidsAll(LogitsProcessor):
    """Nothing may follow every second token: plain generation takes token 0. Else the second likeliest may."""

    reads_prefix_only = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.asked.append(input_ids[0].tolist())
        forbidden = scores.argmax(-1, keepdim=True) if input_ids.shape[1] % 2 else torch.arange(VOCAB_SIZE)[None]
        return scores.scatter(1, forbidden, float("-inf"))


def those_allowed(text: OutputText, tree_pass: Any, scores: Tensor) -> Tensor:
    """A mutant: as where candidates are drawn."""
    text.randomness = cast(Any, "some")
    return ALLOWED(text, tree_pass, scores)


ALLOWED = OutputText._process_allowed


@pytest.mark.takes(4)
def test_a_greedy_text_where_nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph takes token 0, too, which is what the draft proposes here, and nothing but the text is asked about."""
    with pretend_graphs():
        target: Any = quiet_later_layers(tiny("llama"))
        target.lm_head.weight.data[0] = 4 * target.lm_head.weight[1]
        assistant = assistant_of("independent", target, **TREE)
        plain, ours = ForbidsAll(), ForbidsAll()
        how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
        text = target.generate(prompt(8), logits_processor=[plain], **how)
        mine = target.generate(prompt(8), assistant_model=assistant, logits_processor=[ours], **how)
        assert torch.equal(mine, text)
        assert assistant.stats.decided["rounds"] == BETWEEN
        assert ours.asked == plain.asked
        assert assistant.stats.accepted > 0
        monkeypatch.setattr(OutputText, "_process_allowed", those_allowed)
        mutant = target.generate(prompt(8), assistant_model=assistant, logits_processor=[ours], **how)
        assert not torch.equal(mutant, text)


def test_refusals_name_the_module() -> None:
    """Several libraries have a class of this name."""
    kind = type("LogitsProcessor", (LogitsProcessor,), {"__module__": "xgrammar.contrib.hf"})
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_for(target)
    with pytest.raises(ValueError, match=r"xgrammar\.contrib\.hf\.LogitsProcessor may keep state"):
        target.generate(prompt(5).repeat(2, 1), assistant_model=assistant, logits_processor=[kind()], max_new_tokens=4)


def test_toys_are_asked() -> None:
    """The toys themselves: each is asked something by plain generation, and none raises."""
    for toy in TOYS:
        assert len(Call(toy=toy).run(ours=False)[1]) == 14


# Numbers of sampling as contents. -------------------------------------------------------------------------------------


WARPINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7}, "top-k": {"top_k": 7}, "all of top-k": {"top_k": 500},
    "large top-k": {"top_k": 2000}, "top-p": {"top_p": 0.8},
    "nothing of top-p": {"top_p": 0.0}, "min-p": {"min_p": 0.05},
    "all": {"temperature": 1.6, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, "all again": {"temperature": 0.3, "top_k": 3,
    "top_p": 0.6, "min_p": 0.2},
}  # fmt: skip
MAKERS = {
    "temperature": logits_process.TemperatureLogitsWarper, "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper, "min_p": logits_process.MinPLogitsWarper,
}  # fmt: skip


def warpers(name: str) -> list[Any]:
    return [MAKERS[each](value) for each, value in WARPINGS[name].items()]


def warped(*names: str) -> tuple[Tensor, Tensor]:
    """Scores by transformers and by one of `Warpers`, of two positions of rows with these numbers."""
    scores = (3.0 * torch.randn(len(names), 2, 100, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    scores[:, 0, :30] = float("-inf")  # beside those that are equal
    rows = [Processing(warpers(name)).with_contents().processors for name in names]
    assert all(len(own) == 1 and isinstance(own[0], Warpers) for own in rows)
    first, *_ = each_row = [cast(Warpers, each) for (each,) in rows]
    first.numbers = torch.cat([each.numbers for each in each_row])
    expected = [Processing(warpers(name)).of_nodes(row[None], None) for name, row in zip(names, scores, strict=True)]
    return Processing([first]).of_nodes(scores, None), torch.cat(expected)


@pytest.mark.parametrize("name", WARPINGS)
def test_numbers_as_contents_warp_as_transformers_does(name: str) -> None:
    assert torch.equal(*warped(name))


def test_each_row_has_its_own_numbers() -> None:
    assert torch.equal(*warped("all", "all again"))


@pytest.mark.parametrize("place", range(4))
def test_numbers_of_another_row_are_noticed(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Warpers.__call__

    def mutant(own: Any, ids: Any, scores: Tensor) -> Tensor:
        own.numbers[:, place] = own.numbers[:, place].flip(0)
        return call(own, ids, scores)

    monkeypatch.setattr(Warpers, "__call__", mutant)
    found, expected = warped("all", "all again")
    assert not torch.equal(found, expected)


def test_what_is_no_usual_warper_stays() -> None:
    """Another order is another run; other arguments, subclasses and other processors are called as they are."""

    class Own(logits_process.TopKLogitsWarper):
        pass

    hot, least = logits_process.TemperatureLogitsWarper(2.0), logits_process.MinPLogitsWarper(0.1)
    other = [logits_process.TopKLogitsWarper(5, filter_value=-1e9), logits_process.TopPLogitsWarper(0.5, -1e9, 2)]
    named = [least, hot, *other, Own(3), logits_process.EtaLogitsWarper(0.1), hot]
    found = Processing(named).with_contents().processors
    assert [type(each) is Warpers for each in found] == [True, True, False, False, False, False, True]
    assert found[2:6] == named[2:6]
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    ours, theirs = (Processing(each).after_each(prompt(3), [[]] * 3, scores) for each in (found, named))
    assert torch.equal(ours, theirs)


@pytest.mark.takes(6)
def test_another_number_is_no_capture() -> None:
    with pretend_graphs() as counts:
        target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
        assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=3)
        how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
        for place in range(3):
            how |= {"temperature": 0.7 + place, "top_k": 30 - place, "top_p": 0.9 - 0.1 * place, "min_p": 0.01 * place}
            target.generate(prompt(8), assistant_model=assistant, **how)
            assert assistant.stats.decided["rounds"] == "captured"
            assert bool(counts["captured"]) == (place == 0)
            counts.clear()
        # New numbers count: one token alone is possible now.
        text = target.generate(prompt(8), assistant_model=assistant, **{**how, "top_k": 1})
        assert not counts["captured"]
        assert torch.equal(text, target.generate(prompt(8), max_new_tokens=12, do_sample=False, pad_token_id=0))
