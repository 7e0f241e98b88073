"""A target's captured passes (`CapturedTarget`), with a graph for each width and cache size, kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor

from hf_specdecpp.caches.cached_context import PathRows, num_in_place, width_of
from hf_specdecpp.caches.masks import Nodes, kept_chain_nodes
from hf_specdecpp.cuda_graphs.fixed_cache import Budget, FixedCache, FixedContext, pass_inputs, windows_of, with_rows
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs, capture_lock, lasting, write_lasting
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, input_device, longest_text
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.trees.attention import HALF_TREE_TOLERANCE, TREE_TOLERANCE

AHEAD = 512  # tokens: a first cache has room for the prompt and the expected tokens, at most for twice the prompt + 512

# For each target its identity at the capture, and the captured passes.
_known: WeakKeyDictionary[CausalLM, tuple[list[Any], CapturedTarget]] = WeakKeyDictionary()


class CapturedTarget:
    """The captured passes of one target, for one call at a time: for a sequence, or for the rows of a batch.

    `read` and `commit` are for candidates of the host (`PassGraphs`); graphs of whole rounds (`CapturedRounds`) contain
    `forward`. `read` pads n tokens with dummies to a width of the next power of two; no token attends to dummies, and
    their rows are not committed. A graph is captured with the first pass of a width and cache size.

    Example: 300 tokens are in a cache of 512. A pass over the last token and 4 candidates has width 8 and writes rows
    300 to 307. If 2 candidates are accepted, `commit(3)` leaves 303 rows.

    Args:
        target: the target. Its tensors are kept alive, but not the target itself; when it is deleted, all is freed.
        fuse: compile small pieces, as in `for_capture`.

    Attributes:
        busy: whether a call uses the passes, from the choice of its rounds (`on_graphs`) until `RoundTarget.leave`.
        budget: bounds the memory of the caches of the target and its drafts.
        graphs: those of passes and of whole rounds.
        why_not: the reason why this target's passes must not be captured; `None` as long as there is none.
        checked: the pairs (is a batch, width) for which `compare` has found equal logits.
        longest (tokens): the longest sequence that the target has positions for.
        expected (tokens): the most that may follow the next sequences' prompts, candidates included; 0 if unknown.
        context: the current sequence, or the rows of the current batch.
    """

    def __init__(self, target: CausalLM, fuse: bool = False) -> None:
        self.model = for_capture(target, fuse=fuse)
        self.device, self.busy, self.checked = input_device(target), False, set[tuple[bool, int]]()
        self.why_not: str | None = None
        self.graphs = Graphs(self.device)
        self._cache_argument, self.longest = cache_argument(self.model), longest_text(target)
        self.budget = Budget(self.device, self.graphs.clear)
        windows = windows_of(target.config.get_text_config(decoder=True)) or []
        self.context = FixedContext(windows, self.device, self.budget)
        self.expected = 0
        # At fixed addresses, by width, whether a tree, and `_reads`: tokens `[1, width]`, ancestors and depths of trees
        # as in `Nodes`, and outputs, empty before the first pass.
        self._buffers: dict[tuple[int, bool, tuple[int, ...]], tuple[Tensor, Tensor, Tensor, list[Tensor]]] = {}
        self._reads: tuple[int, ...] = ()  # `StateReader.reads` of the watched states
        self._states = TargetStates(self.model, None)
        self._paths: dict[int, Tensor] = {}  # by width, rows of a path at a fixed address
        # Of `generation.captured.entering`: `CapturedRounds` and `FastestShapes` by draft, shapes and way of drawing.
        self.rounds: dict[Any, Any] = {}

    def compare(self, texts: Sequence[Tensor], widths: Iterable[int], own: Callable[[Tensor], Tensor]) -> str | None:
        """Compare passes for capture, of `widths`, with a pass of the target itself, because a forward may compute
        differently at some widths. Returns the reason if logits differ, else `None`. Widths in `checked` are skipped.

        Args:
            texts: `[1, length]` each: the sequences of `begin_texts` and their last tokens, which are not cached.
            own: a function that runs the target itself over the last token of each sequence and further tokens
                `[texts, n]`, rolls back, and returns logits `[texts, n, vocab]`.
        """
        several = len(texts) > 1
        widths = sorted(width for width in widths if (several, width) not in self.checked)
        if not widths:
            return None
        left = self.longest - max(ids.shape[1] for ids in texts)
        most = int(max(min(widths[-1] - 1, left), 0)) + 1
        tokens = torch.cat([some_tokens(ids, widths[-1]) for ids in texts])
        expected, cache = own(tokens[:, :most]), self.context.with_capacity(self.context.num_tokens + widths[-1])
        if expected.shape[1] < most:
            return f"its forward returns logits after {expected.shape[1]} of {most} tokens"
        rows = with_rows(tokens)
        for width in widths:
            if width == 1 and not several:
                found = self.read(tokens[:, :1]).logits
            else:
                found = self.forward(cache, rows[:, :width], kept_chain_nodes(width, self.device))[0][: len(texts)]
            if (reason := differs(found[:, :most], expected[:, :width], self.model.dtype)) is not None:
                return f"a captured pass of width {width} is {reason}"
            if width <= most:
                self.checked.add((several, width))
        return None

    def begin_texts(self, cache: Any, num_tokens: int, shown: Tensor | None, position: Tensor) -> None:
        """Begin a sequence, or the rows of a batch: copy keys and values of `num_tokens` tokens of each from a growing
        cache. `shown`: `[texts, num_tokens]`, false for hidden tokens, such as padding; `None`: all are shown.
        `position`: `[..., texts, 1]`, position ids of the next tokens."""
        self.budget.text += 1
        position = with_rows(position, dim=-2)
        self.context.begin_text(position.shape)
        fixed = self.context.with_capacity(num_tokens + max(min(self.expected, num_tokens + AHEAD), 1))
        fixed.read(cache, num_tokens)
        self.context.num_tokens = num_tokens
        if fixed.prompt is not None:
            if shown is not None:
                fixed.prompt.shown[:, :num_tokens] = with_rows(shown.to(self.device))
            fixed.prompt.offset.copy_(position - num_tokens)

    def watch(self, reader: StateReader | None) -> None:
        """Called before a sequence: let its passes return the states that `reader` reads ("watched"); `None`: none."""
        self._reads = () if reader is None else tuple(reader.reads)
        self._states = TargetStates(self.model, reader)

    def read(self, tokens: Tensor, tree: Sequence[Tensor] | None = None) -> Any:
        """Run a captured pass over `tokens` `[1, n]`, the last token and the candidates of a chain or tree. `tree`: for
        trees ancestors `[width, width]` and depths `[width]`, dummies included.

        Returns `logits` `[1, n, vocab]` and watched `states`, `[1, n, size]` each, which the next pass overwrites."""
        count = tokens.shape[1]
        key = width, is_tree, _ = width_of(count), tree is not None, self._reads
        cache = self.context.with_capacity(self.context.num_tokens + width)
        if key not in self._buffers:
            with lasting():
                span = torch.arange(width, device=self.device)
                self._buffers[key] = span[None].clone(), span <= span[:, None], span, []
        own, ancestors, depths, outputs = self._buffers[key]
        own[:, :count] = tokens
        if tree is not None:
            ancestors.copy_(tree[0])
            depths.copy_(tree[1])

        def run() -> None:
            nodes = Nodes(ancestors, depths, depths) if is_tree else kept_chain_nodes(width, self.device)
            write_lasting(outputs, self.forward(cache, own, nodes))

        self.graphs.run(("read", *self.context.key, *key), run)
        logits, *states = (each[:, :count] for each in outputs)
        return SimpleNamespace(logits=logits, states=states)

    def forward(self, cache: FixedCache, tokens: Tensor, nodes: Nodes) -> list[Tensor]:
        """The function that graphs capture: a pass over `tokens` `[texts, width]`, the queries of `nodes`, after the
        sequences in `cache`. Returns logits `[texts, width, vocab]`, then the watched states."""
        inputs = pass_inputs(self.model, cache, nodes, cache.length, self.longest) | {self._cache_argument: cache}
        with self._states:
            outputs = self.model(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
        return [outputs.logits, *self._states.latest()]

    def commit(self, count: int, path: PathRows | None = None) -> None:
        """Commit `count` tokens of the latest `read`: the first ones, or in a tree the first ones of the `path`."""
        if path is not None and num_in_place(path.rows[:count]) < count:
            self.move(path.on_device[:count])
        if count:
            self.context.cache.length.add_(count)
            self.context.num_tokens += count

    def move(self, path: Tensor) -> None:
        """Move, by a graph, the latest pass's rows `path` `[n]`, ascending, to the first rows after the sequence."""
        cache, width, count = self.context.cache, width_of(len(path)), self.context.num_tokens
        if width not in self._paths:
            with lasting():
                self._paths[width] = torch.zeros(width, dtype=torch.long, device=self.device)
        rows, key = self._paths[width], ("path", *self.context.key, width)

        def run() -> None:
            cache.move(rows[None])
            rows.zero_()  # after a shorter path, old rows could be beyond the cache's end

        rows[: len(path)] = path
        changes = [] if key in self.graphs else [rows, *cache.rows(count, count + width)]
        try:
            self.graphs.run(key, run, changes)
        except CannotCaptureError:  # too late for a round without graphs: the tokens are emitted
            run()

    def close(self) -> None:
        """Free all graphs, and all caches of the target and its drafts but the target's one in use. Later passes are
        captured again."""
        if len(self.graphs):  # otherwise nothing is running
            self.graphs.clear()
        self.rounds.clear()
        for owner in self.budget.owners:
            owner.made.clear()
            if owner is not self.context:
                owner.cache = None


def some_tokens(ids: Tensor, count: int) -> Tensor:
    """`[1, count]` tokens for `CapturedTarget.compare`: the last four of a sequence `[1, length]`, in reverse order,
    repeated. Earlier tokens are not used, because they may be placeholders of an image."""
    latest = ids[:, -4:].flip(1)
    return latest.repeat(1, -(-count // latest.shape[1]))[:, :count]


def differs(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """How logits `[..., vocab]` differ from the `expected`, for a message; `None` if rounding in `dtype` explains it.

    In half precision the median over tokens counts, because a router may choose other experts at single tokens."""
    expected = expected.double()
    errors = (found.double() - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    exact = TREE_TOLERANCE.get(dtype)
    error, tolerance = float(errors.median() if exact is None else errors.max()), exact or HALF_TREE_TOLERANCE
    if error <= tolerance:
        return None
    return f"off by {error:.2g} of the spread of its logits (rounding explains {tolerance:g})"


def captured_target(target: CausalLM, fuse: bool = False) -> CapturedTarget:
    """The captured passes of a target. Calls share them until the target (by its `identity`) or `fuse` changes."""
    now = [fuse, *identity(target)]
    with capture_lock:
        known = _known.get(target)
        if known is None or known[0] != now:
            known = _known[target] = now, CapturedTarget(target, fuse)
            finalize(target, _close, ref(known[1])).atexit = False
        return known[1]


def _close(passes: Any) -> None:
    """Free the passes of a deleted target, given a weak reference to them: they and their graphs are in a cycle."""
    if (left := passes()) is not None:
        left.close()
