"""Where the time of a step went, by scope, op, phase, dtype, kernel or program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.pages.tables import Column
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.breakdown.ops import kernel_of, scope_of
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.util.formatting import percent, readable, seconds_text

WAITS = {
    DeviceWork.COMMUNICATION: "communication",
    DeviceWork.TRANSFER: "copies",
    DeviceWork.HOST: "host",
}
_NEITHER = 0.1  # of both roofs: below it, the time went to something else


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A group of ops, per step and device.

    Attributes:
        name: what the ops share.
        seconds: wall time attributed to them.
        share_of_step: `seconds` over the step time.
        runs: how often they ran.
        flops: matmul FLOPs that they executed.
        mfu: shortest time of their matmuls in the model's phases over `seconds`.
        hfu: shortest time of all their matmuls over `seconds`.
        hbm_bytes: bytes that they read from and wrote to memory.
        bandwidth_share: share of the memory's peak, without what asynchronous ops move; None if
            the peak is unknown.
        bound_by: ``matmuls``, ``memory``, ``communication``, ``copies`` (waits for asynchronous
            ones) or ``host`` (waits for its callbacks); ``neither`` if far from both roofs;
            ``unknown`` without the memory's peak.
    """

    name: str
    seconds: float
    share_of_step: float
    runs: float
    flops: int
    mfu: float
    hfu: float
    hbm_bytes: int
    bandwidth_share: float | None
    bound_by: str


KEYS: dict[str, Callable[[OpTime], str]] = {
    "scope": scope_of,
    "op": lambda op: op.op.record.name if op.op.record else op.op.name.name,
    "phase": lambda op: op.op.record.phase if op.op.record else "unknown",
    "dtype": lambda op: _dtype(op),
    "kernel": kernel_of,
    "program": lambda op: op.op.module or "(unknown)",
}


COLUMNS = (
    Column[TableRow]("time", lambda r: r.seconds, lambda r: seconds_text(r.seconds)),
    Column[TableRow]("of step", lambda r: r.share_of_step, lambda r: percent(r.share_of_step)),
    Column[TableRow]("runs", lambda r: r.runs, lambda r: f"{r.runs:g}"),
    Column[TableRow]("GFLOP", lambda r: r.flops, lambda r: _of_matmuls(r, readable(r.flops / 1e9))),
    Column[TableRow]("MFU", lambda r: r.mfu, lambda r: _of_matmuls(r, percent(r.mfu))),
    Column[TableRow]("HFU", lambda r: r.hfu, lambda r: _of_matmuls(r, percent(r.hfu))),
    Column[TableRow]("MB", lambda r: r.hbm_bytes, lambda r: readable(r.hbm_bytes / 1e6)),
    Column[TableRow](
        "bandwidth", lambda r: r.bandwidth_share, lambda r: percent(r.bandwidth_share)
    ),
)


def _of_matmuls(row: TableRow, text: str) -> str:
    return text if row.flops else "-"


_SORTED_BY = ("time", "", "runs", "flops", "mfu", "hfu", "bytes", "bandwidth")
SORTS = {key: column for key, column in zip(_SORTED_BY, COLUMNS, strict=True) if key}


def table(
    measured: MeasuredStep,
    peaks: StepPeaks,
    by: Callable[[OpTime], str],
    *,
    depth: int = 0,
    sort: str = "time",
) -> tuple[TableRow, ...]:
    """The ops in groups, largest first.

    Args:
        measured: the times.
        peaks: peaks of one device.
        by: returns the name of an op's group.
        depth: group by the first `depth` parts of a ``/``-separated name; 0: all parts.
        sort: a key of `SORTS`: the column sorted by; among equal rows, the longest comes first.
    """
    groups: dict[str, list[OpTime]] = {}
    for op in measured.ops:
        name = by(op)
        groups.setdefault("/".join(name.split("/")[:depth]) if depth else name, []).append(op)
    rows = [_row(name, ops, measured, peaks) for name, ops in groups.items()]
    number = SORTS[sort].value
    return tuple(sorted(rows, key=lambda row: (-(number(row) or 0.0), -row.seconds)))


def _row(name: str, ops: list[OpTime], measured: MeasuredStep, peaks: StepPeaks) -> TableRow:
    seconds = sum(op.seconds for op in ops)
    least = sum(op.shortest(peaks) for op in ops)
    model = sum(op.shortest(peaks) * model_share(op) for op in ops)
    hbm_bytes = sum(_times(op.op.record.hbm_bytes, op.runs) for op in ops if op.op.record)
    overlapping = measured.platform != "gpu"  # there, a copy is a kernel like any other
    moved = _moving(ops) if overlapping else hbm_bytes
    moving = moved / peaks.bytes_per_sec if peaks.bytes_per_sec else None
    return TableRow(
        name=name,
        seconds=seconds,
        share_of_step=seconds / measured.step_seconds,
        runs=sum(op.runs for op in ops),
        flops=sum(_times(op.op.record.flops, op.runs) for op in ops if op.op.record),
        mfu=model / seconds if seconds else 0.0,
        hfu=least / seconds if seconds else 0.0,
        hbm_bytes=hbm_bytes,
        bandwidth_share=None if moving is None or not seconds else moving / seconds,
        bound_by=_bound(ops, seconds, least, moving),
    )


def _moving(ops: list[OpTime]) -> int:
    """Bytes that ops move in their own time; asynchronous ones overlap theirs with other ops."""
    records = [(op.op.record, op.runs) for op in ops]
    return sum(_times(r.hbm_bytes, runs) for r, runs in records if r and not r.is_async)


def _times(number: int, runs: float) -> int:
    """`number` × `runs`, exact if every device and step ran the op equally often."""
    return number * int(runs) if runs == int(runs) else round(number * runs)


def model_share(op: OpTime) -> float:
    """The share of an op's FLOPs that are in the model's phases."""
    record, source = op.op.record, op.op.source
    if record is None or source is None or not record.flops:
        return 0.0
    return sum(record.flops_by_phase.get(p, 0) for p in source.model_phases) / record.flops


def _bound(ops: list[OpTime], seconds: float, least: float, moving: float | None) -> str:
    for work, name in WAITS.items():
        if 2 * sum(op.seconds for op in ops if op.op.work is work) > seconds:
            return name
    if moving is None:
        return "matmuls" if 2 * least > seconds else "unknown"
    if max(least, moving) < _NEITHER * seconds:
        return "neither"
    return "matmuls" if least >= moving else "memory"


def _dtype(op: OpTime) -> str:
    flops = op.op.record.flops_by_dtype if op.op.record else {}
    return max(flops, key=lambda dtype: flops[dtype]) if any(flops.values()) else "no matmul"
