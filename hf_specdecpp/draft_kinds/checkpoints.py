"""Make a module from a config and tensors that are not trusted.

The config's numbers are bounded, and the names and shapes of the tensors are compared with the config, before memory
for weights is used: a repository cannot make loading slow or large by writing big numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_specdecpp.config.value_checks import CURE, LAYER, check_values, hints_of, shown
from hf_specdecpp.files import load_strict
from hf_specdecpp.models.causal_lm import article, renew_rotary

logger = logging.get_logger("hf_specdecpp")

Module = TypeVar("Module", bound=nn.Module)

SPECULATORS = "speculators_model_type"  # this field identifies configs of the package speculators
DEFAULT_THETA = 10000.0  # the default of the original EAGLE code, independent of the target
INSTEAD = "Load an EAGLE-3 or DFlash draft of this target (specdecpp drafts lists some), or train one (specdecpp train)"
RELATIVES = {  # kinds that are refused, by a part of their name in a config (in lower case)
    "dflash2": "DFlash2 draft (DFlash with grouped dynamic causal convolutions over the rows of the block, and a "
    "selector that scores the likeliest tokens of each row by the token before)",
    "domino": "Domino draft (DFlash with a recurrent network over the drafted tokens)",
    "peagle": "P-EAGLE draft (EAGLE-3 that proposes several tokens with one pass over trained mask states)",
}


# Configs. -------------------------------------------------------------------------------------------------------------


def mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping in the field `name` of a config, `{}` if missing; `ValueError` if it is not a mapping."""
    found = raw.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={str(found)[:200]!r} of config.json must be a mapping. Download it again.")
    return found


def target_of(raw: Mapping[str, Any]) -> str | None:
    """Return the target's name (Hub id or folder) in a config of speculators; `None` if there is none."""
    name = mapping(mapping(raw, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def refuse_other_types(raw: Mapping[str, Any], own: str) -> None:
    """Raise `ValueError` for the config of one of `RELATIVES`, or in speculators' format of another type than `own`."""
    named = f"{raw.get(SPECULATORS)} {raw.get('architectures')} {mapping(raw, 'dflash_config').get('projector_type')}"
    if own == "eagle3" and {"ptd_token_id", "pard_token"} & set(raw):  # of mask tokens
        named += "peagle"
    if found := [what for name, what in RELATIVES.items() if name in named.lower()]:
        refuse(found[0])
    if (found := raw.get(SPECULATORS, own)) != own:
        refuse(f"draft of speculators of type {shown(found)}")


def refuse(what: str) -> NoReturn:
    raise ValueError(f"This repository holds a {what}, which hf_specdecpp cannot draft with. {INSTEAD}.")


def layers_of(config: Mapping[str, Any], but: Iterable[str], cure: str, theta: float | None = None) -> dict[str, Any]:
    """Return the fields of a config that describe a draft's layers (`LAYER`), except those in `but`. Checks no bounds.

    The result's `rope_parameters` are made of the config's `rope_parameters`, or of its `rope_theta` (10000 if missing)
    and `rope_scaling`, never of the target's; `theta`, if given, replaces `rope_theta`. `ValueError` if they are
    invalid (the message ends with `cure`), or if only a part of each head is rotated."""
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
        rope, kind = {}, "default"  # a draft has positions of text tokens only
    rotary = {"rope_type": kind, "rope_theta": found, **rope}
    return {**{name: config[name] for name in names}, "rope_parameters": rotary}


@contextmanager
def as_described(name: str) -> Iterator[None]:
    """Context that converts exceptions to a `ValueError`: `name` ("EAGLE-3 draft") cannot be built as described."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - transformers and torch raise various errors for inconsistent sizes
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        what = what.removesuffix(CURE).strip(" .")[:600]
        raise ValueError(f"No {name} can be built as it is described: {what}. {CURE}") from None


# Tensors. -------------------------------------------------------------------------------------------------------------


def renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    """Return a tensor's name in a checkpoint after replacing all patterns (regular expression, replacement) in turn."""
    for pattern, here in patterns:
        name = re.sub(pattern, here, name)
    return name


def build(
    make: Callable[[], Module], named: Mapping[str, Tensor], depth: int, source: str, title: str, original: Any = str
) -> Module:  # fmt: skip
    """Make a draft's module from the tensors of a checkpoint, without copying them. `ValueError` if the module cannot
    be made, or if a tensor is missing, unexpected, of another shape, or not floating point. Tensors on the meta device
    (`Weights.outline`) get all these checks, too.

    Args:
        make: makes the module; called on the meta device.
        named: the tensors, by their names in the module.
        depth: number of layers in the config, compared with `named` before `make`, which takes time for each layer.
        source, title: for messages: the checkpoint's name, and the kind of draft.
        original: for messages, too: maps the name of a tensor in the module to the name in the checkpoint."""
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
        raise ValueError(not_of_form(source, title, map(original, missing), map(original, unexpected)))
    for name, wanted in expected.items():
        tensor, there = named[name], f"{source}: {original(name)}"
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


def own_modules(named: Mapping[str, Tensor], count: int | None, vocab_size: int | None) -> dict[str, Any]:
    """Return the settings `draft_vocab_size`, `own_embeddings` and `own_head` of a draft with these tensors, by name in
    the module. `count`: number of the draft's tokens in its config; `None`: as many as its LM head has rows.
    `vocab_size`: number of the target's tokens; a draft with as many has `draft_vocab_size=None`."""
    head = named.get("lm_head.weight")
    if count is None and head is not None and head.dim():
        count = head.shape[0]
    is_reduced = count not in (None, vocab_size)
    return {
        "draft_vocab_size": count if is_reduced else None,
        "own_embeddings": any(name.endswith("embed_tokens.weight") for name in named),
        "own_head": head is not None or is_reduced,  # the target's head has all tokens
    }


def token_ids(named: dict[str, Tensor], draft_vocab_size: int | None, vocab_size: int, source: str) -> Tensor | None:
    """Remove the tensors `d2t` and `t2d` from `named`, and return the target's ids of the draft's tokens,
    `[draft_vocab_size]`; `None` if the draft has all tokens, or `d2t` is on the meta device. `ValueError` if the
    tensors are damaged, or the draft has fewer tokens and no `d2t`.

    `d2t` contains, for each of the draft's tokens, the target's id minus the draft's (in some files the target's id
    itself). `t2d` `[vocab_size]`, if present, contains whether the draft has each of the target's tokens. Example: with
    `d2t` = 0, 0, 3 the draft's tokens 0, 1, 2 are the target's 0, 1, 5."""
    offsets, kept = named.pop("d2t", None), named.pop("t2d", None)
    count = draft_vocab_size or vocab_size
    if offsets is None:
        if count == vocab_size:
            return None
        raise ValueError(
            f"{source} has no d2t, which says what its {count} tokens are among the target's {vocab_size}. The file is "
            "incomplete: download it again."
        )
    if offsets.dtype not in (torch.int64, torch.int32) or tuple(offsets.shape) != (count,):
        raise ValueError(
            f"{source}: d2t is {list(offsets.shape)} of {str(offsets.dtype)[6:]}, and must be [{count}] whole numbers "
            "(int64), one for each of the draft's tokens. The file is damaged: download it again."
        )
    if offsets.is_meta:  # an outline: values are read later
        return None
    ids = torch.arange(count) + offsets.long()
    listed = None if kept is None else kept.flatten().bool().nonzero().flatten()  # nonzero lacks some dtypes
    if listed is not None and not torch.equal(ids.sort().values, listed):
        if not torch.equal(offsets.long(), listed):
            raise ValueError(
                f"{source}: d2t and t2d name different tokens ({count} in d2t, {len(listed)} in t2d), so the draft "
                "would propose wrong ones. The file is damaged: download it again."
            )
        logger.warning(f"{source}: d2t holds the target's ids themselves where offsets are usual. It is read as that.")
        ids = listed
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != count:
        raise ValueError(
            f"{source}: d2t makes ids from {int(ids.min())} to {int(ids.max())}, {ids.unique().numel()} different ones "
            f"of {count}. They must be distinct and below vocab_size={vocab_size}: the file is damaged, download it "
            "again."
        )
    return None if count == vocab_size and torch.equal(ids, torch.arange(count)) else ids


def offsets_of(ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` and `t2d` `[vocab_size]` of a draft with these `ids`, inverse of `token_ids`; `{}` for `None`."""
    if ids is None:
        return {}
    ids, known = ids.cpu(), torch.zeros(vocab_size, dtype=torch.bool)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known.index_fill_(0, ids, True)}


def not_of_form(source: str, title: str, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Return the error message that the checkpoint `source` is no `title`, with its missing and unexpected tensors."""
    lists = (("missing", sorted(missing)), ("unexpected", sorted(unexpected)))
    named = ", ".join(f"{what} {', '.join(names[:9])}" for what, names in lists if names)
    return (
        f"{source}: this is not {article(title)} of the form that this package reads: {named}. The file is incomplete "
        f"(download it again) or of another form. {INSTEAD}."
    )


def read_module(kind: type[Module], name: str, arguments: dict[str, Any], path: Path, hint: str) -> Module:
    """Make `kind(**arguments)` with the weights in the file `path`. Memory is used only after names and shapes were
    checked. `ValueError` if the arguments are invalid, or the file is damaged or does not fit them. For messages:
    `name` of the module, and `hint`, the last sentence if the weights do not fit."""
    with as_described(name):
        check_values(arguments, hints_of(kind.__init__))
        with torch.device("meta"):
            shapes = {key: tensor.shape for key, tensor in kind(**arguments).state_dict().items()}
    tensors = load_strict(path, shapes, hint)
    if odd := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise ValueError(f"{path}: {odd[0]} holds {str(tensors[odd[0]].dtype)[6:]}, no floating point numbers. {hint}")
    module = kind(**arguments)
    module.load_state_dict(tensors)
    return module.eval()
