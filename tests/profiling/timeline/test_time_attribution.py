"""Wall time is divided as a clock that ticks through it would divide it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_jax.profiling.timeline.time_attribution import attribute_time, parents_of

Event = tuple[int, int, int, int]  # lane, start, end, class


def divided(events: list[Event], begin: int, end: int) -> tuple[list[float], float]:
    lanes, starts, ends, classes = np.array(events, np.int64).T
    parents = parents_of(lanes, starts, ends)
    division = attribute_time(starts, ends, classes, parents, begin, end)
    return division.shares.tolist(), division.idle


def test_a_loop_its_body_and_communication_beside_it() -> None:
    loop, body, hidden, exposed = (0, 0, 100, 3), (0, 10, 60, 0), (1, 20, 50, 1), (1, 70, 90, 1)
    shares, idle = divided([loop, body, hidden, exposed], 0, 120)
    assert shares == [100 - 50 - 20, 50, 0, 20]
    assert idle == 20


def test_threads_at_once_share_the_time_and_the_window_clips() -> None:
    shares, idle = divided([(0, 0, 10, 0), (1, 5, 20, 0), (2, 40, 50, 0)], 2, 30)
    assert shares == [3 + 2.5, 2.5 + 10, 0]
    assert idle == 10


def by_ticks(events: list[Event], begin: int, end: int) -> tuple[list[float], float]:
    """The same by definition, tick by tick; events of a lane are nested."""
    shares, idle = [0.0] * len(events), 0.0
    for tick in range(begin, end):
        active: dict[int, int] = {}
        for number, (lane, start, stop, _) in sorted(
            enumerate(events), key=lambda e: (e[1][1], -e[1][2], e[0])
        ):
            if start <= tick < stop:
                active[lane] = number  # the innermost comes last
        if not active:
            idle += 1
            continue
        first = min(events[number][3] for number in active.values())
        chosen = [number for number in active.values() if events[number][3] == first]
        for number in chosen:
            shares[number] += 1 / len(chosen)
    return shares, idle


@st.composite
def nested(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []

    def add(lane: int, begin: int, end: int, depth: int) -> None:
        at = begin
        while at < end and len(events) < 20:
            start = draw(st.integers(at, end))
            stop = draw(st.integers(start, end))
            if start == stop:
                return
            events.append((lane, start, stop, draw(st.integers(0, 3))))
            if depth < 2 and draw(st.booleans()):
                add(lane, start, stop, depth + 1)
            at = stop

    for lane in range(3):
        add(lane, 0, 40, 0)
    return events


@settings(max_examples=150)
@given(nested(), st.integers(0, 15), st.integers(20, 45))
def test_any_nested_events(events: list[Event], begin: int, end: int) -> None:
    if not events:
        return
    shares, idle = divided(events, begin, end)
    expected, expected_idle = by_ticks(events, begin, end)
    assert shares == pytest.approx(expected, abs=1e-9)
    assert idle == pytest.approx(expected_idle)
    assert sum(shares) + idle == pytest.approx(end - begin)
