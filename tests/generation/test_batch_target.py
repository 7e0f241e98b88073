"""Several sequences in one `generate()`: every row's text is that of plain generation on the same batch."""

import contextlib
import copy
from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.enumeration.exact_distribution import Replay, Tokens, exact_distribution
from support.enumeration.stock_rounds import small, target_distribution
from support.fuzz.arguments import Counting
from support.targets import models
from support.targets.families import model_of
from support.targets.watchers import Collector, heard
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.caches import batches
from hf_specdecpp.caches.masks import row_masks
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.batch_target import BatchTarget
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.output_text import OutputText, Round
from hf_specdecpp.generation.setup import DraftSetup

FAMILIES = ["llama", "gpt2", "opt", "mistral", "gemma3_text"]  # the last two with windows
KINDS = ["early_exit", "conditioned", "eagle3"]
LENGTHS = [3, 12, 7, 20]
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 6},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.5]}},
}


def padded(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Prompts of these lengths, padded on the left."""
    longest = max(lengths)
    rows = [models.prompt(length, seed + place)[0].tolist() for place, length in enumerate(lengths)]
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(target: Any, inputs: dict[str, Tensor], assistant: Any = None, **options: Any) -> Any:
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, **options}
    return target.generate(**inputs, assistant_model=assistant, **options)


# Greedy text is plain text. -------------------------------------------------------------------------------------------


@pytest.mark.daily("gpt2", "early_exit")
@pytest.mark.parametrize("kind", ["gpt2", "opt", "mpt", "gemma3_text", "vocabulary", *KINDS])
def test_rows_draft_what_they_would_draft_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without positions (MPT), and with a window."""
    target = models.quiet_later_layers(models.tiny("llama"))
    if kind in KINDS:
        assistant = models.assistant_of(kind, target)
    elif kind == "vocabulary":
        draft = models.partly_agreeing(target, 0.9)
        assistant = SpecDecPPAssistant.from_draft(draft, target, draft_vocab=[*range(5, 40)])
    else:
        # MPT itself says NaN after padding in float64.
        is_mpt = kind == "mpt"
        draft = copy.deepcopy(model_of(kind)).float() if is_mpt else models.partly_agreeing(models.tiny(kind), 0.9)
        assistant = SpecDecPPAssistant.from_draft(draft, target)
    models.configured(assistant, rule="fixed", num_tokens=3, draft_successors=False)  # the rows share the table
    drafted: dict[Any, list[list[int]]] = {}
    saw = SpecDecPPCandidateGenerator.record_outcome

    def spy(self: SpecDecPPCandidateGenerator, chain: Any, *outcome: Any) -> None:
        drafted.setdefault(self, []).append(chain.candidates)
        saw(self, chain, *outcome)

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "record_outcome", spy)
    inputs = padded([3, 7, 5, 14])
    generate(target, inputs, assistant, max_new_tokens=8)
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        generate(target, {"input_ids": ids[None, mask.bool()]}, assistant, max_new_tokens=8)
    texts = list(drafted.values())
    assert (texts[:4], len({str(text) for text in texts})) == (texts[4:], 4)


def early_ends(target: Any, inputs: dict[str, Tensor], **options: Any) -> list[int]:
    """Token ids that end the second text and the third early."""
    texts = generate(target, inputs, **options)[:, inputs["input_ids"].shape[1] :]
    return [int(texts[1, 9]), int(texts[2, 24])]


class EndsAt(StoppingCriteria):
    """Ends each row where it says one of these tokens, or for good once it is this long."""

    reads_prefix_only = True

    def __init__(self, tokens: list[int], length: int = 10**6) -> None:
        self.tokens, self.length = tokens, length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        is_long = torch.full((len(input_ids),), input_ids.shape[1] >= self.length)
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens)) | is_long


@pytest.mark.daily("fixed-tokens0-40", "throughput-tokens0-1000000")
@pytest.mark.parametrize("length", [40, 10**6])
@pytest.mark.parametrize("tokens", [[3, 17, 25, 40], [3, 17], []])
@pytest.mark.parametrize("rule", ["fixed", "throughput"])
def test_without_an_id_that_ends_texts_rows_go_on_until_all_end(rule: str, tokens: list[int], length: int) -> None:
    """As plain generation does; nothing is padded then, and scores belong to every token."""
    target, inputs = models.tiny("llama"), padded(LENGTHS)
    target.generation_config.eos_token_id = None
    options = {
        "stopping_criteria": StoppingCriteriaList([EndsAt(tokens, length)]), "return_dict_in_generate": True,
        "output_scores": True,
    }  # fmt: skip
    plain, assistant = generate(target, inputs, **options), models.assistant_for(target, **RULES[rule])
    ours = generate(target, inputs, assistant, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(plain.scores)
    for own, expected in zip(ours.scores, plain.scores, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)


def test_padding_that_eager_attention_turns_into_nan_is_refused() -> None:
    """Plain generation gives wrong texts there, from which no promise follows."""
    target = models.tiny("mistral", attn_implementation="eager")
    assistant, inputs = models.assistant_for(target, **RULES["fixed"]), padded([3, 12])
    plain = generate(target, inputs, return_dict_in_generate=True, output_logits=True)
    if not bool(plain.logits[0].isnan().any()):
        pytest.skip("this transformers computes no NaN there")
    with pytest.raises(ValueError, match="Row 0 of the prompts has padding, in which MistralForCausalLM computes NaN"):
        generate(target, inputs, assistant)


@pytest.mark.daily("0.2-llama")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("holes", [0.2, 10.0])
def test_records_and_cache_are_plain_generations(family: str, holes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a row goes on; zeros, where plain generation has records of padding, once it has ended."""
    monkeypatch.setattr(batches, "MOST_HOLES", holes)
    # In float64 eager attention itself says NaN after padding.
    target, inputs = models.tiny(family, attn_implementation="eager").float(), padded(LENGTHS)
    eos = early_ends(target, inputs, repetition_penalty=1.2)
    records = {"output_scores": True, "output_logits": True}
    options = {"return_dict_in_generate": True, "repetition_penalty": 1.2, "eos_token_id": eos, **records}
    plain = generate(target, inputs, **options)
    ours = generate(target, inputs, models.assistant_for(target, mix=0.9), **options)
    assert torch.equal(ours.sequences, plain.sequences)
    length, num_ends = inputs["input_ids"].shape[1], 0
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert len(mine) == len(theirs)
        for row, text in enumerate(plain.sequences[:, length:].tolist()):
            ends = [place for place, token in enumerate(text) if token in eos]
            num_ends += len(ends) > 0
            for step in range(ends[0] + 1 if ends else len(text)):
                torch.testing.assert_close(mine[step][row], theirs[step][row], rtol=1e-4, atol=1e-4)
    assert num_ends > 0
    shown = torch.cat((inputs["attention_mask"], torch.ones_like(plain.sequences[:, length:-1])), dim=1).bool()
    for one, other in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(one) is type(other)
        assert one.get_seq_length() == other.get_seq_length()
        columns = shown[:, -one.keys.shape[2] :]
        for mine, theirs in ((one.keys, other.keys), (one.values, other.values)):
            assert mine.shape == theirs.shape
            held = [[each[row, :, columns[row]] for row in range(len(LENGTHS))] for each in (mine, theirs)]
            torch.testing.assert_close(*held, rtol=1e-4, atol=1e-4)


@pytest.mark.daily("independent", takes=2)
@pytest.mark.parametrize("kind", ["independent", "conditioned", "eagle3"])
def test_a_cache_is_carried_on(kind: str) -> None:
    """A second turn after texts of different length, with what stands between the turns masked."""
    target, inputs = models.quiet_later_layers(models.tiny("llama")), padded(LENGTHS)
    assistant = models.assistant_of(kind, target)
    eos = early_ends(target, inputs)
    first = generate(target, inputs, assistant, eos_token_id=eos, return_dict_in_generate=True)
    ends = torch.isin(first.sequences[:, inputs["input_ids"].shape[1] :], torch.tensor(eos)).long()
    answer = (ends.cumsum(dim=1) - ends < 1).long()
    assert answer.sum(dim=1).unique().numel() > 1
    new = torch.cat([models.prompt(4, seed) for seed in range(4)])
    second = {
        "input_ids": torch.cat((first.sequences, new), dim=1),
        "attention_mask": torch.cat((inputs["attention_mask"], answer, torch.ones_like(new)), dim=1),
    }
    plain = generate(target, second)
    ours = generate(target, second, assistant, eos_token_id=7, past_key_values=copy.deepcopy(first.past_key_values))
    assert torch.equal(ours, plain)
    assert torch.equal(generate(target, second, past_key_values=first.past_key_values), plain)
    assert assistant.stats.accepted > 10


# Sampled rows are independent, and each follows p. --------------------------------------------------------------------


@pytest.mark.daily("in step", takes=4)
@pytest.mark.parametrize("rule", ["fixed", "threshold", "throughput", "in step"])
def test_rows_emit_exactly_p_and_are_independent(rule: str, enumerate_torch: Any) -> None:
    """The joint distribution of both rows is the product of p of each."""
    target, draft = small(7), small(107)
    knobs: dict[str, dict[str, Any]] = {
        "fixed": {"rule": "fixed", "num_tokens": 1},
        "threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 1},
        # Whether a second candidate is drafted depends on the first of both rows.
        "throughput": {"rule": "throughput", "max_tokens": 2, "costs": {"draft": 0.2, "verify": [1.0, 1.0, 1.0, 1.0]}},
        "in step": {"rule": "fixed", "num_tokens": 2},
    }
    # By which both rows stay equally long, so that where a round of one ends depends on the other.
    further = {"prefix_allowed_tokens_fn": lambda *_: [0, 1, 2, 3]} if rule == "in step" else {}
    speculation = SpeculationConfig(**knobs[rule])
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
    inputs = {"input_ids": torch.tensor([[1, 0, 2], [1, 0, 2]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}

    def program(replay: Replay) -> Tokens:
        enumerate_torch(replay)
        assistant.memory.clear()
        options = {"temperature": 0.8, "top_k": 2, "max_new_tokens": 3, **further}
        return tuple(generate(target, inputs, assistant, do_sample=True, **options)[:, 3:].flatten().tolist())

    p, found = target_distribution(target, 0.8, 2), exact_distribution(program)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for tokens, weight in found.items():
        rows, expected = (tokens[:3], tokens[3:]), 1.0
        for row in rows:
            for place, token in enumerate(row):
                expected *= float(p(row[:place])[token])
        assert weight == pytest.approx(expected, abs=1e-7)


def test_several_answers_to_one_prompt() -> None:
    target = models.tiny("llama")
    assistant, inputs = models.assistant_for(target, mix=0.9), padded([9])
    torch.manual_seed(0)
    texts = generate(target, inputs, assistant, do_sample=True, num_return_sequences=4, max_new_tokens=20)
    assert texts.shape == (4, 29)
    assert len({tuple(text) for text in texts.tolist()}) == 4
    plain = generate(target, inputs, top_k=1, do_sample=True, num_return_sequences=3)
    assert torch.equal(generate(target, inputs, assistant, top_k=1, do_sample=True, num_return_sequences=3), plain)


def test_after_every_round_each_rows_cache_is_a_fresh_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = models.tiny("llama"), padded(LENGTHS)
    assistant = models.assistant_for(target, mix=0.9)
    prepare, keep, widths, kinds = BatchTarget.prepare, BatchTarget.commit, [], set()

    def note(self: BatchTarget, rounds: list[Round]) -> None:
        kinds.add(tuple(sorted({each.emitted.kept for each in rounds})))
        keep(self, rounds)

    def check(self: BatchTarget, texts: list[OutputText]) -> None:
        prepare(self, texts)
        valid, cache = self.context.valid, self.context.cache
        widths.append(valid.shape[1])
        for place, each in enumerate(texts):
            text, own = each.ids[:, :-1], valid[place]
            real = text[:, text.shape[1] - int(own.sum()) :]
            with torch.no_grad():
                expected = target(real, use_cache=True).past_key_values
            for ours, theirs in zip(cache.layers, expected.layers, strict=True):
                for name in ("keys", "values"):
                    torch.testing.assert_close(getattr(ours, name)[place, :, own], getattr(theirs, name)[0])

    monkeypatch.setattr(BatchTarget, "commit", note)
    monkeypatch.setattr(BatchTarget, "prepare", check)
    generate(target, inputs, assistant, eos_token_id=7)
    assert any(width < before for before, width in zip(widths, widths[1:], strict=False)), "columns were moved together"
    assert len(kinds) > 3, "rows accepted different numbers in the same round"


# Mutants. Each has one mistake that other implementations have made. --------------------------------------------------


def changes_texts(family: str = "llama") -> bool:
    target, inputs = models.tiny(family), padded(LENGTHS)
    return not torch.equal(generate(target, inputs, models.assistant_for(target, mix=0.9)), generate(target, inputs))


def wrong(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> bool:
    """Whether a change of a method of `BatchTarget` gives other texts."""
    original = getattr(BatchTarget, name)
    monkeypatch.setattr(BatchTarget, name, lambda self, *arguments: change(self, original, *arguments))
    return changes_texts()


def test_positions_that_count_padding_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: BatchTarget, original: Any, *arguments: Any) -> Any:
        inputs = original(self, *arguments)
        columns = inputs["position_ids"].shape[1]
        inputs["position_ids"] = self.context.valid.shape[1] + torch.arange(columns).expand(len(arguments[0]), -1)
        return inputs

    assert wrong(monkeypatch, "_inputs", shifted)


def test_a_hole_that_stays_visible_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(self: BatchTarget, original: Any, *arguments: Any) -> Any:
        inputs = original(self, *arguments)
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return inputs

    assert wrong(monkeypatch, "_inputs", visible)


@pytest.mark.takes(4)
def test_a_window_that_counts_holes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_columns(model: Any, valid: Tensor, count: int) -> Any:
        near = row_masks(model, torch.ones_like(valid), count)
        return near & row_masks(models.tiny("llama"), valid, count)[:, None, None].bool()

    assert not changes_texts("mistral")
    monkeypatch.setattr(batches, "row_masks", by_columns)
    assert changes_texts("mistral")


def test_another_rows_count_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(self: BatchTarget, original: Any, rounds: list[Round]) -> None:
        emitted = [each.emitted for each in rounds]
        for each, other in zip(rounds, emitted[1:] + emitted[:1], strict=True):
            each.emitted = other
        original(self, rounds)
        for each, own in zip(rounds, emitted, strict=True):
            each.emitted = own

    assert wrong(monkeypatch, "commit", swapped)


def test_rows_that_share_random_numbers_are_noticed(enumerate_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows answer with the same draws: then they say the same, and are not independent."""
    target = small(7)
    assistant = SpecDecPPAssistant.from_draft(small(107), target, speculation=SpeculationConfig("fixed", num_tokens=1))
    inputs = {"input_ids": torch.tensor([[1, 0, 2], [1, 0, 2]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    take = AssistedDecoding._finish_round

    def program(replay: Replay) -> Tokens:
        enumerate_torch(replay)
        same = SameDraw(replay)

        def shared(self: AssistedDecoding, rounds: list[Round]) -> None:
            for each in rounds:
                each.text.randomness = each.text.generator.randomness = same
            take(self, rounds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AssistedDecoding, "_finish_round", shared)
            output = generate(target, inputs, assistant, do_sample=True, top_k=2, max_new_tokens=1)
        return tuple(output[:, 3:].flatten().tolist())

    found = exact_distribution(program)
    assert all(first == second for first, second in found), "the enumeration sees that they are not independent"


class SameDraw(Replay):
    """Answers every question as another replay answered the first one."""

    def __init__(self, replay: Replay) -> None:
        super().__init__([])
        self.replay, self.first = replay, list[int]()

    def _choose(self, weights: list[float]) -> int:
        if not self.first:
            self.first.append(self.replay._choose(weights))
        return self.first[0]


class Forbids(LogitsProcessor):
    """Another token in each row."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, 5 + 10 * torch.arange(len(scores))[:, None], float("-inf"))


@pytest.mark.takes(4)
def test_processors_that_know_the_row() -> None:
    target, inputs = models.tiny("llama"), padded(LENGTHS)
    for options in (
        {"prefix_allowed_tokens_fn": lambda row, _: list(range(1 + row, 40, 2))},
        {"logits_processor": LogitsProcessorList([Forbids()])},
        {"bad_words_ids": [[3], [4, 5]], "no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": 7},
    ):
        ours = generate(target, inputs, models.assistant_for(target, mix=0.9), **options)
        assert torch.equal(ours, generate(target, inputs, **options)), options
    with pytest.raises(ValueError, match=r"Counting may keep state .* reads_prefix_only = True"):
        generate(target, inputs, models.assistant_for(target), logits_processor=LogitsProcessorList([Counting()]))


class Dividing(StoppingCriteria):
    """Fails in the middle of a text."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, 0] < 0 * (1 // max(0, 12 - input_ids.shape[1]))


def empty(target: Any, _: Tensor) -> DynamicCache:
    return DynamicCache(config=target.config)


def lazy(_target: Any, _: Tensor) -> DynamicCache:
    """Its layers are made by the first pass, without windows."""
    return DynamicCache()


def half_filled(cache: DynamicCache, target: Any, ids: Tensor) -> DynamicCache:
    with torch.no_grad():
        target(ids[:, :4], past_key_values=cache)
    return cache


CACHES = [
    empty, lazy, lambda target, ids: half_filled(empty(target, ids), target, ids),
    lambda target, ids: half_filled(lazy(target, ids), target, ids),
]  # fmt: skip


@pytest.mark.daily(
    "llama-empty-1-False-1", "llama-lazy-3-True-1", "llama-<lambda>0-3-True-30", "llama-<lambda>1-3-False-1",
    "mistral-empty-3-False-30", "mistral-lazy-1-True-1", "mistral-<lambda>1-1-False-1", "gemma3_text-empty-3-True-1",
    "gemma3_text-lazy-1-True-9", "gemma3_text-<lambda>0-3-False-1", "gemma3_text-<lambda>1-3-False-30",
)  # fmt: skip
@pytest.mark.parametrize("new_tokens", [1, 9, 30])
@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_caches_of_users(family: str, cache: Any, rows: int, is_dict: bool, new_tokens: int) -> None:
    """Afterwards they are what plain generation leaves, to go on with."""
    target = models.quiet_later_layers(models.tiny(family))
    ids = torch.cat([models.prompt(9, seed) for seed in range(rows)])
    assistant, ends = models.assistant_for(target), []
    assistant.attach(target, default=True)
    for is_ours in (False, True):
        with contextlib.nullcontext() if is_ours else assistant.paused():
            own = cache(target, ids)
            how: dict[str, Any] = {"past_key_values": own, "return_dict_in_generate": is_dict}
            text = generate(target, {"input_ids": ids}, max_new_tokens=new_tokens, **how)
            text = text.sequences if is_dict else text
            keys = [layer.keys.clone() for layer in own.layers]
            ends.append((text, keys, generate(target, {"input_ids": text}, max_new_tokens=12, past_key_values=own)))
    (plain, plain_keys, plain_end), (ours, our_keys, our_end) = ends
    assert torch.equal(ours, plain)
    assert torch.equal(our_end, plain_end)
    torch.testing.assert_close(our_keys, plain_keys)


def test_what_rows_cannot_share_is_refused() -> None:
    target, inputs = models.tiny("llama"), padded([3, 5])
    assistant = models.assistant_for(target)
    with pytest.raises(ValueError, match="a streamer prints one sequence"):
        generate(target, inputs, assistant, streamer=Collector())
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match="hidden states and attentions are returned for single sequences"):
            generate(target, inputs, assistant, return_dict_in_generate=True, **{name: True})
    with pytest.raises(ValueError, match="trees are verified for one sequence at a time"):
        generate(target, inputs, models.assistant_for(target, tree="dyspec"))
    flipped = {name: value.flip(1) for name, value in inputs.items()}
    with pytest.raises(ValueError, match="padded on the right"):
        generate(target, flipped, assistant)
    local = tiny_of("gpt_neo")
    with pytest.raises(ValueError, match="local attention along the rows of its cache, so rows of different length"):
        generate(local, inputs, SpecDecPPAssistant.from_draft(models.tiny("llama"), local))
    window = models.tiny("mistral", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="takes no mask that they need"):
        generate(window, inputs, SpecDecPPAssistant.from_draft(models.tiny("llama"), window))
    state = model_of("lfm2")
    with pytest.raises(ValueError, match="keeps LinearAttentionLayer in its cache"):
        generate(target, inputs, SpecDecPPAssistant.from_draft(state, target))
    cache = DynamicCache(config=target.config)
    with pytest.raises(ZeroDivisionError):
        generate(target, inputs, assistant, past_key_values=cache, stopping_criteria=[Dividing()])
    with pytest.raises(ValueError, match="cannot be carried on"):
        generate(target, inputs, assistant, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be carried on"):
        generate(target, inputs, past_key_values=cache)
    windows = models.tiny("mistral")
    cache = generate(windows, inputs, return_dict_in_generate=True).past_key_values
    with pytest.raises(ValueError, match="has dropped tokens"):
        generate(windows, inputs, models.assistant_for(windows), past_key_values=cache)


@pytest.mark.slow
def test_speculation_fades_as_the_batch_grows() -> None:
    """Where a pass takes its time by the number of tokens, more rows leave less room for candidates."""
    target, verify = models.tiny("llama"), [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    costs = Costs(0.1, tuple(verify))
    assert costs.of_row(2, 3).verify == (0.5, 0.5, 1.5, 2.5)
    drafted = []
    for size in (1, 2, 8):
        assistant = models.assistant_for(target, mix=0.9, rule="throughput", max_tokens=4, costs=asdict(costs))
        for _ in range(3):
            generate(target, padded([5] * size), assistant)
        drafted.append(assistant.stats.drafted / assistant.stats.rounds)
    assert drafted[0] > drafted[1] > drafted[2]
    assert drafted[2] < 0.1


def test_rows_share_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them reads every weight that there is a copy of, as long as a pass takes."""
    target, made = models.tiny("llama"), []
    assistant = models.assistant_for(target, **RULES["throughput"])
    heard(monkeypatch, DraftSetup, "products", lambda *_: made.append(_))
    generate(target, padded(LENGTHS), assistant, max_new_tokens=4)
    assert len(made) == 1
    told = {row.decided["products"] for row in (assistant.stats, *assistant.stats.rows)}
    assert told == {"own"}, "small weights have no copies"
