"""Where something came from: a model's commit on the Hub, this code's commit, the command, the device."""

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
    """The commit hash of a model's files: noted by transformers, or that of the default branch in the local cache."""
    return getattr(model.config, "_commit_hash", None) or _cached_commit(model.config.name_or_path, None)


def warn_of_drift(target: CausalLM, trained_for: str | None, revision: str | None) -> None:
    """Warn if `target` was loaded from another commit of its repository than an assistant was trained for."""
    name, noted = target.config.name_or_path, getattr(target.config, "_commit_hash", None)
    if revision is None or name != trained_for:
        return
    commit = commit_of(target)
    # Where transformers did not note the commit, only one that is not in the cache is certainly not the one loaded.
    if commit in (None, revision) or (noted is None and _cached_commit(name, revision) is not None):
        return
    warnings.warn(
        f"This assistant was trained for {name!r} at commit {revision}, but commit {commit} was loaded. The output is "
        "right all the same, but if the weights have changed, fewer candidates are accepted. To be sure load the "
        f"target with revision={revision!r}.",
        stacklevel=2,
    )


def public_name(name: str) -> str:
    """What others may read of the name of a model or file: a Hub id as it is, of a path its last part only.

    `"org/target"` stays, `"/home/me/models/target"` becomes `"target"`.
    """
    is_path = os.path.isabs(name) or os.path.exists(name)  # noqa: PTH110, PTH117 - Path.exists fails at very long names
    return Path(name).resolve().name if is_path else name


def command(folders: bool = True) -> str:
    """The command that runs, as it was typed, or without the folders of this machine."""
    words = sys.argv[1:]
    if not folders:
        options = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
        words = [f"{name}{equals}{public_name(value)}" for name, equals, value in options]
    return shlex.join(["specdecpp", *words])


def source_commit() -> str | None:
    """The commit of this package's code; `None` where it does not run from its own repository, or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    # A package installed below somebody's repository is not in it: --error-unmatch fails for files git does not track.
    for words in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
        found = subprocess.run(  # noqa: S603 - no shell, and no word of a user
            [git, "-C", Path(__file__).parent, *words], capture_output=True, text=True, check=False
        )
        if found.returncode:
            return None
    return found.stdout.strip()


def device_name(device: torch.device) -> str:
    """The model where it is known, for example `NVIDIA H200` or `CPU (AMD EPYC, family 26, x86_64, AVX512)`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"CPU ({', '.join([*_processor(), platform.machine(), torch.backends.cpu.get_cpu_capability()])})"


@cache
def _processor() -> list[str]:
    """Its name and family, where Linux says them: clouds give quite different processors the same name."""
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
    except HFValidationError:  # a folder that is gone
        return None
    return extract_commit_hash(path, None) if isinstance(path, str) else None
