"""Which layers of the target an EAGLE-3 checkpoint reads: its ids count what goes into layers, or what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specdecpp.drafts.eagle3.settings import Eagle3Settings


def usual_reads(depth: int) -> list[int]:
    """The layers whose outputs are read where a checkpoint names none, of so many: a low, a middle and a high one.

    Example: of 32 layers 1, 15 and 28, which are the ids 2, 16 and 29 of what goes into a layer.
    """
    return [layer - 1 for layer in (2, depth // 2, depth - 3)]


def readings(ids: Sequence[int] | None, depth: int) -> list[list[int]]:
    """The layers whose outputs the ids of a checkpoint may mean, the likelier meaning first.

    One convention counts what goes into a layer (EAGLE, vLLM, speculators): id j is the output of layer j - 1. The
    other counts outputs (SpecForge, NVIDIA): id j is the output of layer j. The usual list tells which it is; of others
    the file does not say, but one that begins with 1 is rather of the second.

    Example: with a depth of 32 `[1, 15, 28]` means `[1, 15, 28]`, `[2, 16, 29]` means `[1, 15, 28]`, and `[2, 18, 30]`
    means `[1, 17, 29]` or `[2, 18, 30]`.

    Raises:
        ValueError: the target has no such layers.
    """
    if ids is None:
        if depth < 4:
            raise ValueError(
                f"The checkpoint names no layers, and a target of {depth} layers is too small for the usual ones. Say "
                "which, counted from 0: eagle3={'reads': [...]}."
            )
        return [usual_reads(depth)]
    after, before = list(ids), [each - 1 for each in ids]
    likelier_first = [after, before] if ids[0] == 1 else [before, after]
    found = [reading for reading in likelier_first if min(reading) >= 0 and max(reading) < depth]
    if not found:
        raise ValueError(
            f"The draft reads layers {list(ids)} of its target, and this one has {depth}. It was trained for another "
            "target."
        )
    usual = usual_reads(depth)
    return [usual] if usual in found else found


def meanings(settings: Eagle3Settings, depth: int) -> list[list[int]]:
    """The layers whose outputs a draft may read of a target of so many, the likelier ones first; errors as above."""
    if settings.reads is not None:
        return [settings.reads]
    return readings(settings.layer_ids, depth) if settings.num_reads else [[]]
