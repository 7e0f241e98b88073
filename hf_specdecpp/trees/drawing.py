"""A verified tree as text and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_specdecpp.trees.tree import DraftTree

ACCEPTED = "*"
LINES = ("│", "├─", "└─")  # missing in cp1252, the encoding of pipes and files on Windows


@dataclass(frozen=True, repr=False)
class DrawnTree:
    """A verified tree, and its accepted nodes (`path`) without the root. `str()` is `text()` with token ids."""

    tree: DraftTree
    path: list[int]

    def __str__(self) -> str:
        return self.text()

    def text(self, decode: Callable[[int], str] = str) -> str:
        """Return a line for each node: `*` if accepted, its token (`decode` of the id), its estimate a and the value v
        of its slot. The root's line has the numbers of candidates, draft passes and accepted nodes instead."""
        tree, accepted = self.tree, set(self.path)
        lines = [
            f"{decode(tree.tokens[0])}   ({len(tree)} candidates, depth {tree.depth}, "
            f"width {max(tree.widths or [0])}, {tree.passes} draft passes; {len(accepted)} accepted: {ACCEPTED})"
        ]
        encoding = (sys.stdout and sys.stdout.encoding) or "utf-8"
        down, beside, last = ("|", "|-", "`-") if b"?" in "".join(LINES).encode(encoding, "replace") else LINES
        indents = {0: ""}
        for node in tree.depth_first()[1:]:
            parent = tree.parents[node]
            is_last = tree.below(parent)[-1] == node
            indents[node] = indents[parent] + ("   " if is_last else f"{down}  ")
            mark = ACCEPTED if node in accepted else " "
            branch = last if is_last else beside
            label = f"{decode(tree.tokens[node])}   a={tree.estimates[node]:.2f} v={tree.values[node]:.3f}"
            lines.append(f"{indents[parent]}{branch}{mark}{label}")
        return "\n".join(lines)

    def save(self, file: str | Path, decode: Callable[[int], str] = str) -> None:
        """Write a picture in the format of the file's ending: accepted nodes filled, others pale. Needs matplotlib."""
        from matplotlib.figure import Figure

        tree, accepted = self.tree, {0, *self.path}
        places = self._places()
        leaves = 1 + max(x for x, _ in places)
        figure = Figure(figsize=(max(4.0, 0.55 * leaves), 1.0 + 0.8 * tree.depth), dpi=120)
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        axes.axis("off")
        for node, (x, y) in enumerate(places):
            stays = node in accepted
            colour = "tab:green" if stays else "black"
            opacity = 1.0 if stays else 0.3 + 0.7 * tree.values[node]
            if node > 0:
                above = places[tree.parents[node]]
                axes.plot([above[0], x], [above[1], y], color=colour, lw=2.0 if stays else 0.8, alpha=opacity, zorder=1)
            box = {"boxstyle": "round", "fc": "palegreen" if stays else "white", "ec": colour, "alpha": opacity}
            label = decode(tree.tokens[node]).replace("$", r"\$")
            axes.text(x, y, label, ha="center", va="center", fontsize=7, bbox=box, zorder=2)
        axes.set(xlim=(-0.8, leaves - 0.2), ylim=(-tree.depth - 0.5, 0.5))
        figure.savefig(file)

    def _places(self) -> list[tuple[float, float]]:
        """(x, -depth) of each node: leaves next to each other, parents above the middle of their children."""
        tree, leaves = self.tree, 0
        across = [0.0] * len(tree.tokens)
        for node in tree.depth_first()[::-1]:
            if children := tree.below(node):
                across[node] = (across[children[0]] + across[children[-1]]) / 2
            else:
                across[node] = leaves
                leaves += 1
        most = max(leaves - 1, 0)
        return [(most - x, -float(depth)) for x, depth in zip(across, tree.depths, strict=True)]
