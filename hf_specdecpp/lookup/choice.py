"""Looking up, drafting or neither: what promises most tokens a second (`Choice`), or a simple order (`by_estimate`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_specdecpp.config.costs import Floats

LEAST_GAIN = 1.02  # over a pass without candidates that those that were looked up must promise
REMEMBERED = 0.98  # of a round's tokens and seconds, a round later
TRUSTED = 8.0  # rounds that what is promised before there were any counts for
LEAST_SURVIVAL = 0.3  # of candidates that are looked up where nothing is known of costs
USUAL_ACCEPTANCE = 0.7  # of drafts, before there were any


class Choice:
    """What drafting has brought, by costs, and when looking up is better.

    A passage that repeats what was seen has to be written whatever was fast before it, and so has one that does not. So
    each round takes what promises most tokens a second there and then. What was looked up is judged by its estimates,
    round by round; drafting by the mean of its rounds.

    Example: a pass over one token takes 10 ms and each further one 1 ms. Drafting has brought 1.8 tokens in 12 ms,
    which are 150 a second. Three candidates are expected to be right with 0.9, 0.8 and 0.7, so looking up brings
    1 + 0.9 + 0.72 + 0.504 = 3.1 tokens in 13 ms, 240 a second: it is done.

    Args:
        seconds: of a round without candidates.
        drafting: tokens a second that drafting promises; `None` where nothing drafts.

    Attributes:
        drafted: tokens and seconds of the rounds that drafted, later ones counting more.
    """

    def __init__(self, seconds: float, drafting: float | None) -> None:
        self.drafted = [TRUSTED * max((drafting or 0.0) * seconds, 1.0), TRUSTED * seconds]

    @property
    def rate(self) -> float:
        """Tokens a second where nothing is looked up."""
        return self.drafted[0] / self.drafted[1]

    def length(
        self, estimates: Sequence[Sequence[float]], seconds: Floats, catching_up: float = 0.0, drafts: bool = True
    ) -> int:
        """How many candidates a round looks up; 0 leaves it to the draft.

        Args:
            estimates: of the candidates of each row, in order; of one text one row.
            seconds: `[n + 1]`, a row's share of a round with 0, 1, ... candidates and without a draft.
            catching_up: seconds that the draft takes later for each token that it has not read.
            drafts: whether there is drafting to compare with.
        """
        rows, most = len(estimates), len(seconds) - 1
        tokens = np.zeros(most + 1)
        for each in estimates:
            tokens[1 : len(each) + 1] += np.cumprod(each)[:most]
        tokens = rows + tokens.cumsum()
        rates = tokens / (rows * seconds + catching_up * tokens)
        best = int(rates.argmax())
        least = max(self.rate if drafts else 0.0, LEAST_GAIN / float(seconds[0]))
        return best if rates[best] > least else 0

    def further(self, survival: float, estimates: Sequence[float], seconds: Floats) -> int:
        """How many candidates go on after those that were drafted, which all stand with chance `survival`.

        Args:
            seconds: `[n + 1]`, of passes with 0, 1, ... of them.
        """
        tokens = survival * np.cumsum(np.concatenate(([0.0], np.cumprod(estimates))))
        return int((tokens - self.rate * seconds).argmax())

    def observe(self, tokens: float, seconds: float) -> None:
        """Take note of a round that drafted."""
        self.drafted = [REMEMBERED * self.drafted[0] + tokens, REMEMBERED * self.drafted[1] + seconds]


def by_estimate(estimates: Sequence[float], drafting: float) -> int:
    """How many candidates are looked up where costs do not decide: none unless the first one's estimate is above
    `drafting`, the share of the draft's candidates that is accepted; then while all stand with `LEAST_SURVIVAL`.

    Example: 0.9, 0.8, 0.5, 0.5 against 0.7: the first three, which all stand with 0.36.
    """
    if not estimates or estimates[0] <= drafting:
        return 0
    survival, count = 1.0, 0
    for estimate in estimates:
        survival *= estimate
        if survival < LEAST_SURVIVAL:
            break
        count += 1
    return count
