"""The costs of one target and draft, by the length of the text: assumed or measured at first, then what rounds say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.files import remember
from hf_specdecpp.throughput.round_times import RoundTimes, as_expected, corrected, in_seconds, length_class

KEPT = 0.03  # change of a cost, as a share of it, that counts


def as_they_are(costs: Costs) -> Costs:
    return costs


class KnownCosts:
    """What rounds cost here.

    A length of text that has not been met costs what the nearest one that has does, until its first text is over.

    Args:
        measured: before the first text.
        form: what a rule reckons with, made of the costs of passes by the tokens that they read: a row's share of a
            batch, widths of passes that are filled up.
        of: all that they depend on; they are kept on disk under it. `None` keeps them in this object.
        by_length: what earlier rounds have made of them, by class of length (`round_times.length_class`).
        is_assumed: nothing was measured: until the first text is over `measured` are shares of a pass over one token.
    """

    def __init__(
        self,
        measured: Costs,
        form: Callable[[Costs], Costs] = as_they_are,
        of: dict[str, Any] | None = None,
        by_length: Mapping[int, Costs] | None = None,
        is_assumed: bool = False,
    ) -> None:
        self.measured, self.is_assumed, self._form, self._of = measured, is_assumed, form, of
        self._by_length = dict(by_length or {})
        self._on_disk = dict(self._by_length)
        self._formed: dict[int, Costs] = {}  # by class of length, too
        self._confirmed: dict[int, set[int]] = {}  # by class of length: widths whose rounds took what they should

    @classmethod
    def from_dict(cls, values: Any, form: Callable[[Costs], Costs], of: dict[str, Any]) -> KnownCosts:
        """From what was kept on disk.

        Raises:
            ValueError: it is damaged.
        """
        try:
            by_length = {int(kind): Costs.from_dict(costs) for kind, costs in values["by_length"].items()}
            return cls(Costs.from_dict(values["measured"]), form, of, by_length)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{values!r} are not costs.") from error

    @property
    def first(self) -> Costs:
        """What a rule reckons with where nothing may change (`SpeculationConfig.track_costs`)."""
        return self._form(self.measured)

    def at(self, length: int) -> Costs:
        """What a rule reckons with at this length of the text: the same object until it changes."""
        kind = self._nearest(length_class(length))
        if kind not in self._formed:
            self._formed[kind] = self._form(self._by_length.get(kind, self.measured))
        return self._formed[kind]

    def learn(self, times: RoundTimes) -> list[tuple[int, int]]:
        """Follow the rounds of a text.

        Returns:
            By class of length and width the passes that took what was known of them.
        """
        taken: list[tuple[int, int]] = []
        if self.is_assumed:
            seconds = in_seconds(self.measured, times) if times.passes else None
            if seconds is None:
                return []
            self.measured, self.is_assumed = seconds, False
        for kind, passes in times.passes.items():
            known = self._by_length.get(self._nearest(kind), self.measured)
            confirmed, now = self._confirmed.setdefault(kind, set()), as_expected(known, passes)
            self._by_length[kind] = corrected(known, passes, times.drafts.get(kind, ()), confirmed)
            self._confirmed[kind] = confirmed - set(passes) | set(now)
            taken += [(kind, width) for width in now]
        if times.passes:
            self._form_again()
            self._keep()
        return taken

    def _form_again(self) -> None:
        """What a rule reckons with stays the same object where it has hardly changed: a plan for it takes a while."""
        for kind, formed in list(self._formed.items()):
            if _differ(self._form(self._by_length.get(self._nearest(kind), self.measured)), formed):
                del self._formed[kind]

    def save(self) -> None:
        """Keep them on disk."""
        if self._of is not None:
            self._on_disk = dict(self._by_length)
            by_length = {str(kind): costs.to_dict() for kind, costs in self._by_length.items()}
            remember("costs", self._of, {"measured": self.measured.to_dict(), "by_length": by_length})

    def _nearest(self, kind: int) -> int:
        """The class of length that there were texts of; the same where there were none at all."""
        return min(self._by_length, key=lambda known: (abs(known - kind), known), default=kind)

    def _keep(self) -> None:
        if any(_differ(costs, self._on_disk.get(kind)) for kind, costs in self._by_length.items()):
            self.save()


def _differ(costs: Costs, kept: Costs | None) -> bool:
    """Whether one of the costs has changed."""
    if kept is None or len(costs.verify) != len(kept.verify):
        return True
    one, kept_one = costs.start + costs.draft, kept.start + kept.draft
    pairs = [(one, kept_one), (costs.draft, kept.draft), *zip(costs.verify, kept.verify, strict=True)]
    return any(abs(new - old) > KEPT * old for new, old in pairs)
