"""What rounds have brought, and what is said of that."""

import numpy as np
import pytest

from hf_specdecpp.estimation.ledger import Ledger, Speed, effect, verdict


def test_earlier_rounds_cost_what_rounds_cost_now() -> None:
    """Noted by how many of each thing they took; mutant: the seconds that these took then."""
    ledger = Ledger(1.0, trusted=0.0)
    ledger.prices = np.array([1.0, 0.5])
    for taken in ([1, 0], [1, 2]):
        ledger.record_round(1.0, np.array(taken))
    assert ledger.rate == pytest.approx(2 / 3)
    ledger.prices = np.array([2.0, 0.5])
    assert ledger.rate == pytest.approx(2 / 5)


@pytest.mark.parametrize(("plain", "same", "expected"), [
    ((2.1, 2.0, 2.2), (1.3, 1.2, 1.4), "gain"),
    ((2.1, 2.0, 2.2), (1.3, 0.9, 1.4), "unclear"),
    ((2.1, 2.0, 2.2), (1.02, 0.9, 1.4), "none"),
    ((0.9, 0.8, 0.95), (1.3, 1.2, 1.4), "loss"),
    ((1.03,) * 3, (1.03,) * 3, "gain"),
    ((0.97,) * 3, (1.5,) * 3, "loss"),
])  # fmt: skip
def test_the_lowest_speed_decides(
    plain: tuple[float, float, float], same: tuple[float, float, float], expected: str
) -> None:
    assert effect(Speed(*plain), Speed(*same)) == expected


def test_the_example_of_a_verdict() -> None:
    said = verdict(Speed(2.1, 2.1, 2.1), Speed(1.3, 1.3, 1.3), Speed(1.6, 1.6, 1.6), "fixed 3 runs at ")
    assert said.replace("\n    ", " ") in " ".join(str(verdict.__doc__).split())
