"""What configs and tensors of drafts that others trained have in common, whatever the kind of draft."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_specdecpp.config.bounds import ROPE

SPECULATORS = "speculators_model_type"  # marks the dialect of that package
DEFAULT_THETA = 10000.0  # of the original code, whatever the target's is


def is_ours(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of an assistant, or a damaged one of one."""
    return raw.get("model_type") == "specdecpp" or "draft_kind" in raw


def mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a config, empty where it is missing; `ValueError` where it is something else."""
    found = raw.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={str(found)[:200]!r} of config.json must be a mapping. Download it again.")
    return found


def target_of(raw: Mapping[str, Any]) -> str | None:
    """The target that a config of speculators names, if it does."""
    name = mapping(mapping(raw, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def rotary_parameters(layers: Mapping[str, Any], cure: str, theta: float | None = None) -> dict[str, Any]:
    """The rotary parameters of a draft's layers, as transformers takes them. They are its own, not a target's.

    Args:
        layers: the config of the layers, with `rope_parameters`, or with `rope_theta` and `rope_scaling`.
        cure: a sentence that ends a message: what to do where they make no sense.
        theta: in the place of what stands there.

    Raises:
        ValueError: a part of each head only is rotated, or they make no sense.
    """
    rope = dict(mapping(layers, "rope_parameters") or mapping(layers, "rope_scaling"))
    older, kind = rope.pop("type", None), rope.pop("rope_type", None)
    found = rope.pop("rope_theta", None) or layers.get("rope_theta") or DEFAULT_THETA
    found, kind = theta or found, kind or older or "default"
    share = rope.pop("partial_rotary_factor", None) or layers.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ValueError(
            f"The draft rotates a part of each head only (partial_rotary_factor={share}), which is not supported: it "
            "would guess wrongly. Look for another draft of the target, or train one (specdecpp train)."
        )
    if type(found) not in (int, float) or found <= 0 or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"The draft's rotary parameters make no sense: rope_theta={found!r}, {rope}. {cure}")
    if kind in ("mrope", "default") or "mrope_section" in rope:
        rope, kind = {}, "default"  # a draft's positions are those of text
    return {"rope_type": kind, "rope_theta": found, **{name: rope[name] for name in ROPE if name in rope}}


def renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    """The name here of a tensor of a checkpoint: each pattern in turn is replaced by what stands beside it."""
    for pattern, here in patterns:
        name = re.sub(pattern, here, name)
    return name


def check_depth(named: Iterable[str], depth: int, source: str) -> None:
    """Raise `ValueError` unless tensors are of as many layers as a config says.

    That is seen before layers are made, which takes time also on no device.
    """
    found = {int(match[1]) for name in named if (match := re.search(r"(?:^|\.)layers\.(\d{1,4})\.", name))}
    if found != set(range(depth)):
        raise ValueError(
            f"{source} has tensors of {len(found)} layers, and config.json says {depth} (num_hidden_layers). The two "
            "do not belong together: download the repository again."
        )


def check_tensors(
    named: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    source: str,
    variant: str,
    original: Callable[[str], str] = str,
) -> None:
    """Raise `ValueError` unless a checkpoint has the tensors of a draft, by name and shape, in floating point.

    Args:
        expected: on no device.
        source: where they are from.
        variant: of what a draft is that has others.
        original: the name in a file of what has this name here.
    """
    for what, names in (("lacks", set(expected) - set(named)), ("has unknown", set(named) - set(expected))):
        if names:
            raise ValueError(
                f"{source} {what} {', '.join(sorted(map(original, names))[:9])}, so what the draft computes is not "
                f"known. The file is incomplete (download it again), or of a variant {variant}that config.json does "
                "not describe or hf_specdecpp does not know: look for another draft of the target."
            )
    for name, wanted in expected.items():
        tensor = named[name]
        if tensor.shape != wanted.shape:
            raise ValueError(
                f"{source}: {original(name)} has shape {list(tensor.shape)}, and config.json makes it "
                f"{list(wanted.shape)}. The two do not belong together: download the repository again."
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{source}: {original(name)} holds {str(tensor.dtype)[6:]}, and weights are floating point. Quantised "
                "drafts cannot be loaded: look for the draft in bfloat16."
            )
