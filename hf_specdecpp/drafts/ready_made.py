"""What drafts have in common that others trained for a target: `ReadyMade`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafts.kind import Kind, Loading, Parts
from hf_specdecpp.files import CHECKPOINT, INDEX, SHARDS, Repository, find_weights, read_fields, read_weights
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.serving.destination import Destination, Exported


class ReadyMade(Kind):
    """A draft that reads the target's states. `config.draft_id` names the repository that others trained it in.

    Attributes:
        title: what the world calls such drafts.
    """

    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "target"
    foreign_files = (CHECKPOINT, INDEX, SHARDS)
    title: ClassVar[str]

    def config_of(self, source: Repository, commit: str | None, **more: Any) -> SpecDecPPConfig:
        """The config of an assistant that drafts with what is in a repository.

        Args:
            more: of its fields.
        """
        return SpecDecPPConfig(
            draft_kind=self.name,
            draft_id=source.full_name,
            draft_revision=commit,
            speculation=SpeculationConfig(rule="throughput").to_dict(),
            **more,
        )

    def is_foreign(self, config: SpecDecPPConfig) -> bool:
        return config.draft_id is not None

    def check_shareable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is not None and Path(config.draft_id).exists():
            raise ValueError(
                f"The {self.title} draft {config.draft_id!r} is a local folder, so nobody else could load this "
                "assistant. Push the draft first, and load it from its Hub id."
            )

    def module_file(self, config: SpecDecPPConfig) -> str | None:
        if config.draft_id is None:
            return super().module_file(config)
        if config.draft_id != config.name_or_path:
            return None
        folder = Path(config.draft_id)
        return INDEX if (folder / INDEX).is_file() and not (folder / CHECKPOINT).is_file() else CHECKPOINT

    def source(self, config: SpecDecPPConfig, repository: Repository, draft: str | Path | None) -> Repository:
        """The draft's own repository, at its commit.

        Args:
            repository: the assistant's.
            draft: where it is, in the place of what the config names.
        """
        named, pinned = (config.draft_id, config.draft_revision) if draft is None else (str(draft), None)
        return Repository.named(str(named), pinned, None, repository.hub_kwargs)

    def pinned(self, config: SpecDecPPConfig) -> str:
        """The draft and its commit, for messages."""
        return f"{self.title} {pinned(config)}"

    def load(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> None:
        """It is made of a target."""

    def usual_layers(self, depth: int) -> int | list[int]:
        return [depth - 1]


class TakenAsIs(ReadyMade):
    """One that others trained and nobody changes here: an assistant names its repository, where its weights stay.

    Attributes:
        served_by: who else serves it, and how, for messages.
    """

    served_by: ClassVar[str]

    def owns(self, raw: Mapping[str, Any]) -> bool:
        return super().owns(raw) or self.is_ready_made(raw)

    def read_model(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> nn.Module:
        """The draft that a config and its tensors, which are shared, make; `ValueError` if they make none."""
        raise NotImplementedError

    def of_model(self, draft: CausalLM) -> tuple[SpecDecPPConfig, nn.Module]:
        """The config of an assistant with a model object, and the draft, which shares its tensors."""
        config = SpecDecPPConfig(
            draft_kind=self.name, draft_id=draft.config.name_or_path or None, draft_revision=commit_of(draft),
        )  # fmt: skip
        return config, self.read_model(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)

    def check_foreign(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> None:
        self.read_model(raw, tensors, source)

    def check_storable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is None and not self.module_files:  # else its weights are stored with the assistant
            raise ValueError(
                f"The {self.title} draft is a model in memory without a Hub id or folder, so the saved assistant could "
                "not be loaded. Save the draft, and load it from there: from_draft(folder, target=model)."
            )

    def read_module(self, config: SpecDecPPConfig, path: Path) -> nn.Module:  # noqa: ARG002
        return self.read_model(read_fields(path.parent / "config.json"), read_weights(path), str(path))

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> nn.Module:
        if is_model(draft):
            return self.of_model(draft)[1]
        self.check_storable(config)
        source = self.source(config, repository, draft)
        source.file("config.json")
        if (path := find_weights(source)) is None:
            raise ValueError(
                f"{source.full_name!r} has neither {CHECKPOINT} nor {INDEX}, and nothing but safetensors is opened "
                "here: a pickle could run code. Ask its author for safetensors."
            )
        return self.read_module(config, path)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        """The config names its repository."""

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        """Its weights stay there."""

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        raise ValueError(
            f"This assistant drafts with {self.describe(config)}, which nobody changed here, so nothing is exported: "
            f"{self.served_by}."
        )


def raw_config(name: CausalLM | str | Path) -> dict[str, Any] | None:
    """The `config.json` of a folder or a Hub id, or of a model object; `None` if it is not there, or is none: whoever
    loads it says so."""
    if is_model(name):
        config = getattr(name, "config", None)
        return config.to_dict() if isinstance(config, PreTrainedConfig) else None
    try:
        return read_fields(Repository.named(str(name)).file("config.json"))
    except (OSError, ValueError):
        return None


def pinned(config: SpecDecPPConfig) -> str:
    """The repository of a draft and its commit, for messages."""
    return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"


def is_model(draft: CausalLM | str | Path | None) -> bool:
    """Whether a draft is given as an object."""
    return draft is not None and not isinstance(draft, str | Path)
