"""Who is late to collectives, from times by host."""

from __future__ import annotations

import pytest

from mfu_jax.runs.report.collective_waits import CollectiveWait, CollectiveWaits


def waits(*seconds: float) -> CollectiveWaits:
    hosts = [
        CollectiveWait(
            host=f"<b>{n}", step_seconds=1.0, collective_seconds=0.02 + own, wait_seconds=own
        )
        for n, own in enumerate(seconds)
    ]
    return CollectiveWaits(source="traces", hosts=hosts)


@pytest.mark.parametrize(
    ("seconds", "is_late"),
    [
        ((0.0, 0.3, 0.3, 0.31), True),
        ((0.0, 0.3), True),
        ((0.0, 0.05, 0.06), False),
        # One host waits for long, the others for nobody: no host is late for all of them.
        ((0.0, 0.0, 0.0, 0.5), False),
    ],
)
def test_a_host_is_late_if_the_median_host_waits_for_it(
    seconds: tuple[float, ...], is_late: bool
) -> None:
    found = waits(*seconds)
    assert (found.slowest is not None) == is_late == bool(found.finding)
    assert found.to_json()["slowest"] == ("<b>0" if is_late else None)


def test_a_thousand_hosts_are_a_few_lines() -> None:
    lines = waits(*(0.3 * (n > 0) for n in range(1024))).render().splitlines()
    assert len(lines) == 8
    assert lines[-2] == "    … and 1019 more"
    assert "<b>0 comes last to collectives" in lines[-1]
