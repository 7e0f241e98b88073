"""`specdecpp export`: write the draft of an assistant in a form that other engines serve (`export`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import PublishedKind
from hf_specdecpp.draft_kinds.known import kind_of
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import load_config, load_parts
from hf_specdecpp.serving import Destination, Exported

USUAL_TOKENS = 3  # a round, where the assistant's own rule decides in each round anew


def export(assistant: str | Path, output: str | Path, target: str | Path | None = None) -> Exported:
    """Write the draft of an assistant into a folder that is new or empty, for vLLM, SGLang, llama.cpp or transformers.

    `target` is a Hub id or folder, in the place of what the assistant's `config.json` names.

    Raises:
        ValueError: no engine serves a draft of this kind, or what was written is not the draft.
        OSError, huggingface_hub errors: `output` is taken, or a file is missing or cannot be reached or written.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} is there already and is not an empty folder; a draft beside other files could be taken for "
            "theirs. Choose a new folder."
        )
    repository = Repository(str(assistant))
    config = load_config(repository)
    kind, named = kind_of(config), config.target_id if target is None else str(target)
    if isinstance(kind, PublishedKind) and kind.served_by and config.draft_id is not None:
        raise ValueError(
            f"This assistant drafts with {kind.describe(config)}, which nobody changed here, so nothing is exported: "
            f"{kind.served_by.replace('TARGET', named or 'TARGET')}."
        )
    if kind.unserved:
        raise ValueError(kind.unserved.format(draft=kind.describe(config), target=named or "TARGET", output=output))
    _, parts = load_parts(repository, config)
    revision = config.target_revision if named == config.target_id else None
    # Beside its place, on the same disk, so that the finished folder only has to be renamed.
    beside = next(parent for parent in output.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside, prefix=f".{output.name}.") as temporary:
        folder = Path(temporary, "written")
        folder.mkdir()
        speculation = SpeculationConfig.from_dict(config.speculation)
        is_fixed = speculation.rule == "fixed" and not speculation.draws_trees
        to = Destination(folder, output, named, revision, speculation.num_tokens if is_fixed else USUAL_TOKENS)
        exported = kind.export(config, parts, to)
        exported.notes.append(
            f"Engines draft a fixed number of tokens, here {to.num_tokens}, and take no stopping rule, acceptance head "
            f"or calibration: these stay in {assistant}. Try one token more and less."
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            output.rmdir()  # some systems rename onto no folder; one that was filled in the meantime stays
        folder.rename(output)
    return exported
