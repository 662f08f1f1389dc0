"""Causes planted in the events of recorded traces are named first, at their price."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.plan_gaps import Case, collective, edited, loops


@pytest.mark.parametrize("kind", ["loop", "tpu"])
def test_planted_causes_are_first_at_their_price(tmp_path: Path, kind: str) -> None:
    cases: Iterator[Case] = collective(tmp_path) if kind == "tpu" else edited(loops(tmp_path))
    for case in cases:
        assert case.is_first, case.cells
        assert case.is_priced, case.cells
        assert case.missed < 0.01
