"""Functions that are captured once a key and replayed; a failed capture leaves what it changes as it was."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdecpp.captured.graphs import CannotCaptureError, Graphs

CPU = torch.device("cpu")


def test_a_graph_for_each_key(pretended: Counter[str]) -> None:
    graphs, number, total = Graphs(CPU), torch.tensor(2), torch.tensor(0)
    for key, step in (("add", 1), ("add", 1), ("add twice", 2), ("add", 1)):

        def add(step: int = step) -> None:
            total.add_(number * step)

        graphs.run(key, add, [total])
    assert int(total) == 2 + 2 + 4 + 2
    assert (len(graphs), pretended["captured"], pretended["replayed"]) == (2, 2, 4)
    assert "add" in graphs
    assert "sub" not in graphs
    assert graphs.seconds > 0.0


@pytest.mark.usefixtures("pretended")
def test_the_first_run_counts_once() -> None:
    """Though the function runs several times then; a tensor that is not named as changed is off."""
    for changes, expected in ((True, 1), (False, 4)):
        graphs, length = Graphs(CPU), torch.tensor(0)

        def add(length: Tensor = length) -> None:
            length.add_(1)

        graphs.run("one", add, [length] if changes else [])
        assert int(length) == expected


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero, bool])
@pytest.mark.usefixtures("pretended")
def test_what_cannot_be_captured_changes_nothing(read: Callable[[Tensor], Any]) -> None:
    graphs, length = Graphs(CPU), torch.tensor(3)

    def waits() -> None:
        length.add_(1)
        read(length)

    with pytest.raises(CannotCaptureError, match="RuntimeError: .* waits for the device"):
        graphs.run("waits", waits, [length])
    assert (int(length), len(graphs)) == (3, 0)
    assert gc.isenabled()


@pytest.mark.usefixtures("pretended")
def test_a_graph_reads_what_its_tensors_hold_now() -> None:
    """And numbers of Python as they were."""
    graphs, source, goal, factor = Graphs(CPU), torch.tensor([1.0, 2.0]), torch.zeros(2), [2.0]

    def multiply() -> None:
        goal.copy_(source.flip(0) * factor[0])

    graphs.run("multiply", multiply)
    source.fill_(5.0)
    factor[0] = 100.0
    graphs.run("multiply", multiply)
    assert goal.tolist() == [10.0, 10.0]
