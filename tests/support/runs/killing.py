"""A process that dies at a chosen moment, as `kill -9` or a power cut would have it."""

import os
import signal
import traceback
from collections.abc import Callable

import torch


def die() -> None:
    """Kill this process here and now: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_it_dies(work: Callable[[], object]) -> None:
    """Run `work`, which is to call `die`, in a fork: what it has patched and left half done dies with it."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the threads of the parent's pools are not in a fork
            work()
        except BaseException:  # noqa: BLE001 - nothing may leave the fork
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it went on to its end, or failed"
    assert os.WTERMSIG(status) == signal.SIGKILL
