"""When speculation does not pay, how often it is tried again: for `rule="throughput"`, chains and trees."""

from __future__ import annotations

LEAST_GAIN = 1.02  # over plain decoding that speculation must promise: measured costs are not more exact than that
PROBE_SHARE = 0.01  # of the time without speculation may be lost on probes
MOST_CREDIT = 5.0  # plain passes that may be lost on probes in a row, so that bad luck does not end them


class ExplorationBudget:
    """What probes may cost now: rounds with candidates while speculation does not pay.

    Args:
        plain: seconds of a round without candidates.

    Attributes:
        seconds: the credit, negative after a probe that cost more than there was.
    """

    def __init__(self, plain: float) -> None:
        self.plain, self.seconds = plain, MOST_CREDIT * plain

    def rest(self) -> None:
        """A round without candidates: saves up for a probe, whatever that may cost."""
        self.seconds += PROBE_SHARE * self.plain

    def settle(self, pays: bool, saved: float) -> None:
        """A round with candidates.

        Args:
            pays: whether speculation pays; if it does not, this was a probe.
            saved: seconds by which it was faster than plain rounds.
        """
        change = PROBE_SHARE * self.plain if pays else saved
        self.seconds = min(self.seconds + change, MOST_CREDIT * self.plain)
