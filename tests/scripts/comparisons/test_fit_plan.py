"""The share that fits several runs, where it can be worked out here."""

from __future__ import annotations

from scripts.comparisons.fit_plan import SHARES, Fitted, best_share


def test_the_share_is_the_median_of_those_that_each_run_needs() -> None:
    """Times that are inverse to the share: 0.7 makes the first run right, 0.74 the second."""
    predicted = {share: 10 / share for share in SHARES}
    runs = [Fitted("r", 10 / needed, predicted) for needed in (0.7, 0.74, 0.95)]
    assert best_share(runs[:1]) == 0.7
    assert best_share(runs) == 0.74
