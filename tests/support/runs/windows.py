"""Windows' rules of files, pretended on Linux: what is open or mapped by this process stays where it is.

    with windows() as refused:
        assistant.save_pretrained(folder)     # PermissionError, where Windows raises it
    assert not refused                        # which may have been swallowed

A file that is open or mapped can be neither replaced, renamed nor removed, nor can a folder with one in it. Nothing is
renamed onto what is there, but by `os.replace`, and by that no folder. `os.fsync` wants a file that is open to be
written. Text is written and read in cp1252, and written with "\\r\\n", unless an encoding and a newline are named. Some
names are none."""

import builtins
import errno
import fcntl
import io
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NO_NAME = re.compile(r'[<>:"|?*\\]|[ .]$|^(con|prn|aux|nul|com\d|lpt\d)(\..*)?$', re.IGNORECASE)


def in_use() -> set[str]:
    """Files that this process has open or mapped."""
    found = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - `Path.iterdir` opens one more
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115 - as it is
        except FileNotFoundError:  # that of `listdir`
            continue
    with real_open("/proc/self/maps", encoding="utf-8") as maps:
        found |= {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
    return found


real_open = io.open


@contextmanager
def windows() -> Iterator[list[str]]:
    """Within, these rules hold; yields what was refused."""
    refused: list[str] = []

    def refuse(what: str, path: Any, code: int = errno.EACCES) -> None:
        refused.append(f"{what}: {path}")
        raise OSError(code, f"[WinError] {what}", str(path))

    def check_unused(*paths: Any) -> None:
        for path in paths:
            place = os.path.realpath(path)
            for name in in_use():
                if name == place or name.startswith(place + os.sep):
                    refuse("in use by this process", name)

    def check_name(path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and not str(path).startswith(("/dev/", "/proc/")):
            for part in Path(path).parts[1:]:
                if NO_NAME.search(part):
                    refuse("not a name", path, errno.EINVAL)

    real: dict[str, Callable[..., Any]] = {
        name: getattr(os, name) for name in ("replace", "rename", "unlink", "remove", "mkdir", "fsync")
    }

    def replace(source: Any, to: Any, **how: Any) -> None:
        check_unused(source, to)
        if os.path.isdir(to):  # noqa: PTH112 - of any kind of path
            refuse("a folder cannot be replaced", to)
        check_name(to)
        real["replace"](source, to, **how)

    def rename(source: Any, to: Any, **how: Any) -> None:
        check_unused(source)
        if os.path.lexists(to):
            refuse("there already", to, errno.EEXIST)
        check_name(to)
        real["rename"](source, to, **how)

    def unlink(path: Any, **how: Any) -> None:
        if "dir_fd" not in how:  # of a folder that `rmtree` has checked
            check_unused(path)
        real["unlink"](path, **how)

    def mkdir(path: Any, *rest: Any, **how: Any) -> None:
        check_name(path)
        real["mkdir"](path, *rest, **how)

    def fsync(number: Any) -> None:
        number = number if isinstance(number, int) else number.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            refuse("fsync of a file that is open for reading", number, errno.EBADF)
        real["fsync"](number)

    def symlink(source: Any, to: Any, **_: Any) -> None:
        raise OSError(errno.EPERM, "[WinError] a privilege is missing", str(to))  # everybody knows how to do without

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
               newline: Any = None, *rest: Any, **how: Any) -> Any:  # fmt: skip
        if set(mode) & set("wax"):
            check_name(file)
        if isinstance(file, (str, os.PathLike)) and "b" not in mode and not str(file).startswith(("/proc/", "/sys/")):
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and set(mode) & set("wax") else newline
        return real_open(file, mode, buffering, encoding, errors, newline, *rest, **how)

    rmtree = shutil.rmtree

    def removed(path: Any, ignore_errors: bool = False, **how: Any) -> None:
        try:
            check_unused(path)
        except OSError:
            if not ignore_errors:
                raise
            return  # of what is in the folder some would be gone
        rmtree(path, ignore_errors, **how)

    functions = {"replace": replace, "rename": rename, "unlink": unlink, "remove": unlink, "mkdir": mkdir,
                 "symlink": symlink, "fsync": fsync}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(os, name, function)
        for module in (builtins, io):
            patch.setattr(module, "open", opened)
        patch.setattr(shutil, "rmtree", removed)
        if (accessor := vars(pathlib).get("_normal_accessor")) is not None:  # of Python 3.10
            for name in ("open", *(functions.keys() & set(dir(accessor)))):
                patch.setattr(accessor, name, functions.get(name, opened))
        yield refused
