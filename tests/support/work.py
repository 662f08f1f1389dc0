"""Work measured in calls, which no clock, load or number of cores changes; guards against hangs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

HANG_SECONDS = 600.0  # long on any machine: only what hangs gets there


def count_calls(function: Callable[[], Result]) -> tuple[Result, int]:
    """Calls `function`; returns its result and how many Python functions that took.

    C functions are not counted.
    """
    calls = 0

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        return function(), calls
    finally:
        sys.setprofile(before)
