"""What others ask of a kind of draft: how its drafts are made (`Kind`), and how they are trained (`Trainable`).

How they are stored is in `stored.py`. A kind holds nothing of an assistant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafts.stored import Parts, Stored
from hf_specdecpp.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Loading:
    """Where a draft is loaded to, and from.

    Attributes:
        draft: it, or where it is, in the place of what the config names.
        target: that it is made of, or in whose dtype and on whose device it is loaded, unless these are given.
        hub_kwargs: for downloads.
    """

    draft: CausalLM | str | Path | None = None
    target: CausalLM | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainable:
    """What a training run asks of a kind.

    Attributes:
        first_layers: how many of the target's first layers draft unless the run says otherwise; `None` for its last
            one alone.
        own_layers: whether it drafts with layers of its own, all of which are trained, and no adapter.
        blocks: whether one pass of these proposes several candidates.
        cannot: what such a run cannot do, with the reason: `"stay untrained"`, `"late verdicts"` (a head that judges a
            candidate after the draft has read it), `"draft vocabulary"`.
    """

    first_layers: int | None = None
    own_layers: bool = False
    blocks: bool = False
    cannot: Mapping[Literal["stay untrained", "late verdicts", "draft vocabulary"], str] = field(default_factory=dict)


class Kind(ABC):
    """A kind of draft.

    Attributes:
        name: `config.draft_kind`.
        rests_on: whose weights it drafts with: `"draft"`, a model of its own; `"target"`, which it meets when the
            assistant is attached; or `"nothing"`.
        stored: what an assistant's repository has of it, and in which repositories others publish it.
        trainable: how it is trained; `None` where it is not.
        cannot: what cannot be done with it, with the reason: `"replays"` (of texts that were recorded once), and
            `"training"` where it is not `trainable`.
    """

    name: ClassVar[str]
    rests_on: ClassVar[Literal["draft", "target", "nothing"]]
    stored: ClassVar[Stored]
    trainable: ClassVar[Trainable | None] = None
    cannot: ClassVar[Mapping[Literal["replays", "training"], str]] = {}

    @abstractmethod
    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """The draft in a few words, for messages, cards and reports."""

    @abstractmethod
    def draft(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        """The draft of an assistant. One that rests on the target is made of `how.target`.

        Raises:
            ValueError: its parts do not go together, or do not fit the target.
        """
