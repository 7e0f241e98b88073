"""Pretended CUDA graphs, on a CPU: what a function launches is recorded, and replayed with new contents of its tensors.

As in a capture, numbers, shapes and branches of Python stay as they were, and what would make the host wait for the
device, or gives results of unknown shape, is refused. So a function that is right when replayed here with other
contents is right as a graph, but for what only a device knows: memory pools, streams, libraries that allocate.

    with pretend_graphs() as counts:          # captures are possible, and counted
        model.generate(ids, assistant_model=assistant)
        counts["captured"], counts["replayed"]"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdecpp.cuda_graphs import graphs
from support.devices import pretend_devices
from support.devices.pretend_devices import host_of, tensors_of


class PretendGraph(TorchDispatchMode):
    """What is launched within, to be replayed."""

    def __init__(
        self, counts: Counter[str] | None = None, records: Callable[[torch.device], bool] = lambda _device: True
    ) -> None:
        super().__init__()
        self.records = records  # whether what is launched on a device is captured
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.counts = Counter() if counts is None else counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        is_launched = func._schema.is_mutable or not _is_view(out, (args, kwargs))
        if is_launched and all(map(self.records, _devices(out, args, kwargs))):
            self.launches.append((func, args, kwargs, tensors_of(out)))
        return out

    @torch.inference_mode()  # what was captured in it can be written to in no other way
    def replay(self) -> None:
        """One launch, on pretended devices too."""
        self.counts["replayed"] += 1
        before = pretend_devices.counts.copy()
        for func, args, kwargs, out in self.launches:
            for old, new in zip(out, tensors_of(func(*args, **kwargs)), strict=True):
                if host_of(old).data_ptr() != host_of(new).data_ptr():  # else it was written there
                    old.copy_(new.view_as(old))  # `squeeze_` may have changed the shape of the first since
        pretend_devices.counts.clear()
        pretend_devices.counts.update(before + Counter(launch=1))


def _devices(*trees: Any) -> list[torch.device]:
    tensors = [each for each in tensors_of(trees) if isinstance(each, pretend_devices.DeviceTensor)]
    return [each.device for each in tensors[:1]]


def _is_view(out: Any, arguments: Any) -> bool:
    """Whether it is memory of an argument, for which nothing is launched: `reshape` and `to` are views at times."""
    of = {_memory(each) for each in tensors_of(arguments)}
    return all(_memory(each) in of for each in tensors_of(out))


def _memory(tensor: Tensor) -> int:
    return host_of(tensor).untyped_storage().data_ptr()


@contextmanager
def pretend_graphs() -> Iterator[Counter[str]]:
    """Every device can capture, which is counted."""
    counts: Counter[str] = Counter()

    def captured(function: Callable[[], None], restore: Callable[[], None], _family: Any) -> PretendGraph:
        for _ in range(graphs.WARM_UPS):
            function()
            restore()
        graph = PretendGraph(counts)
        with graph:
            function()
        restore()  # on a device a capture runs nothing
        counts["captured"] += 1
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "captured", captured)
        patch.setattr(graphs, "can_capture", lambda _device: True)
        yield counts


class Direct:
    """Runs what was captured anew, numbers of the host included: in a tenth of the time, where replays are not what is
    tried."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    @torch.inference_mode()
    def replay(self) -> None:
        self.function()


@contextmanager
def direct_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "captured", lambda function, _restore, _family: Direct(function))
        patch.setattr(graphs, "can_capture", lambda _device: True)
        yield
