"""Attention of uncaptured passes on a GPU (`without_cudnn`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_lock = Lock()
_users: list[bool] = []  # what the setting was when each thread came that is within


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Let PyTorch choose another kernel of attention than cuDNN's.

    cuDNN makes a plan for each number of cached tokens, which takes longer than a pass, and a text that grows has
    another number in each pass. The setting is the process's: it is put back when the last of several threads leaves.
    """
    with _lock:
        _users.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            before = _users.pop()
            if not _users:
                torch.backends.cuda.enable_cudnn_sdp(before)
