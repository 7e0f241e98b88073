"""Make a module of a config and tensors that anybody may have written.

The config is read with bounds, names and shapes of the tensors are compared with what it says, and only then is a
module made: none of a repository's numbers decides how long loading takes or how much memory it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_specdecpp.config.value_checks import CURE, LAYER, check_arguments, shown
from hf_specdecpp.files import Weights, load_strict
from hf_specdecpp.models.causal_lm import renew_rotary

Module = TypeVar("Module", bound=nn.Module)

SPECULATORS = "speculators_model_type"  # marks the dialect of that package
DEFAULT_THETA = 10000.0  # of the original code, whatever the target's is
INSTEAD = "Load an EAGLE-3 or DFlash draft of this target, or train one of this package (specdecpp train)"


# Configs. -------------------------------------------------------------------------------------------------------------


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


def refuse_other_types(raw: Mapping[str, Any], own: str) -> None:
    """Raise `ValueError` for a config of speculators whose type is not `own`."""
    if (found := raw.get(SPECULATORS, own)) != own:
        raise ValueError(
            f"This repository holds a draft of speculators of type {shown(found)}, which hf_specdecpp cannot draft "
            f"with. {INSTEAD}."
        )


def layers_of(config: Mapping[str, Any], but: Iterable[str], cure: str, theta: float | None = None) -> dict[str, Any]:
    """What a config says of a draft's layers `but` some fields, in transformers' names; bounds are not checked yet.

    The rotary parameters are the draft's own, not a target's: of `rope_parameters`, or of `rope_theta` and
    `rope_scaling`. `ValueError`, with a `cure`, if they make no sense, or a part of each head only is rotated. `theta`:
    in the place of what stands there.
    """
    names = [name for name in LAYER if name not in (*but, "rope_parameters") and config.get(name) is not None]
    rope = dict(mapping(config, "rope_parameters") or mapping(config, "rope_scaling"))
    older, kind = rope.pop("type", None), rope.pop("rope_type", None)
    found = rope.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA
    found, kind = theta or found, kind or older or "default"
    share = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ValueError(
            f"The draft rotates a part of each head only (partial_rotary_factor={share}), which is not supported: it "
            "would guess wrongly. Look for another draft of the target, or train one (specdecpp train)."
        )
    if type(found) not in (int, float) or found <= 0 or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"The draft's rotary parameters make no sense: rope_theta={found!r}, {rope}. {cure}")
    if kind in ("mrope", "default") or "mrope_section" in rope:
        rope, kind = {}, "default"  # a draft's positions are those of text
    rotary = {"rope_type": kind, "rope_theta": found, **rope}
    return {**{name: config[name] for name in names}, "rope_parameters": rotary}


@contextmanager
def as_described(name: str) -> Iterator[None]:
    """What goes wrong within is a `ValueError` about the description of a module."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for numbers that do not go together
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        what = what.removesuffix(CURE).strip(" .")[:600]
        raise ValueError(f"No {name} can be built as it is described: {what}. {CURE}") from None


def read_own(settings: Any, build: Callable[..., Module], title: str, arguments: dict[str, Any], path: Path) -> Module:
    """A draft that was trained here, with these arguments of its settings and the tensors in a file; errors of `build`.
    Nothing but the header of the file is read before names and shapes are seen to fit."""
    with as_described(title):
        check_arguments(settings, arguments)
        made = settings(**arguments)
    weights = Weights.at(path)
    build(made, weights.outline(), str(path))
    return build(made, weights.all(), str(path))


# Tensors. -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """What the tensors of a checkpoint are called here, and in its file.

    Attributes:
        patterns: each in turn is replaced in a name of the file by what stands beside it.
        ignored: names of tensors that say nothing, such as rotary frequencies.
        original: the name in a file of what has this name here: the patterns undone.
    """

    patterns: Sequence[tuple[str, str]] = ()
    ignored: str = "(?!)"
    original: Callable[[str], str] = str

    def here(self, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint by their names here; `ValueError` if two have one name."""
        named: dict[str, Tensor] = {}
        for there, tensor in tensors.items():
            if re.search(self.ignored, there):
                continue
            if (name := renamed(there, self.patterns)) in named:
                raise ValueError(
                    f"{source} has {self.original(name)} twice, once as {there}, so it is not known which of them is "
                    "meant. The file is damaged (download it again) or of a variant that hf_specdecpp does not know."
                )
            named[name] = tensor
        return named

    def in_file(self, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The tensors of a module by their names in a file, in a dtype; as they are by default."""
        return {self.original(name): tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}


def renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    """The name here of a tensor of a checkpoint."""
    for pattern, here in patterns:
        name = re.sub(pattern, here, name)
    return name


def build(
    make: Callable[[], Module], named: Mapping[str, Tensor], depth: int, source: str, title: str, names: Names = Names()
) -> Module:  # fmt: skip
    """A draft with the tensors of a checkpoint, which are taken as they are, not copied; `ValueError` if it cannot be
    made, or a tensor is missing, unexpected, of another shape, or of whole numbers. Of tensors on the meta device
    (`Weights.outline`) all is checked but the numbers in them.

    Args:
        make: makes it; is called on no device.
        named: the tensors, by the names that they have in it.
        depth: how many layers the config says. That is compared first: making layers takes time also on no device.
        source, title, names: where they are from, and what such drafts and their tensors are called, for messages.
    """
    found = {int(match[1]) for name in named if (match := re.search(r"(?:^|\.)layers\.(\d{1,4})\.", name))}
    if found and found != set(range(depth)):
        raise ValueError(
            f"{source} has tensors of {len(found)} layers, and config.json says {depth} (num_hidden_layers). The two "
            "do not belong together: download the repository again."
        )
    with as_described(title), torch.device("meta"):
        model = make()
    expected: Mapping[str, Tensor] = model.state_dict()
    missing, unexpected = set(expected) - set(named), set(named) - set(expected)
    if missing or unexpected:
        raise ValueError(not_of_form(source, title, map(names.original, missing), map(names.original, unexpected)))
    for name, wanted in expected.items():
        tensor, there = named[name], f"{source}: {names.original(name)}"
        if tensor.shape != wanted.shape:
            raise ValueError(
                f"{there} has shape {list(tensor.shape)}, and config.json makes it {list(wanted.shape)}. The two do "
                "not belong together: download the repository again."
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{there} holds {str(tensor.dtype)[6:]}, and weights are floating point. Quantised drafts cannot be "
                "loaded: look for the draft in bfloat16."
            )
    model.load_state_dict(named, assign=True)
    with as_described(title):
        renew_rotary(model, torch.device("cpu"))
        if not all(buffer.is_meta or buffer.isfinite().all() for buffer in model.buffers()):
            raise ValueError("its rotary frequencies are not finite")
        rotated = {2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
        if not rotated <= (heads := {each.head_dim for each in model.modules() if hasattr(each, "head_dim")}):
            raise ValueError(f"heads of {heads} numbers cannot be rotated by frequencies for {rotated}")
    return model.eval().requires_grad_(False)


def not_of_form(source: str, title: str, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """The error message for tensors that do not match a config: names of missing and of unexpected tensors."""
    lists = (("missing", sorted(missing)), ("unexpected", sorted(unexpected)))
    named = ", ".join(f"{what} {', '.join(names[:9])}" for what, names in lists if names)
    article = "an" if title[0] in "AEIOU" else "a"
    return (
        f"{source}: this is not {article} {title} of the form that this package reads: {named}. The file is incomplete "
        f"(download it again) or of another form. {INSTEAD}."
    )


def read_module(kind: type[Module], name: str, arguments: dict[str, Any], path: Path, hint: str) -> Module:
    """A module with these arguments, whose weights are in `path`. No memory is taken before they are seen to fit.
    `ValueError` if the arguments make no sense, or the file is damaged or does not fit them. `name` and `hint`: what it
    is called in a message, and what ends the message if the weights are of another one."""
    with as_described(name):
        check_arguments(kind.__init__, arguments)
        with torch.device("meta"):
            shapes = {key: tensor.shape for key, tensor in kind(**arguments).state_dict().items()}
    tensors = load_strict(path, shapes, hint)
    if odd := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise ValueError(f"{path}: {odd[0]} holds {str(tensors[odd[0]].dtype)[6:]}, no floating point numbers. {hint}")
    module = kind(**arguments)
    module.load_state_dict(tensors)
    return module.eval()
