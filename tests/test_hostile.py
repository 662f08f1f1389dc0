"""No argument and no file gives a traceback, hangs a command, or takes a gigabyte."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.hostile import hostile_inputs, render

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)


@pytest.mark.full
def test_hostile_inputs_get_one_line_and_exit_code_2() -> None:
    results = hostile_inputs(random_seed=10, count=320)
    assert len(results) >= 300
    codes = Counter(result.code for result in results)
    assert codes[0] > 10, "the inputs never get past the first check"
    assert codes[2] > 100
    assert not [result for result in results if result.failures], render(results)
