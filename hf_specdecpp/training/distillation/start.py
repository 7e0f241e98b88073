"""Begin distillation with what an earlier run trained, or with layers that others trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_specdecpp.drafts.kind import Kind
from hf_specdecpp.drafts.known import kind_of
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, load_config
from hf_specdecpp.models.adapters import read_adapter
from hf_specdecpp.training.distillation.student import Student
from hf_specdecpp.training.models import LAYER_CONFIG, load_fusion, load_layer


@torch.no_grad()
def start_from(student: Student, work: Path) -> None:
    """Copy what another run has trained into a draft that is about to be.

    Args:
        student: of the same target, layers and kind of draft, with an adapter of the same rank and alpha.
        work: the other run's `work_dir`.

    Raises:
        ValueError: there is nothing trained, or it is of another shape.
    """
    if not (work / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"distill.start_from={str(work)!r} has no trained adapter. Name the work_dir of a run.")
    theirs = read_adapter(work / ADAPTER_FOLDER).loras
    model = student.get_base_model()
    ours = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    scaling = {name: module.scaling["default"] for name, module in ours.items()}
    if scaling != {name: lora.scaling for name, lora in theirs.items()}:
        raise ValueError(
            f"The adapter in {work} is for {len(theirs)} modules and this draft's for {len(ours)}, or their rank and "
            "alpha differ. Set layers, distill.rank and distill.alpha as in that run."
        )
    for name, module in ours.items():
        for half, trained in ((module.lora_A, theirs[name].a), (module.lora_B, theirs[name].b)):
            weight = half["default"].weight
            if weight.shape != trained.shape:
                raise ValueError(
                    f"The adapter in {work} has {list(trained.shape)} for {name}, this draft's {list(weight.shape)}. "
                    "Set distill.rank and distill.alpha as in that run."
                )
            weight.copy_(trained)
    if student.fusion is not None:
        fusion = load_fusion(work)
        if fusion.to_config() != student.fusion.to_config():
            raise ValueError(
                f"The fusion in {work} is of {fusion.to_config()}, this draft's of {student.fusion.to_config()}. Set "
                "reads and distill.fusion_rank as in that run."
            )
        student.fusion.load_state_dict(fusion.state_dict())


def layer_from(kind: Kind, start: str) -> Any:
    """Layers of another run's `work_dir`, or of a repository; errors as in `SpecDecPPAssistant.from_pretrained`."""
    if (Path(start) / LAYER_CONFIG).is_file():
        return load_layer(kind, Path(start))
    repository = Repository(start)
    config = load_config(repository)
    if (found := kind_of(config)) is not kind:
        raise ValueError(
            f"distill.start_from={start!r} has a draft of the kind {found.name}, and {kind.name} is trained. Name the "
            "work_dir of a run of the same kind, or the repository of such a draft."
        )
    return kind.stored.load(config, repository)
