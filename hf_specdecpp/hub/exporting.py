"""`specdecpp export`: writes the draft of an assistant in a format that other engines serve (`export`)."""

from __future__ import annotations

import json
import shlex
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import PublishedKind
from hf_specdecpp.draft_kinds.known import kind_of
from hf_specdecpp.files import Repository, save_text
from hf_specdecpp.hub.repository import load_config, load_parts
from hf_specdecpp.serving import Destination, Exported

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
USUAL, MOST = 3, 8  # candidates per round: without a measured acceptance, and the maximum with one
COST_RATIO = 0.2  # time of a draft step in target passes, as with the models of the SpecDec++ paper


def export(
    assistant: str | Path, output: str | Path, target: str | Path | None = None, to: str | None = None
) -> Exported:
    """Write an assistant's draft into a new or empty folder. Returns commands of engines that serve it, and notes.

    Args:
        target: a Hub id or folder; by default the target in the assistant's `config.json`.
        to: `"vllm"`, `"sglang"` or `"llama.cpp"`: return only the commands of this engine, write them into `serve.sh`,
            and let the engine's own loader check the folder, if it is installed.

    `ValueError` if no engine serves a draft of this kind, the written files do not reproduce the draft, or the engine
    refuses them; `OSError` or an error of the Hub if `output` is not empty, or a file cannot be read or written."""
    output = Path(output)
    if to is not None and to not in ENGINES:
        raise ValueError(f"--to {to!r} must be one of {', '.join(ENGINES)}. Leave it out to print all commands.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} exists and is not an empty folder; its files could be mistaken for the draft's. Choose a new "
            "folder."
        )
    repository = Repository(str(assistant))
    config = load_config(repository)
    kind, named = kind_of(config), config.target_id if target is None else str(target)
    serves_head = kind.serves_heads and config.draft_id is not None and (config.head or {}).get("inputs") == "path"
    if isinstance(kind, PublishedKind) and kind.served_by and config.draft_id is not None and not serves_head:
        raise ValueError(
            f"This assistant drafts with {kind.describe(config)}, unchanged as published, so nothing is exported: "
            f"{kind.served_by.replace('TARGET', named or 'TARGET')}."
        )
    if kind.unserved and not serves_head:
        raise ValueError(kind.unserved.format(draft=kind.describe(config), target=named or "TARGET", output=output))
    head, parts = load_parts(repository, config)
    revision = config.target_revision if named == config.target_id else None
    # Written to the same disk, so that the finished folder only has to be renamed.
    beside = next(parent for parent in output.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside, prefix=f".{output.name}.") as temporary:
        folder = Path(temporary, "written")
        folder.mkdir()
        count, reason = draft_length(config)
        exported = kind.export(config, parts, Destination(folder, output, named, revision, count, head))
        if not serves_head:
            exported.notes.append(
                f"Each round has {count} candidates ({reason}). Engines do not use the stopping rule, the acceptance "
                f"head and the calibration of {assistant}. Try one candidate more and less."
            )
        if to is not None:
            commands = exported.commands[ENGINES[to]]
            exported = Exported({ENGINES[to]: commands}, [*exported.notes, check(to, commands, folder)])
            write_script(to, commands, folder)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            output.rmdir()  # some systems cannot rename onto a folder; fails if `output` was filled in the meantime
        folder.rename(output)
    return exported


def draft_length(config: SpecDecPPConfig) -> tuple[int, str]:
    """Return the number of candidates per round for other engines, and a clause with the reason: the length of the rule
    `"fixed"`; for other rules the k with the least time per token, (1 + 0.2 k) / (1 + a + ... + a^k), if training
    measured the acceptance a of a candidate; otherwise 3."""
    speculation, rates = SpeculationConfig.from_dict(config.speculation), config.acceptance_by_rank
    if speculation.rule == "fixed" and not speculation.draws_trees:
        return speculation.num_tokens, "the length of its rule"
    if not (measured := rates.get("greedy") or rates.get("sampled")):
        return USUAL, "the usual number, since no acceptance was measured"
    times = {k: (1.0 + COST_RATIO * k) / sum(measured[0] ** i for i in range(k + 1)) for k in range(1, MOST + 1)}
    return min(times, key=lambda k: times[k]), f"the fastest with the measured acceptance of {measured[0]:.2f}"


def check(to: str, commands: list[str], folder: Path) -> str:
    """If `to` is vLLM, and it is installed, let it read the configs of the target and of the draft in `folder`. Returns
    a sentence on the result. Raises vLLM's error if vLLM refuses them, usually a `ValueError`."""
    if to != "vllm" or find_spec("vllm") is None:
        return f"The loader of {ENGINES[to]} has not read the files: it is not installed here, or needs them converted."
    from vllm.engine.arg_utils import EngineArgs

    _, _, target, _, settings = shlex.split(commands[0])
    EngineArgs(model=target, speculative_config=json.loads(settings) | {"model": str(folder)}).create_engine_config()
    return "vLLM's own loader accepts the configs of target and draft."


def write_script(to: str, commands: list[str], folder: Path) -> None:
    """Write the commands of the engine `to` into the executable file `serve.sh`, which changes to the present working
    directory, skips conversions whose result exists, and passes its arguments on to the server."""
    path, (*conversions, server) = folder / "serve.sh", commands
    lines = ["#!/bin/sh", f"# {ENGINES[to]} serves this draft.", "set -e", f"cd {shlex.quote(str(Path.cwd()))}"]
    lines += [f"[ -e {shlex.quote(shlex.split(each)[-1])} ] || {each}" for each in conversions]
    save_text("\n".join([*lines, f'exec {server} "$@"']) + "\n", path)
    path.chmod(0o755)
