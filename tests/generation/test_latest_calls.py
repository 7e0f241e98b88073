"""`assistant.stats` is of one's own call: of this thread's or asyncio task's, where others generate meanwhile."""

import asyncio
import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from support.files.repos import tokenizer
from support.targets.models import assistant_for, prompt, tiny
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.generation import latest_calls
from hf_specdecpp.generation.latest_calls import LatestCalls
from hf_specdecpp.generation.stats import SpeculationStats

PROMPT = prompt(6)


@pytest.fixture(scope="module", params=["named", pytest.param("default", marks=pytest.mark.slow)])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[SpecDecPPAssistant, Callable[..., Any]]]:
    """An assistant that no call has been made with, and what makes one of so many tokens."""
    target = tiny("llama", num_hidden_layers=1)
    helper = assistant_for(target)
    if request.param == "default":
        helper.attach(target, default=True)
    named = {} if request.param == "default" else {"assistant_model": helper}

    def generate(tokens: int, rows: int = 1, **more: Any) -> Any:
        return target.generate(
            PROMPT.repeat(rows, 1), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **named, **more
        )

    yield helper, generate
    helper.detach()


@pytest.fixture
def fresh(made: Any) -> tuple[SpecDecPPAssistant, Callable[..., Any]]:
    made[0].calls = LatestCalls()
    return made


def seen(assistant: SpecDecPPAssistant) -> int:
    """Tokens of the call whose statistics are shown."""
    return assistant.stats.generated


def in_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(timeout=60)


# Who reads, and whose they should be: calls of so many tokens, in the order in which they end. -----------------------


def test_each_thread_reads_its_own(fresh: Any) -> None:
    """Threads take turns: each generates, then all others do, then each reads, twice."""
    assistant, generate = fresh
    turns, found = threading.Barrier(3, timeout=60), {}

    def work(tokens: int) -> None:
        for place in range(3):
            turns.wait()
            if place == tokens // 8 - 1:
                generate(tokens)
        turns.wait()
        found[tokens] = [seen(assistant), seen(assistant)]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (8, 16, 24)))
    assert found == {8: [8, 8], 16: [16, 16], 24: [24, 24]}
    assert seen(assistant) == 24, "a thread without a call of its own reads the latest of all"
    generate(32)
    in_thread(lambda: generate(8))
    assert seen(assistant) == 32
    assert in_thread(lambda: (generate(16), seen(assistant))[1]) == 16


@pytest.mark.takes(3)
def test_each_task_reads_its_own(fresh: Any) -> None:
    assistant, generate = fresh

    async def task(tokens: int, own_thread: bool) -> tuple[int, int]:
        await asyncio.sleep(0)
        if own_thread:
            first = await asyncio.to_thread(lambda: (generate(tokens), seen(assistant))[1])
        else:
            generate(tokens)
            first = tokens
        await asyncio.sleep(0.01)
        return first, seen(assistant) if not own_thread else tokens

    async def all_of(own_thread: bool) -> list[tuple[int, int]]:
        return await asyncio.gather(*(task(tokens, own_thread) for tokens in (8, 24, 16)))

    for before, own_thread in itertools.product((False, True), (False, True)):
        if before:
            generate(32)  # what the tasks' contexts begin with
        assert asyncio.run(all_of(own_thread)) == [(8, 8), (24, 24), (16, 16)]


class Interrupted(LatestCalls):
    """Calls of the main thread, right after the noting of each of which another thread notes one of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_latest" and threading.current_thread() is threading.main_thread():
            in_thread(partial(self.record_call, SpeculationStats(generated=8)))


def test_another_thread_s_call_may_be_noted_at_the_same_time() -> None:
    calls = Interrupted()
    calls.record_call(SpeculationStats(generated=16))
    assert calls.stats.generated == 16
    assert in_thread(lambda: calls.stats.generated) == 8


async def _to_thread(generate: Callable[..., Any]) -> None:
    await asyncio.to_thread(generate, 16)


def _streamed(generate: Callable[..., Any]) -> None:
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    thread = threading.Thread(target=generate, args=(16,), kwargs={"streamer": streamer})
    thread.start()
    list(streamer)
    thread.join()


ELSEWHERE: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "a streamer that is iterated over": _streamed,
    "asyncio.to_thread": lambda generate: asyncio.run(_to_thread(generate)),
    "a thread": lambda generate: in_thread(lambda: generate(16)),
    "a thread with a copied context": lambda generate: in_thread(partial(copy_context().run, generate, 16)),
}


@pytest.mark.daily("*-True")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("how", ELSEWHERE)
def test_calls_made_for_this_thread_by_another(fresh: Any, how: str, warm: bool) -> None:
    """The latest of all, also after a call of one's own where the other one was evidently made for its readers."""
    assistant, generate = fresh
    if warm:
        generate(32)
    ELSEWHERE[how](generate)
    assert seen(assistant) == (32 if warm and how == "a thread" else 16)
    generate(8)
    assert seen(assistant) == 8, "one's own again"


def test_printing_streamers_and_batches_are_one_s_own(fresh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assistant, generate = fresh
    generate(8)
    in_thread(lambda: generate(16, streamer=TextStreamer(tokenizer())))
    assert seen(assistant) == 8
    assert capsys.readouterr().out
    generate(8, rows=2)
    in_thread(lambda: generate(16))
    assert (seen(assistant), len(assistant.stats.rows)) == (16, 2), "2 rows of 8 tokens"


def test_refusals_are_the_thread_s_own() -> None:
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_for(target)
    assistant.attach(target, default=True)
    target.generate(PROMPT, max_new_tokens=4, do_sample=False, num_beams=2)
    in_thread(lambda: target.generate(PROMPT, max_new_tokens=4, do_sample=False))
    assert "num_beams=2" in str(assistant.stats.refusal)
    assert in_thread(lambda: assistant.stats.generated) == 4
    assistant.detach()


def test_pipelines(fresh: Any) -> None:
    assistant, generate = fresh
    target = tiny("llama", num_hidden_layers=1)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer())
    helper = assistant_for(target)
    helper.attach(target, default=True)
    pipe("w1 w2 w3", max_new_tokens=8, do_sample=False)
    in_thread(lambda: pipe("w1 w2 w3", max_new_tokens=16, do_sample=False))
    assert seen(helper) == 8
    assert in_thread(lambda: seen(helper)) == 16
    helper.detach()


def test_one_assistant_s_are_not_another_s() -> None:
    target = tiny("llama", num_hidden_layers=1)
    one, other = assistant_for(target), assistant_for(target)
    for each, tokens in ((one, 8), (other, 16)):
        target.generate(PROMPT, max_new_tokens=tokens, do_sample=False, assistant_model=each)
    assert (one.stats.generated, other.stats.generated) == (8, 16)
    assert copy.deepcopy(one).stats.generated == 8
    one.detach()
    other.detach()


def test_nothing_is_kept_of_threads_and_assistants_that_are_gone() -> None:
    calls, kept = LatestCalls(), []

    def note(calls: LatestCalls) -> None:
        mine = SpeculationStats(generated=1)
        kept.append(weakref.ref(mine))
        calls.record_call(mine)

    for _ in range(5):
        in_thread(partial(note, calls))
    note(calls)
    gc.collect()
    assert [each() is None for each in kept] == [True] * 5 + [False]
    assert calls in latest_calls.known_here()
    weak = weakref.ref(calls)
    del calls
    gc.collect()
    assert (weak(), kept[-1]()) == (None, None)


# Small wrong versions, each of which some test above must see. --------------------------------------------------------


class OneForAll(LatestCalls):
    """As before: the latest of all threads."""

    @property
    def stats(self) -> SpeculationStats:
        return self._latest.stats


class OwnAlone(LatestCalls):
    """One's own, whatever was streamed since."""

    @property
    def stats(self) -> SpeculationStats:
        return latest_calls.known_here().get(self, self._latest).stats


@pytest.mark.parametrize(("wrong", "test"), [
    (OneForAll, test_each_thread_reads_its_own),
    (OneForAll, test_each_task_reads_its_own),
    (OwnAlone, lambda made: test_calls_made_for_this_thread_by_another(made, "a streamer that is iterated over", True)),
    (OwnAlone, lambda made: test_calls_made_for_this_thread_by_another(made, "asyncio.to_thread", True)),
])  # fmt: skip
def test_mutants(made: Any, wrong: type[LatestCalls], test: Callable[[Any], None]) -> None:
    made[0].calls = wrong()
    with pytest.raises(AssertionError):
        test(made)
