"""Random masks, fills and flags: the pairs counted are those needed, or a bound that says so."""

from __future__ import annotations

import pytest

from tests.support.random_masks import judged


@pytest.mark.full
def test_random_masks_are_counted_pair_by_pair_or_bounded() -> None:
    """A slice of the 5,000 of `scripts/campaigns.sh masks`."""
    verdicts = {seed: judged(seed) for seed in range(20)}
    assert {seed: said for seed, said in verdicts.items() if said not in ("exact", "at most")} == {}
    assert sum(said == "exact" for said in verdicts.values()) >= 8
