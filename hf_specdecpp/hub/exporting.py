"""`specdecpp export`: writes the draft of an assistant in a format that other engines serve (`export`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import PublishedKind
from hf_specdecpp.draft_kinds.known import kind_of
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import load_config, load_parts
from hf_specdecpp.serving import Destination, Exported

USUAL_TOKENS = 3  # per round, unless the assistant has a fixed length


def export(assistant: str | Path, output: str | Path, target: str | Path | None = None) -> Exported:
    """Write the draft of an assistant into a folder that is new or empty, for vLLM, SGLang, llama.cpp or transformers.

    `target` is a Hub id or folder; by default the target in the assistant's `config.json`.

    Raises:
        ValueError: no engine serves a draft of this kind, or the written files do not reproduce the draft.
        OSError, huggingface_hub errors: `output` is not empty, or a file is missing or cannot be read or written.
    """
    output = Path(output)
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
        speculation = SpeculationConfig.from_dict(config.speculation)
        is_fixed = speculation.rule == "fixed" and not speculation.draws_trees
        to = Destination(folder, output, named, revision, speculation.num_tokens if is_fixed else USUAL_TOKENS, head)
        exported = kind.export(config, parts, to)
        if not serves_head:
            exported.notes.append(
                f"Engines draft a fixed number of tokens, here {to.num_tokens}, and take no stopping rule, acceptance "
                f"head or calibration: these stay in {assistant}. Try one token more and less."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            output.rmdir()  # some systems cannot rename onto a folder; fails if `output` was filled in the meantime
        folder.rename(output)
    return exported
