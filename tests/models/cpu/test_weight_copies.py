"""Copies of weights: never stale, made in the background, and within the memory that is free."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.devices.products import faster, needs_float16, products_of, use_copies
from support.targets.models import assistant_for, prompt, tiny
from torch import Tensor, nn

from hf_specdecpp.models.cpu import products, weight_copies
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.products import measured_copy
from hf_specdecpp.models.cpu.weight_copies import NEVER, POLL, Background, WeightCopies, WeightCopy, background

pytestmark = needs_float16


@pytest.fixture(autouse=True)
def all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_copies(monkeypatch)


def layer_of(out: int = 64, width: int = 64) -> nn.Linear:
    """A layer whose float32 weight float16 holds."""
    layer = nn.Linear(width, out, bias=False)
    layer.weight.data = torch.randint(1, 100, (out, width)) / 64.0
    return layer


# Weights that change. -------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "counted by autograd": torch.no_grad()(lambda weight, new: weight.copy_(new)),
    "other data": lambda weight, new: setattr(weight, "data", new),
    "data in place": lambda weight, new: weight.data.mul_(new / weight.data),
    "NumPy": lambda weight, new: np.copyto(weight.detach().numpy(), new.numpy()),
    "one element": lambda weight, _: weight.data[7].__setitem__(3, 9.0),
    "rows swapped": lambda weight, _: weight.data.copy_(weight.data.flip(0)),
    "columns swapped": lambda weight, _: weight.data.copy_(weight.data.roll(2, dims=1)),
}


def error_after(write: str, dtype: torch.dtype, fits: bool) -> float:
    """Of a product after a write to the weight between two texts."""
    layer, kept, x = layer_of().to(dtype), WeightCopies(measured_copy), torch.randn(3, 64).to(dtype)
    faster(layer, copies=kept)
    WRITES[write](layer.weight, (torch.randint(1, 100, (64, 64)) / 32.0 if fits else torch.randn(64, 64)).to(dtype))
    with torch.no_grad(), faster(layer, copies=kept):
        assert products_of(layer) != {"own": 1}
        found = layer(x)
    expected = x.double() @ layer.weight.detach().double().T
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_write_is_noticed(write: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if write == "NumPy" and dtype is torch.bfloat16:
        dtype = torch.float16  # NumPy has no other one of 16 bits
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert error_after(write, dtype, fits=True) < bound
    monkeypatch.setattr(WeightCopy, "check", lambda *_: None)  # the mutant
    monkeypatch.setattr(WeightCopy, "is_of", lambda *_: True)
    assert error_after(write, dtype, fits=True) > bound


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("write", ["counted by autograd", "other data", "data in place", "NumPy"])
def test_a_weight_that_does_not_fit_any_more(write: str) -> None:
    assert error_after(write, torch.float32, fits=False) < 1e-5


def in_a_text(write: Callable[[nn.Linear], Any]) -> float:
    """Error of a product after a write in the middle of a text."""
    layer, x = layer_of(), torch.randn(3, 64)
    with torch.no_grad(), faster(layer):
        layer(x)
        write(layer)
        expected = x.double() @ layer.weight.double().T
        return float((layer(x) - expected).norm() / expected.norm())


@pytest.mark.parametrize("write", [
    lambda layer: layer.weight.mul_(2.0),
    lambda layer: setattr(layer.weight, "data", torch.randn(64, 64)),
    lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(64, 64))),
], ids=["in place", "other data", "another weight"])  # fmt: skip
def test_a_write_in_a_text_is_noticed_where_torch_counts_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_a_text(write) < 1e-5
    monkeypatch.setattr(WeightCopy, "is_of", lambda *_: True)  # the mutant
    assert in_a_text(write) > 0.1


def test_a_weight_that_is_written_to_while_it_is_copied_has_no_copy() -> None:
    weight, copy = layer_of().weight, WeightCopy()
    for place in (slice(None), 0, (3, 7)):
        copy.make(weight, lambda _, place=place: weight.data[place].add_(1.0))  # type: ignore[misc]
        assert (copy.made, copy.version) == (None, NEVER)
    copy.make(weight, lambda _: "made")
    assert copy.made == "made"


def test_an_unchanged_weight_keeps_its_copy() -> None:
    layer, kept = layer_of(), WeightCopies(measured_copy)
    first = kept.current(layer)
    made = first.made
    assert kept.current(layer) is kept.prepared(layer) is first
    tied = nn.Linear(64, 64)
    tied.weight = layer.weight
    assert WeightCopies(measured_copy).current(tied) is first, "another assistant's, for another layer"
    assert first.made is made
    assert kept.current(tied) is first
    assert kept.bytes == 64 * 64 * 2
    kept.current(other := nn.Linear(64, 64))
    assert kept.bytes == 64 * 64 * (2 + 4), "oneDNN's is in float32"
    del other
    gc.collect()
    assert kept.bytes == 64 * 64 * 2


def test_a_weight_with_a_copy_moves_where_pytorch_swaps_tensors() -> None:
    """Weak references to a tensor would forbid it."""
    layer, kept = layer_of(), WeightCopies(measured_copy)
    weight = layer.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with faster(layer, copies=kept):
            layer.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer.weight is weight
    x = torch.randn(3, 64).bfloat16()
    with torch.no_grad(), faster(layer, copies=kept):
        assert products_of(layer) == {"float16": 1}
        torch.testing.assert_close(layer(x), x @ weight.T)


def test_a_copy_goes_with_its_layer_and_with_whom_it_was_made_for() -> None:
    kept, layer = WeightCopies(measured_copy), layer_of()
    copy = weakref.ref(kept.current(layer))
    del layer
    gc.collect()
    assert copy() is None
    assert kept.bytes == 0
    layer = layer_of()
    copy = weakref.ref(kept.current(layer))
    kept.clear()
    assert copy() is None


# What is measured, of which weights. ----------------------------------------------------------------------------------


def test_the_first_weight_does_not_decide_for_those_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one with NaN, or one that does not fit; measured are weights of a usual size."""
    seen: list[tuple[str, list[tuple[int, ...]]]] = []
    measure = products._measure

    def noted(weights: list[Tensor], copies: list[Any]) -> Any:
        seen.append((copies[0].name, [tuple(weight.shape) for weight in weights[1:]]))  # the first is not timed
        return measure(weights, copies)

    monkeypatch.setattr(products, "_measure", noted)
    first = layer_of().bfloat16()
    first.weight.data[3, 3] = torch.nan
    second = nn.Sequential(first, layer_of().bfloat16())
    with faster(second):
        assert products_of(second) == {"float16": 1, "own": 1}
    third = nn.Sequential(nn.Linear(64, 64), layer_of(500, 3000))
    with faster(third):
        assert products_of(third) == {"float16": 1, "oneDNN": 1}
    assert sorted(name for name, _ in seen) == ["float16", "float16", "oneDNN"], "once for each dtype and kind"
    small, large = [(64, 64)] * products.MOST_SAMPLES, [(500, 3000)] * 2
    assert sorted((name, shapes) for name, shapes in seen) == [
        ("float16", small),
        ("float16", large),
        ("oneDNN", small),
    ]


# The thread. ----------------------------------------------------------------------------------------------------------


class Machine:
    """A clock that stands between the steps of a `Background`, and what these were: sizes of copies, and sleeps."""

    def __init__(self, seconds: float = 1.0, text: float = 1e9) -> None:
        self.now, self.seconds, self.text = 0.0, seconds, text
        self.steps: list[int] = []
        self.background = Background()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL
        self.steps.append(0)
        self.now += 1.0
        if self.now >= self.text and self.background.texts:
            self.background.texts -= 1

    def make(self, weight: Tensor) -> str:
        self.steps.append(weight.numel())
        self.now += self.seconds
        return "made"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(weight_copies, "time", made)
    monkeypatch.setattr(
        weight_copies, "os", SimpleNamespace(setpriority=lambda *_: None, getpriority=lambda *_: 0, PRIO_PROCESS=0)
    )
    monkeypatch.setattr(weight_copies, "usable_cores", lambda: 1)
    monkeypatch.setattr(weight_copies, "background", made.background)
    return made


def asked(machine: Machine, *sizes: int) -> tuple[WeightCopies, list[nn.Linear]]:
    kept, layers = WeightCopies(machine.make), [nn.Linear(size, 1) for size in sizes]
    machine.background._thread = threading.current_thread()  # which does the work here
    for layer in layers:
        kept.prepared(layer)
    return kept, layers


def test_between_texts_and_beside_a_spare_core_all_are_made_the_largest_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, layers = asked(machine, 8, 32, 16)
    machine.background._run(1)
    assert machine.steps == [32, 16, 8]
    monkeypatch.setattr(weight_copies, "usable_cores", lambda: 2)
    kept, layers = asked(machine, 8, 32, 16)
    machine.background.texts += 1
    machine.background._run(1)
    assert machine.steps == [32, 16, 8] * 2
    assert [kept.prepared(layer).made for layer in layers] == ["made"] * 3


def test_without_a_spare_core_texts_leave_their_share(machine: Machine) -> None:
    """A copy of a second in every 25 of texts; the rest as soon as no text is generated."""
    machine.text = 51.0
    kept = asked(machine, *[8] * 9)
    machine.background.texts += 1
    machine.background._run(1)
    share = [8, *[0] * 24, 8, *[0] * 24]
    assert machine.steps[: len(share)] == share
    assert [step for step in machine.steps[len(share) :] if step] == [8] * 7
    assert machine.steps[len(share) :].count(0) <= 2
    assert machine.now >= 51.0
    assert len(kept[1]) == 9


def test_nothing_is_waited_for_where_nothing_is_left(machine: Machine) -> None:
    """`wait()` makes what is left itself; the thread, which has spent its share, ends."""
    machine.background.texts += 1
    machine.background._run(1)
    assert machine.steps == []
    kept, layers = asked(machine, 8, 16)
    machine.background._thread = None
    machine.background.wait()
    assert machine.steps == [16, 8]
    assert all(kept.prepared(layer).made for layer in layers)


def test_what_nobody_needs_any_more_is_not_made(machine: Machine) -> None:
    kept, layers = asked(machine, 8, 16)
    del layers[1]
    gc.collect()
    machine.background._run(1)
    assert machine.steps == [8]
    asked(machine, 8)  # whose owner is gone
    gc.collect()
    kept, layers = asked(machine, 24)
    kept.clear()
    machine.background._run(1)
    assert machine.steps == [8]


def test_a_copy_that_its_first_owner_no_longer_needs_is_made_for_the_second(machine: Machine) -> None:
    kept, layers = asked(machine, 8)
    second = WeightCopies(machine.make)
    copy = second.prepared(layers[0])
    del kept
    gc.collect()
    machine.background._run(1)
    assert copy.made is None
    asked(machine)
    assert second.prepared(layers[0]) is copy
    machine.background._run(1)
    assert copy.made == "made"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()], ids=str)
def test_a_copy_that_cannot_be_made_is_left_out(error: Exception, machine: Machine, monkeypatch: Any) -> None:
    def fails(weight: Tensor) -> str:
        if weight.numel() == 16:
            raise error
        return "made"

    monkeypatch.setattr(machine, "make", fails)
    kept, layers = asked(machine, 8, 32, 16)
    machine.background._run(1)
    assert [kept.prepared(layer).made for layer in layers] == ["made", "made", None]
    assert machine.background._asked == [], "it is not tried in every text"


def test_copies_take_a_quarter_of_the_free_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies count as free memory, too, which they would be without them."""
    target = nn.Sequential(*[layer_of(64, 64 * (index + 1)) for index in range(4)]).bfloat16()
    sizes = [2 * 64 * 64 * (index + 1) for index in range(4)]
    kept, free = WeightCopies(measured_copy), 4.0 * (sizes[3] + sizes[1]) + 8.0

    monkeypatch.setattr(weight_copies, "free_memory", lambda: free - kept.bytes)
    background._thread = threading.current_thread()  # makes them one after the other
    with (products := FasterProducts(target, copies=kept)):
        background.wait()
        assert kept.bytes == sizes[3] + sizes[1]
        assert products_of(target) == {"float16": 2, "own": 2}
    assert products.described == "float16 (2 of 4 layers), own (2 of 4 layers)"
    monkeypatch.setattr(weight_copies, "free_memory", lambda: 0.0)
    with faster(target):
        assert products_of(target) == {"float16": 2, "own": 2}, "those that are shared"
    kept.clear()
    del products
    with faster(target):
        assert products_of(target) == {"own": 4}


def test_free_memory_is_what_the_system_and_the_container_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files that the system keeps in memory, such as a checkpoint that was read, make room."""
    monkeypatch.setattr(weight_copies, "CONTAINERS", ((str(tmp_path), "most", "used", "inactive_file"),))
    whole = weight_copies.free_memory()
    for most, used, files, free in (
        ("1000\n", 400, 0, 600.0),
        ("1000", 900, 300, 400.0),
        ("400", 1000, 0, 0.0),
        ("many", 1, 0, 0.0),
        ("", 1, 0, 0.0),
        ("max", 0, 0, None),
    ):
        for name, text in (("most", most), ("used", f"{used}\n"), ("memory.stat", f"anon 7\ninactive_file {files}\n")):
            (tmp_path / name).write_text(text, encoding="utf-8")
        assert weight_copies.free_memory() == free or (free is None and weight_copies.free_memory() > 0.5 * whole)
    assert whole >= 0.0


def test_copies_that_are_asked_for_while_others_are_counted() -> None:
    """The thread counts them before it makes each."""
    kept, layers = WeightCopies(lambda _: "made"), [nn.Linear(2, 1) for _ in range(400)]
    interval = sys.getswitchinterval()
    end: list[bool] = []
    errors: list[Exception] = []

    def count() -> None:
        try:
            while not end:
                kept.bytes  # noqa: B018 - reading must not raise an error
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=count)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for layer in layers:
            kept._shared(layer)
    finally:
        end.append(True)
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_after_a_fork_what_is_missing_is_asked_for_again(machine: Machine) -> None:
    kept, layers = asked(machine, 8, 16)
    machine.background._make(*machine.background._asked.pop())
    weight_copies._begin_child()
    assert (machine.background._asked, machine.background._thread) == ([], None)
    asked(machine)
    assert [kept.prepared(layer).made for layer in layers] == [None, "made"]
    machine.background._run(1)
    assert [kept.prepared(layer).made for layer in layers] == ["made", "made"]


PROGRAMS: dict[str, str] = {
    "ends": """
        import atexit
        atexit.register(lambda: print(len(made)))  # after the package's own function
        from hf_specdecpp.models.cpu.weight_copies import WeightCopies
        made = []
        def make(weight):
            time.sleep(0.05)
            made.append(1)
        kept, layers = WeightCopies(make), [nn.Linear(4, 1) for _ in range(400)]
        for layer in layers:
            kept.prepared(layer)
    """,
    "ends in the middle of a weight": """
        from hf_specdecpp.models.cpu import products
        from hf_specdecpp.models.cpu.weight_copies import WeightCopies
        products.AT_ONCE = 4
        kept, layer = WeightCopies(products.Float16Weight.of), nn.Linear(4, 1_000_000)
        kept.prepared(layer)
        time.sleep(0.05)
        print(0)
    """,
    "is nice already": """
        import os
        os.nice(15)
        from hf_specdecpp.models.cpu.weight_copies import WeightCopies
        made, nice = [], []
        def make(weight):
            nice.append(os.getpriority(os.PRIO_PROCESS, 0))
            return "made"
        kept, layer = WeightCopies(make), nn.Linear(4, 1)
        copy = kept.prepared(layer)
        for thread in threading.enumerate()[1:]:
            thread.join()
        print(0 if (copy.made, nice) == ("made", [os.getpriority(os.PRIO_PROCESS, 0)]) else (copy.made, nice))
    """,
    "has low priority": """
        import os
        from hf_specdecpp.models.cpu.weight_copies import WeightCopies
        nice, layer = [], nn.Linear(4, 1)
        kept = WeightCopies(lambda _: nice.append(os.getpriority(os.PRIO_PROCESS, 0)))
        kept.prepared(layer)
        for thread in threading.enumerate()[1:]:
            thread.join()
        print(nice[0] - os.getpriority(os.PRIO_PROCESS, 0) - 10)
    """,
    "is forked": """
        import os, threading
        from hf_specdecpp.models.cpu.weight_copies import WeightCopies, background
        begun, go = threading.Event(), threading.Event()
        def make(weight):
            begun.set()
            go.wait()
            return "made"
        kept, layers = WeightCopies(make), [nn.Linear(4, 1) for _ in range(3)]
        copies = [kept.prepared(layer) for layer in layers]
        begun.wait()
        if (child := os.fork()) == 0:
            go.set()
            again = [kept.prepared(layer) for layer in layers]
            background.wait()
            os._exit(0 if all(copy.made == "made" for copy in again) else 1)
        found = os.waitpid(child, 0)[1]
        go.set()
        background.wait()
        print(0 if found == 0 and all(copy.made for copy in copies) else 1)
    """,
}


@pytest.mark.apart
@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads, and forks")
@pytest.mark.parametrize("name", PROGRAMS)
def test_processes(name: str) -> None:
    program = "import threading, time\nimport torch\nfrom torch import nn\n" + textwrap.dedent(PROGRAMS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if name == "ends":
        assert int(done.stdout) < 200
    else:
        assert done.stdout == "0\n"


# Texts. ---------------------------------------------------------------------------------------------------------------


def test_copies_are_taken_up_while_two_threads_generate() -> None:
    """Layer by layer, in the middle of texts."""
    target = tiny("llama", num_hidden_layers=2).bfloat16().float()
    plain = target.generate(prompt(), max_new_tokens=12, do_sample=False)
    go = threading.Semaphore(0)
    made: list[Tensor] = []
    found: list[bool] = []

    def make(weight: Tensor) -> Any:
        go.acquire()
        made.append(weight)
        return measured_copy(weight)

    def generate(number: int) -> None:
        assistant, products = assistants[number], set()
        for _ in range(5):
            text = target.generate(prompt(), assistant_model=assistant, max_new_tokens=12, do_sample=False)
            found.append(torch.equal(text, plain))
            products.add(assistant.stats.decided["products"].partition(",")[0])
            go.release(2)
        assert len(products) > 2, "some texts had copies of some layers"
        seen.append(number)

    assistants = [assistant_for(target, attached=False, rule="fixed", num_tokens=2) for _ in range(2)]
    seen: list[int] = []
    for each in assistants:
        each.copies = WeightCopies(make)
        each.attach(target)
    threads = [threading.Thread(target=generate, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    go.release(100)
    background.wait()
    assert len(made) == 15, "each weight once for both"
    assert found == [True] * 10
    assert sorted(seen) == [0, 1]
