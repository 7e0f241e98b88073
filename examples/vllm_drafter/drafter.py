"""Experiment: a vLLM drafter ("method": "custom_class", "model": "drafter.Drafter") in which each row of a batch stops
by its own estimates. SPECDECPP_DRAFT names the folder of the draft; it runs in transformers, with a cache of its own."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

FIRST = 24  # rounds with WARM candidates, in which costs and acceptance are learned
WARM = 3


class Rows(Cache):
    """Keys and values [slots, heads, length, head_dim] of each layer; a pass reads and writes the slots `rows`."""

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, length, dim)
        self.kept = [[torch.zeros(shape, dtype=dtype) for _ in "kv"] for _ in range(config.num_hidden_layers)]
        self.layers, self.rows, self.places, self.end = [], torch.arange(0), torch.arange(0), 0

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> Any:
        found = []
        for kept, new in zip(self.kept[layer], (keys, values), strict=True):
            kept[self.rows[:, None], :, self.places] = new.transpose(1, 2)
            is_first = len(self.rows) and bool((self.rows == torch.arange(len(self.rows))).all())
            found.append(kept[: len(self.rows), :, : self.end] if is_first else kept[self.rows, :, : self.end])
        return found

    def get_seq_length(self, *_: Any) -> int:
        return self.end


class Line:
    """Least squares y = a + b x with forgetting; slopes and intercepts are at least 0."""

    def __init__(self, keep: float = 0.98) -> None:
        self.sums, self.keep = np.zeros(5), keep

    def add(self, x: float, y: float) -> None:
        self.sums = self.keep * self.sums + np.array([1.0, x, y, x * x, x * y])

    def fit(self) -> tuple[float, float]:
        n, x, y, xx, xy = self.sums
        if n == 0:
            return 0.0, 0.0
        spread = xx - x * x / n
        slope = max((xy - x * y / n) / spread, 0.0) if spread > 1e-9 else 0.0
        return max((y - slope * x) / n, 0.0), slope


class Calibration:
    """P(accepted) = sigmoid(a logit(q) + b), fitted to the latest 1,000 verified candidates, with a prior at (1, 0)."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []
        self.a, self.b, self.mean = 1.0, 0.0, 0.5

    def add(self, logits: list[float], accepted: int) -> None:
        for place, logit in enumerate(logits[: accepted + 1]):
            self.seen.append((logit, place < accepted))

    def fit(self) -> None:
        self.seen = self.seen[-1000:]
        x, y = np.array([each for each, _ in self.seen]), np.array([float(each) for _, each in self.seen])
        inputs, found = np.stack([x, np.ones_like(x)], 1), np.array([self.a, self.b])
        for _ in range(4):
            p = 1 / (1 + np.exp(-inputs @ found))
            slope = inputs.T @ (y - p) - 2.0 * (found - np.array([1.0, 0.0]))
            curve = inputs.T @ (inputs * (p * (1 - p))[:, None]) + 2.0 * np.eye(2)
            found = found + np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        self.a, self.b, self.mean = float(found[0]), float(found[1]), float(y.mean())

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.a * logits + self.b)


class Drafter:
    def __init__(self, vllm_config: Any) -> None:
        self.most = vllm_config.speculative_config.num_speculative_tokens
        slots = vllm_config.scheduler_config.max_num_seqs
        self.length = vllm_config.model_config.max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(os.environ["SPECDECPP_DRAFT"], dtype=torch.bfloat16).eval()
        self.cache = Rows(self.model.config, slots, self.length + self.most + 1, torch.bfloat16)
        self.texts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * slots  # tokens that a slot's cache holds
        self.drawn: list[list[float]] = [[] for _ in range(slots)]  # log-odds of the candidates that were submitted
        self.calibration, self.step, self.target = Calibration(), Line(), Line()
        self.tokens, self.seconds, self.rounds = 0.0, 0.0, 0
        self.begun = self.ended = 0.0
        self.submitted = 0
        self.fixed = int(os.environ.get("SPECDECPP_FIXED", "0"))  # a fixed length instead of the rule, to compare
        self.report = {"rounds": 0, "candidates": 0, "rows": 0, "draft": 0.0, "target": 0.0}

    def load_model(self, *_: Any, **__: Any) -> None:
        """The draft is loaded already."""

    @torch.inference_mode()
    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """Candidates of each row. sampled: new tokens of each row; tokens [slots, length]: all, of which lengths are known."""
        now = time.perf_counter()
        active = [row for row, new in enumerate(sampled) if new and lengths[row] + 2 < self.length]
        texts = {row: np.array(tokens[row, : lengths[row]], dtype=np.int64) for row in active}
        fresh = self._find(active, texts)
        self._learn(now, sampled, active, fresh)
        for row in fresh:
            self._read([row], torch.from_numpy(texts[row][None, :-1]), torch.arange(len(texts[row]) - 1)[None])
            self.texts[row] = texts[row][:-1]
        self.begun = time.perf_counter()
        found = self._draft(active, texts) if active else {}
        self.ended = time.perf_counter()
        self.report["draft"] += self.ended - self.begun
        self.submitted = sum(map(len, found.values()))
        self.report["candidates"] += self.submitted
        self.report["rows"] += len(active)
        self.report["rounds"] += 1
        if self.report["rounds"] % 100 == 0:
            print("DRAFTER", self.report, self.calibration.a, self.calibration.b, self.calibration.mean,
                  self.step.fit(), self.target.fit(), self.tokens / max(self.seconds, 1e-9), flush=True)
        return [found.get(row, []) for row in range(len(sampled))]

    def _find(self, active: list[int], texts: dict[int, Any]) -> list[int]:
        """Move what slots hold to the rows that their requests have now, and return the rows of new requests."""
        def holds(slot: int, row: int) -> bool:
            kept = self.texts[slot]
            return 0 < len(kept) < len(texts[row]) and bool((kept == texts[row][: len(kept)]).all())

        for row in active:  # the cache holds candidates, too: those that were rejected are forgotten
            kept, text = self.texts[row], texts[row]
            count = min(len(kept), len(text) - 1)
            same = kept[:count] == text[:count]
            agrees = count if same.all() else int(same.argmin())
            if agrees >= len(text) - self.most - 2:
                self.texts[row] = kept[:agrees]
        fresh = []
        for row in active:
            if not holds(row, row):
                other = next((slot for slot in range(len(self.texts)) if slot not in active and holds(slot, row)), None)
                if other is None:
                    fresh.append(row)
                    self.drawn[row] = []
                    continue
                for kept in (part for layer in self.cache.kept for part in layer):
                    kept[row] = kept[other]
                self.texts[row], self.drawn[row] = self.texts[other], self.drawn[other]
        return fresh

    def _learn(self, now: float, sampled: list[list[int]], active: list[int], fresh: list[int]) -> None:
        """From the round before: what was accepted, and how long the target took."""
        if fresh or not self.ended:  # prompts were read in that pass
            return
        emitted = sum(len(sampled[row]) for row in active)
        self.target.add(len(active) + self.submitted, now - self.ended)
        self.report["target"] += now - self.ended
        self.tokens, self.seconds = 0.98 * self.tokens + emitted, 0.98 * self.seconds + now - self.begun
        for row in active:
            if self.drawn[row]:
                self.calibration.add(self.drawn[row], len(sampled[row]) - 1)
        self.rounds += 1
        if self.rounds % 16 == 0 and len(self.calibration.seen) > 30:
            self.calibration.fit()

    def _read(self, rows: list[int], ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] after the last token of ids [rows, n] at the positions places [rows, n]."""
        self.cache.rows, self.cache.places, self.cache.end = torch.tensor(rows), places, int(places.max()) + 1
        mask = (torch.arange(self.cache.end) <= places[..., None])[:, None]
        output = self.model(
            ids, attention_mask=mask, position_ids=places, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _draft(self, active: list[int], texts: dict[int, Any]) -> dict[int, list[int]]:
        unread = max(len(texts[row]) - len(self.texts[row]) for row in active)
        ends = torch.tensor([len(texts[row]) for row in active])
        ids = torch.from_numpy(np.stack([texts[row][-unread:] for row in active]))
        places = ends[:, None] - unread + torch.arange(unread)
        found: dict[int, list[int]] = {row: [] for row in active}
        held = {row: [] for row in active}  # candidates that the cache holds
        for row in active:
            self.drawn[row] = []
        alive, survival = list(active), torch.ones(len(active))
        rate = self.tokens / self.seconds if self.seconds else 0.0
        base, each = self.step.fit()
        more = self.target.fit()[1]  # seconds of the target for a further candidate
        for place in range(self.most):
            begin = time.perf_counter()
            logits = self._read(alive, ids, places)
            self.step.add(len(alive), time.perf_counter() - begin) if place else None
            best, drawn = logits.max(-1)
            others = logits.scatter(-1, drawn[:, None], float("-inf")).logsumexp(-1)
            odds = best - others
            chance = self.calibration(odds)
            survival = survival * chance
            learning = self.rounds < FIRST
            goes_on = survival * self.calibration.mean - rate * (each + more)
            for index, row in enumerate(alive):
                if self.fixed or learning or float(survival[index]) > rate * more:
                    found[row].append(int(drawn[index]))
                    self.drawn[row].append(float(odds[index]))
                else:
                    goes_on[index] = -1.0
            if self.fixed or learning:
                is_on = torch.full((len(alive),), place + 1 < (self.fixed or WARM))
            else:
                is_on = goes_on > 0
                if float(goes_on[is_on].sum()) <= rate * base:
                    is_on = is_on & False
            if place + 1 == self.most or not bool(is_on.any()):
                break
            kept = is_on.nonzero()[:, 0].tolist()
            alive = [alive[index] for index in kept]
            for index, row in zip(kept, alive, strict=True):
                held[row].append(int(drawn[index]))
            ids, survival = drawn[is_on][:, None], survival[is_on]
            ends = ends[is_on]
            places = (ends + place)[:, None]
        for row in active:
            self.texts[row] = np.concatenate([texts[row], np.array(held[row], dtype=np.int64)])
        return found
