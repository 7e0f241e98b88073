"""How often speculation is tried again while it does not pay: for `rule="throughput"`, chains and trees."""

from __future__ import annotations

LEAST_GAIN = 1.02  # over plain decoding that speculation must promise: measured costs are not more exact
LEAST_GAIN_IN_BATCHES = 1.1  # there rows end one by one, and those that are left pay for passes alone
PROBE_SHARE = 0.005  # of the time without candidates that probes may lose
MOST_CREDIT = 5.0  # plain passes that probes may lose in a row
FOLLOWED = 1.5  # plain passes of credit, beside what a probe costs, for which a draft follows a text at all


class ExplorationBudget:
    """What probes may cost now. A probe is a round with candidates while speculation does not pay.

    Example: a plain pass takes 40 ms. The budget begins at 200 ms. Ten probes that lose 20 ms each use it up; then 100
    rounds without candidates earn 0.2 ms each, enough for another one.

    Args:
        plain: seconds of a round without candidates, as they are known now.

    Attributes:
        passes: the credit in such rounds, negative after a probe that cost more than there was.
    """

    def __init__(self, plain: float) -> None:
        self.plain, self.passes = plain, MOST_CREDIT

    @property
    def seconds(self) -> float:
        return self.passes * self.plain

    def is_worth_following(self, price: float) -> bool:
        """Whether a text is worth following for its probes, of which the first costs `price` seconds."""
        return self.seconds >= price + FOLLOWED * self.plain

    def rest(self) -> None:
        """A round without candidates adds its share. There is no upper bound here, so dear probes happen too."""
        self.passes += PROBE_SHARE

    def settle(self, pays: bool, saved: float) -> None:
        """A round with candidates.

        Args:
            pays: whether speculation pays; if it does not, this was a probe.
            saved: seconds by which it was faster than plain rounds.
        """
        self.passes = min(self.passes + (PROBE_SHARE if pays else saved / self.plain), MOST_CREDIT)
