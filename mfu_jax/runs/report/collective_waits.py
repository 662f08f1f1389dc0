"""A profile's hosts: which ones wait in collectives, and for whom. Reads no traces itself.

A collective ends for all hosts at once, so the host that arrives last spends the least time in it.
What the others spend beyond that is their wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mfu_jax.util.formatting import seconds_text, short

# Smallest wait of the median host worth a line, as a fraction of a step.
LATE_FRACTION = 0.10
_MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class CollectiveWait:
    """One host's times, in seconds per step.

    Attributes:
        host: its name, or ``process3``.
        step_seconds: step time.
        collective_seconds: in collectives, with no concurrent compute.
        wait_seconds: the part of it beyond that of the host that spends least in collectives.
    """

    host: str
    step_seconds: float
    collective_seconds: float
    wait_seconds: float


@dataclass(frozen=True, kw_only=True)
class CollectiveWaits:
    """All hosts of one profile.

    Attributes:
        source: the profile's folder.
        hosts: the host that others wait for comes first.
    """

    source: str
    hosts: Sequence[CollectiveWait]

    @classmethod
    def of(cls, source: str, times: Mapping[str, tuple[float, float]]) -> CollectiveWaits:
        """The waits that follow from each host's step time and time in collectives."""
        least = min(seconds for _, seconds in times.values())
        hosts = [
            CollectiveWait(
                host=host, step_seconds=step, collective_seconds=spent, wait_seconds=spent - least
            )
            for host, (step, spent) in times.items()
        ]
        return cls(source=source, hosts=sorted(hosts, key=lambda host: host.wait_seconds))

    @property
    def median_seconds(self) -> float:
        """The wait of the median host; for an even number, the longer of the middle two."""
        return statistics.median_high(host.wait_seconds for host in self.hosts)

    @property
    def slowest(self) -> CollectiveWait | None:
        """The host that the others wait for; None: no host is late."""
        first = self.hosts[0]
        return first if self.median_seconds > LATE_FRACTION * first.step_seconds else None

    @property
    def finding(self) -> str:
        """Which host is late, in one line; empty: none."""
        if (late := self.slowest) is None:
            return ""
        return (
            f"{short(late.host)} comes last to collectives: it spends "
            f"{seconds_text(late.collective_seconds)} of a step in them, the median host waits "
            f"{seconds_text(self.median_seconds)} longer; it is slow before them"
        )

    def render(self) -> str:
        """The same for a terminal."""
        lines = [
            f"  collectives  of {len(self.hosts)} hosts in a step, profile {short(self.source)}"
        ]
        lines += [
            f"    {short(host.host)}: {seconds_text(host.collective_seconds)} of "
            f"{seconds_text(host.step_seconds)}, waits {seconds_text(host.wait_seconds)}"
            for host in self.hosts[:_MOST_SHOWN]
        ]
        if (more := len(self.hosts) - _MOST_SHOWN) > 0:
            lines.append(f"    … and {more} more")
        return "\n".join([*lines, *([f"    {self.finding}"] if self.finding else [])])

    def to_json(self) -> dict[str, Any]:
        """All values; ``slowest`` is None if no host is late."""
        slowest = self.slowest
        return {
            "source": self.source,
            "slowest": None if slowest is None else slowest.host,
            "hosts": [asdict(host) for host in self.hosts],
        }
