"""Graphs on pretended CUDA devices: on whose stream things are launched, what dies with a graph, what a failure leaves
behind. Each is tested beside a version that is wrong."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from support.devices import pretend_cuda
from support.devices.pretend_cuda import pretend_graphs_on_devices
from support.devices.pretend_devices import on_device
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from torch import Tensor

from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs, NoReads, NoWaits, capture_lock
from hf_specdecpp.generation.captured import entering

# Of what is freed after a test, too.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
FIRST, SECOND = (torch.device("cuda", number) for number in range(2))
IDS = prompt(9)


@pytest.fixture
def counts() -> Iterator[Counter[str]]:
    with pretend_graphs_on_devices() as (counted, _):
        yield counted


def number(device: torch.device) -> Tensor:
    return on_device(torch.tensor(3), str(device))


def adds(length: Tensor) -> Callable[[], None]:
    def add() -> None:
        length.add_(1)

    return add


def pair(device: torch.device, **settings: Any) -> tuple[Any, Any, Tensor]:
    """A target on a device, an assistant, and plain generation's text."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2, hidden_size=32))
    plain = target.generate(IDS, max_new_tokens=7, do_sample=False, pad_token_id=0)
    on_device(target, str(device))
    return target, assistant_of("early_exit", target, **{"rule": "fixed", "num_tokens": 2, **settings}), plain


def text(target: Any, assistant: Any, **how: Any) -> Tensor:
    ids = on_device(IDS, str(target.device))
    how = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **how}
    found: Tensor = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **how)
    assert assistant.stats.decided["rounds"] == "captured"
    return found.cpu()


def as_before(function: Callable[[], None], restore: Callable[[], None], made: Graphs) -> Any:
    """A capture on PyTorch's own stream, which is not put back after a failure."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=made.pool, capture_error_mode="thread_local"):
        function()
    return graph


# Devices. ------------------------------------------------------------------------------------------------------------


@pytest.mark.takes(8)
@pytest.mark.parametrize("waits", ["its own", "the current device's"])
def test_the_host_waits_for_the_stream_of_the_targets_device(
    waits: str, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if waits != "its own":
        monkeypatch.setattr(CapturedRounds, "_wait", lambda _: torch.cuda.current_stream().synchronize())
    target, assistant, plain = pair(SECOND)
    assert torch.cuda.current_device() == 0
    assert torch.equal(text(target, assistant), plain) == (waits == "its own")
    assert counts["replayed"] > 4


@pytest.mark.parametrize("capture", [graphs.captured, as_before])
@pytest.mark.usefixtures("counts")
def test_an_empty_graph_is_noticed(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own stream is of the device on which the process captured first."""
    monkeypatch.setattr(graphs, "captured", capture)
    for device in (FIRST, SECOND):
        length = number(device)
        made = Graphs(device)
        if device == SECOND and capture is as_before:
            with pytest.raises(CannotCaptureError, match="its graph is empty"):
                made.run("one", adds(length), [length])
            assert int(length) == 3
        else:
            for expected in (4, 5):
                made.run("one", adds(length), [length])
                assert int(length) == expected


# Graphs of one target live and die together. -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["of a target", "of all"])
@pytest.mark.usefixtures("counts")
def test_graphs_that_go_take_none_of_another_target_along(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream == "of all":
        one = torch.cuda.Stream(FIRST)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: one)
    length = number(FIRST)
    first, second = Graphs(FIRST), Graphs(FIRST)
    first.run("one", adds(length), [length])
    second.run("one", adds(length), [length])
    del first
    gc.collect()
    if stream == "of all":
        with pytest.raises(RuntimeError, match="illegal memory access"):
            second.run("one", adds(length), [length])
    else:
        second.run("one", adds(length), [length])
        assert int(length) == 6


@pytest.mark.usefixtures("counts")
def test_graphs_that_are_too_many_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    length, made = number(FIRST), Graphs(FIRST)
    for name in range(3):
        made.run(name, adds(length), [length])
    assert len(made) == 1
    made.run(0, adds(length), [length])
    assert (int(length), len(made)) == (7, 2)
    del made._graphs[2]  # one alone
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.run(0, adds(length), [length])


@pytest.mark.takes(8)
@pytest.mark.usefixtures("counts")
def test_more_settings_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "MOST_KEPT", 1)
    target, assistant, plain = pair(FIRST)
    for num_tokens in (2, 1, 2):
        assistant.speculation.num_tokens = num_tokens
        assert torch.equal(text(target, assistant), plain)


@pytest.mark.takes(8)
def test_memory_is_free_as_soon_as_the_models_are_gone(counts: Counter[str]) -> None:
    target, assistant, _ = pair(FIRST)
    text(target, assistant)
    weight = weakref.ref(target.model.layers[0].mlp.down_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del target, assistant
        assert weight() is None
    finally:
        gc.enable()
    assert counts["captured"] > 1


# Failures. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [graphs.captured, as_before])
@pytest.mark.usefixtures("counts")
def test_a_failed_capture_leaves_the_thread_on_its_stream(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "captured", capture)
    before, length = torch.cuda.current_stream(FIRST), number(FIRST)

    def fails() -> None:
        length.add_(1)
        pretend_cuda.refuse()

    with pytest.raises(CannotCaptureError, match="failed due to a previous error"):
        Graphs(FIRST).run("fails", fails, [length])
    assert (torch.cuda.current_stream(FIRST) is before) == (capture is not as_before)
    assert int(length) == 3


@pytest.mark.parametrize("device", [FIRST, SECOND])
@pytest.mark.usefixtures("counts")
def test_a_capture_leaves_device_and_streams_as_they_were(device: torch.device) -> None:
    own = torch.cuda.Stream(device)
    torch.cuda.set_stream(own)
    with torch.cuda.device(FIRST):
        length = number(device)
        Graphs(device).run("one", adds(length), [length])
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(device) is own


@pytest.mark.usefixtures("counts")
def test_one_capture_at_a_time() -> None:
    got: list[bool] = []

    def watched() -> None:
        if pretend_cuda.under_way:
            thread = Thread(target=lambda: got.append(capture_lock.acquire(blocking=False)))
            thread.start()
            thread.join()

    made = Graphs(FIRST)
    made.run("one", watched)
    assert got == [False]
    assert capture_lock.acquire(blocking=False)
    capture_lock.release()


def test_what_waits_is_found_before_a_capture_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails damages the allocator of PyTorch before 2.12. Numbers of the host may be read."""
    begun: list[Any] = []
    monkeypatch.setattr(graphs, "captured", lambda *each: begun.append(each))
    length = torch.tensor(3)
    waits: list[Any] = [length.item, length.nonzero, length.tolist, lambda: bool(length)]
    for wait in waits:
        with pytest.raises(CannotCaptureError, match="waits for the device"):
            Graphs(torch.device("cpu")).run("waits", wait, [length])
    assert not begun
    with NoReads(FIRST), NoWaits(FIRST):
        assert [length.tolist(), int(length)] == [3, 3]
