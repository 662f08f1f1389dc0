"""The range of times expected for a run of a predicted step."""

from __future__ import annotations

from dataclasses import replace

from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.step_time.durations import (
    FAST,
    HOST,
    SLOW,
    Durations,
    Efficiencies,
    host_gbps,
)
from mfu_jax.planning.step_time.schedule import timeline
from mfu_jax.planning.targets import Target

_FASTER_HOST = 2  # × the bandwidth assumed if it is not known


def time_range(
    costs: ProgramCosts,
    durations: Durations,
    *,
    seconds: float,
    bound: float,
    residuals: tuple[float, float] | None,
) -> tuple[float, float] | None:
    """The shortest and the longest expected time, in seconds per step.

    Args:
        costs: the program's costs.
        durations: the durations behind the prediction.
        seconds: the prediction.
        bound: lower bound: no run is faster, whatever the residuals say.
        residuals: measured / predicted times of other runs; None: too few were compared.

    Returns:
        The range; without residuals, for GPUs the times at higher and lower shares of their peaks,
        and None for TPUs.
    """
    if residuals is not None:
        low, high = residuals
        fastest = seconds - _saved_by_a_faster_host(costs, durations)
        return max(bound, fastest * low), seconds * high
    if durations.target.platform != "cuda":
        return None
    least, most = (
        _seconds(costs, replace(durations, efficiencies=shares)) for shares in (FAST, SLOW)
    )
    return max(bound, least), max(bound, most)


def host_notes(costs: ProgramCosts, target: Target) -> tuple[str, ...]:
    """A note if the step copies to or from host memory at an unknown bandwidth."""
    copies = any(record.host_bytes and record.runs for record in costs.records.values())
    if not copies or HOST in target.chip.interconnect:
        return ()
    taken = host_gbps(target.chip)
    return (
        f"the bandwidth between a {target.chip.name} and its host's memory is not known: "
        f"{taken:g} GB/s are taken, and up to {_FASTER_HOST * taken:g} in the range",
    )


def _saved_by_a_faster_host(costs: ProgramCosts, durations: Durations) -> float:
    if not host_notes(costs, durations.target):
        return 0.0
    shares: Efficiencies = replace(
        durations.efficiencies, host=_FASTER_HOST * durations.efficiencies.host
    )
    return _seconds(costs, durations) - _seconds(costs, replace(durations, efficiencies=shares))


def _seconds(costs: ProgramCosts, durations: Durations) -> float:
    return timeline(costs, durations).seconds
