"""The origin of results: a model's commit on the Hub, the commit of this code, the command, the device."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils.hub import extract_commit_hash

from hf_specdecpp.models.causal_lm import CausalLM


def commit_of(model: CausalLM) -> str | None:
    """The commit hash of a model's files, recorded by transformers or else of the default branch in the Hub cache."""
    return getattr(model.config, "_commit_hash", None) or _cached_commit(model.config.name_or_path, None)


def warn_of_drift(target: CausalLM, trained_for: str | None, revision: str | None) -> None:
    """Warn if `target` is the model `trained_for`, but loaded from another commit than the assistant's `revision`."""
    name, noted = target.config.name_or_path, getattr(target.config, "_commit_hash", None)
    if revision is None or name != trained_for:
        return
    commit = commit_of(target)
    # If transformers did not record the commit, `revision` may have been loaded, unless it is not in the cache.
    if commit in (None, revision) or (noted is None and _cached_commit(name, revision) is not None):
        return
    warnings.warn(
        f"This assistant was trained for {name!r} at commit {revision}, but commit {commit} was loaded. The output is "
        "still that of the target, but if the weights have changed, fewer candidates are accepted. To be sure, load "
        f"the target with revision={revision!r}.",
        stacklevel=2,
    )


def public_name(name: str) -> str:
    """A model's name without folders of this machine: `"/home/me/models/target"` becomes `"target"`."""
    is_path = os.path.isabs(name) or os.path.exists(name)  # noqa: PTH110, PTH117 - Path.exists fails at very long names
    return Path(name).resolve().name if is_path else name


def command(folders: bool = True) -> str:
    """The command line of this process, as `specdecpp ...`; with `folders=False` each path becomes its last part."""
    words = sys.argv[1:]
    if not folders:
        options = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
        words = [f"{name}{equals}{public_name(value)}" for name, equals, value in options]
    return shlex.join(["specdecpp", *words])


def source_commit() -> str | None:
    """The commit hash of this package's code; `None` if that is not in a git checkout, or git is missing."""
    git = shutil.which("git")
    if git is None:
        return None
    # --error-unmatch fails for untracked files, such as a package that is installed within another repository.
    for words in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
        found = subprocess.run(  # noqa: S603 - no shell, and no input of a user
            [git, "-C", Path(__file__).parent, *words], capture_output=True, text=True, check=False
        )
        if found.returncode:
            return None
    return found.stdout.strip()


def device_name(device: torch.device) -> str:
    """The name of a device, for example `NVIDIA H200` or `CPU (AMD EPYC, family 26, x86_64, AVX512)`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"CPU ({', '.join([*_processor(), platform.machine(), torch.backends.cpu.get_cpu_capability()])})"


@cache
def _processor() -> list[str]:
    """The processor's name and, on Linux, its family ("family 26"), because clouds use one name for different ones."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()] if platform.processor() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return [f"{word}{facts[name]}" for name, word in (("model name", ""), ("cpu family", "family ")) if name in facts]


def _cached_commit(name: str | None, revision: str | None) -> str | None:
    if not name or Path(name).exists():
        return None
    try:
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a deleted folder
        return None
    return extract_commit_hash(path, None) if isinstance(path, str) else None
