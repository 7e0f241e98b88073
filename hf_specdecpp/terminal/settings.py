"""What `specdecpp demo` and `specdecpp chat` are told: their options (`cli_options`). Imports nothing that is slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_specdecpp.cli_options import DraftChoice


@dataclass
class DemoConfig(DraftChoice):
    """A demonstration.

    Args:
        max_new_tokens (tokens): length of an answer.
        prompt: what to ask; may be repeated; three of ours by default.
        sample: draw tokens (seeded) instead of taking the likeliest.
        svg: file for a picture of the last answer, written with and without.
    """

    max_new_tokens: int = field(default=64, metadata={"min": 1})
    prompt: list[str] = field(default_factory=list)
    sample: bool = False
    svg: Path | None = field(default=None, metadata={"metavar": "FILE"})


@dataclass
class ChatConfig(DraftChoice):
    """A conversation.

    Args:
        max_new_tokens (tokens): longest answer.
        temperature: 0 takes the likeliest tokens; by default as the model's config says.
        system: what the model is told before the first message.
        device: of the target; by default an accelerator if there is one.
    """

    max_new_tokens: int = field(default=512, metadata={"min": 1})
    temperature: float | None = field(default=None, metadata={"min": 0.0})
    system: str | None = None
    device: str | None = None
