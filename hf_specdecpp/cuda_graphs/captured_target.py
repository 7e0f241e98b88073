"""A target's passes, captured for each width and room (`CapturedTarget`), and kept with the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor

from hf_specdecpp.caches.masks import inputs_in_place
from hf_specdecpp.caches.text import PathRows, num_in_place, width_of
from hf_specdecpp.cuda_graphs.graphs import Graphs, capture_lock, lasting, write_lasting
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.cuda_graphs.room_cache import RoomCache, Rooms, RoomText, num_room_layers, prepared
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, input_device, longest_text
from hf_specdecpp.models.target_states import StateReader, read_modules, state_of
from hf_specdecpp.trees.attention import HALF_TREE_TOLERANCE, TREE_TOLERANCE

# Of each target: what its passes were captured of, and the passes.
_known: WeakKeyDictionary[CausalLM, tuple[list[Any], CapturedTarget]] = WeakKeyDictionary()


@dataclass
class Slot:
    """What passes of one width read and write, where it stays: `tokens` `[1, width]`, who sees whom (as in
    `inputs_in_place`), and as outputs logits `[1, width, vocab]`, then the chosen states `[1, width, size]` each; none
    before a pass."""

    tokens: Tensor
    ancestors: Tensor
    depths: Tensor
    outputs: list[Tensor]


class CapturedTarget:
    """The captured passes of one target, for one text at a time, or for the rows of one batch.

    A pass over n tokens has the next power of two of them as its width: the tokens, and after them dummies, which no
    token sees and which are forgotten. Its graph is made when that width is first met in a room.

    Example: 300 tokens are in a room of 512. A pass over the last token and 4 candidates is 8 wide and writes rows 300
    to 307; if 2 candidates stand, `keep(3)` leaves 303 rows.

    Args:
        target: whose passes. It is not kept alive by this: its tensors are, until it goes.
        fuse: compile small pieces, as `for_capture`.

    Attributes:
        busy: whether a text is using it.
        why_not: why its passes are never captured, once that was seen.
        checked: widths of passes that were compared with one of the target's own, of one text and of several.
        longest (tokens): a text that the target has positions for.
        text: the one at hand.
    """

    def __init__(self, target: CausalLM, fuse: bool = False) -> None:
        self.model = for_capture(target, fuse=fuse)
        self.device, self.busy, self.checked = input_device(target), False, set[tuple[bool, int]]()
        self.why_not: str | None = None
        self.graphs = Graphs(self.device)
        self._cache_argument, self.longest = cache_argument(self.model), longest_text(target)
        self.rooms = Rooms(num_room_layers(target.config.get_text_config(decoder=True)) or 0, self.device)
        self.text = RoomText(self.rooms, None)
        self._slots: dict[tuple[int, bool, tuple[int, ...]], Slot] = {}
        self._reads: tuple[int, ...] = ()  # whether the final state is watched, then numbers of layers
        self._watched: dict[tuple[int, ...], dict[int, Tensor]] = {}  # states of the latest pass, by what is watched
        self._paths: dict[int, Tensor] = {}  # where rows of a path are written, by their number
        # What is kept of whole rounds from text to text, by draft and ways of drawing (`generation.captured`).
        self.rounds: dict[Any, Any] = {}

    def compare(self, texts: Sequence[Tensor], widths: Iterable[int], own: Callable[[Tensor], Tensor]) -> str | None:
        """What is wrong with captured passes of these widths, beside a pass of the target's own over the same tokens:
        what its forward does beside attention, positions and masks is not known, and with some widths it may do
        something else.

        Args:
            texts: `[1, length]` each, which have begun here.
            own: makes a pass over the last token of each text and further tokens, `[texts, n]`, and forgets it; its
                logits `[texts, n, vocab]`.
        """
        several = len(texts) > 1
        widths = sorted(width for width in widths if (several, width) not in self.checked)
        if not widths:
            return None
        left = self.longest - max(ids.shape[1] for ids in texts)
        most = int(max(min(widths[-1] - 1, left), 0)) + 1
        tokens = torch.cat([some_tokens(ids, widths[-1]) for ids in texts])
        expected, cache = own(tokens[:, :most]), self.text.with_room(self.text.held + widths[-1])
        for width in widths:
            if width == 1 and not several:
                found = self.read(tokens[:, :1]).logits
            else:
                places = torch.arange(width, device=tokens.device)
                found = self.forward(cache, tokens[:, :width], places <= places[:, None], places)[0]
            if (reason := differs(found[:, :most], expected[:, :width], self.model.dtype)) is not None:
                return f"a captured pass of width {width} is {reason}"
            if width <= most:
                self.checked.add((several, width))
        return None

    def begin(self, cache: Any, num_tokens: int, shown: Tensor | None, position: Tensor) -> None:
        """Go on with texts of `num_tokens` in a growing cache, of whose rows the target sees those `shown` `[texts,
        num_tokens]` (`None`: all); `position` `[..., texts, 1]` is of the next token of each."""
        self.text = RoomText(self.rooms, position.shape)
        room = self.text.with_room(num_tokens + 1)
        room.read(cache, num_tokens)
        self.text.held = num_tokens
        if room.prompt is not None:
            if shown is not None:
                room.prompt.shown[:, :num_tokens] = shown.to(self.device)
            room.prompt.offset.copy_(position - num_tokens)

    def watch(self, reader: StateReader | None) -> None:
        """Return the states that a draft reads, with the passes of the text that begins."""
        self._reads = () if reader is None else tuple(reader.reads)
        if reader is not None and self._reads not in self._watched:
            seen: dict[int, Tensor] = {}
            for place, module in enumerate(read_modules(self.model, reader)):

                def see(module: Any, _args: Any, output: Any, place: int = place) -> None:
                    seen[place] = state_of(module, output)

                module.register_forward_hook(see)
            self._watched[self._reads] = seen

    def read(self, tokens: Tensor, tree: Sequence[Tensor] | None = None) -> Any:
        """A pass over `tokens` `[1, n]`, a chain, or a tree with its `ancestors` `[width, width]` and `depths`
        `[width]`.

        Returns logits `[1, n, vocab]`, and the states `[1, n, size]` that are watched; the next pass writes over them.
        `CannotCaptureError` of the first pass; nothing has been read then.
        """
        count = tokens.shape[1]
        key = width, is_tree, _ = width_of(count), tree is not None, self._reads
        cache = self.text.with_room(self.text.held + width)
        if key not in self._slots:
            with lasting():
                span = torch.arange(width, device=self.device)
                self._slots[key] = Slot(span[None].clone(), span <= span[:, None], span, [])
        slot = self._slots[key]
        slot.tokens[:, :count] = tokens
        if tree is not None:
            slot.ancestors.copy_(tree[0])
            slot.depths.copy_(tree[1])

        def run() -> None:
            write_lasting(slot.outputs, self.forward(cache, slot.tokens, slot.ancestors, slot.depths))

        # In the middle of a text one that cannot be captured runs as it is.
        self.graphs.run(("read", *self.text.place, *key), run, falls_back=bool(self.checked))
        logits, *states = (each[:, :count] for each in slot.outputs)
        return SimpleNamespace(logits=logits, states=states)

    def forward(self, cache: RoomCache, tokens: Tensor, ancestors: Tensor, depths: Tensor) -> list[Tensor]:
        """What is captured: a pass of the model over `tokens` `[texts, width]` after the texts, with arguments as in
        `Slot`; the ancestors are `[texts, width, width]` where texts have trees of their own. Logits `[texts, width,
        vocab]`, then the states that are watched."""
        inputs = inputs_in_place(self.model, cache, ancestors, depths, depths, cache.length)
        inputs = prepared(inputs, self.model, cache, tokens, self.longest) | {self._cache_argument: cache}
        outputs = self.model(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
        seen = self._watched.get(self._reads, {})
        return [outputs.logits, *(seen[place] for place in range(len(seen)))]

    def keep(self, count: int, path: PathRows | None = None) -> None:
        """Keep the first `count` tokens of the pass, of a tree those of a path."""
        if path is not None and num_in_place(path.rows[:count]) < count:
            self.move(path.on_device[:count])
        if count:
            self.text.cache.length.add_(count)
            self.text.held += count

    def move(self, path: Tensor) -> None:
        """Move these rows of the pass `[n]`, ascending, up to the text."""
        cache, width, held = self.text.cache, width_of(len(path)), self.text.held
        if width not in self._paths:
            with lasting():
                self._paths[width] = torch.zeros(width, dtype=torch.long, device=self.device)
        rows, key = self._paths[width], ("path", *self.text.place, width)

        def run() -> None:
            cache.move(rows[None])
            rows.zero_()  # of another path, which is shorter, they might lie behind the end of the room

        rows[: len(path)] = path
        changes = [] if key in self.graphs else [rows, *cache.rows(held, held + width)]
        self.graphs.run(key, run, changes, falls_back=True)

    def close(self) -> None:
        """Free all graphs and rooms but that of the text at hand. Later texts are captured anew."""
        if any(self.graphs.family.members):  # else nothing is running
            self.graphs.family.clear()
        self.rounds.clear()
        self.rooms.clear()


def some_tokens(ids: Tensor, count: int) -> Tensor:
    """The last token of a text `[1, length]` and others after it, `[1, count]`: of those before the last, few, since
    further back there may be an image."""
    latest = ids[:, -4:].flip(1)
    return latest.repeat(1, -(-count // latest.shape[1]))[:, :count]


def differs(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with the logits `[..., vocab]` of a captured pass, beside those of the target's own.

    In half precision half of the tokens have to be off: at single tokens a router may choose other experts."""
    expected = expected.double()
    errors = (found.double() - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    exact = TREE_TOLERANCE.get(dtype)
    error, tolerance = float(errors.median() if exact is None else errors.max()), exact or HALF_TREE_TOLERANCE
    if error <= tolerance:
        return None
    return f"off by {error:.2g} of the spread of its logits (rounding explains {tolerance:g})"


def captured_target(target: CausalLM, fuse: bool = False) -> CapturedTarget:
    """The captured passes of a target; new ones if it was changed since."""
    now = [fuse, *identity(target)]
    with capture_lock:
        known = _known.get(target)
        if known is None or known[0] != now:
            known = _known[target] = now, CapturedTarget(target, fuse)
            finalize(target, _close, ref(known[1])).atexit = False
        return known[1]


def _close(passes: Any) -> None:
    """Free the memory of passes whose target has gone: their graphs hold them in a circle."""
    if (left := passes()) is not None:
        left.close()
