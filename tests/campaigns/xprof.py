"""Compares per-op times and FLOPs, and the KPIs, with xprof's own tables of the same trace.

    python -m tests.campaigns.xprof TRACE --xprof /path/to/venv/bin/python

TRACE is a folder. xprof has no tables for CPU devices (its tables read only accelerator planes), so
each thread's thunks on the first CPU become a stream of a GPU plane, with the same
names, times and programs; both tools then read that file. The venv needs
`pip install xprof`. The exit code is 1 if an op's time differs by more than 1%. KPIs differ
where xprof lacks rows: kernels that name no op, and the bytes of library calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.profiling.attribution.step_times import measure
from mfu_jax.profiling.join.ops import DeviceWork, Join, JoinedOp
from mfu_jax.profiling.join.programs import ProgramLibrary
from mfu_jax.profiling.timeline.devices import DeviceTimeline, Program
from mfu_jax.profiling.timeline.platforms import read_devices
from mfu_jax.profiling.timeline.time_attribution import NO_PARENT, attribute_time
from mfu_jax.profiling.trace.xspace import Trace
from mfu_jax.storage.trace_folders import trace_files
from mfu_jax.util.formatting import columns
from mfu_jax.util.protobuf import fields
from tests.support.xspace import Plane, chunk, space

_WITHIN = 0.01
_PICOSECONDS = 1e12
_KEPT = ("hlo_op", "hlo_module", "program_id", "run_id")
_GPU = "NVIDIA H100 80GB HBM3"
_CHILD = """
import json, sys
from xprof.convert import raw_to_tool_data
found = {}
for tool in ("hlo_stats", "roofline_model", "op_profile", "overview_page", "kernel_stats"):
    data, _ = raw_to_tool_data.xspace_to_tool_data([sys.argv[1]], tool, {"use_saved_result": False})
    found[tool] = json.loads(data) if data else None
print(json.dumps(found))
"""


Table = Mapping[str, "OpRow"]


class OpRow(NamedTuple):
    """An op in a table.

    Attributes:
        runs: how often it ran.
        seconds: over all runs, including what ran within it.
        flops: per run; 0 if the table has none.
        is_control: a loop or a call.
    """

    runs: float
    seconds: float
    flops: float
    is_control: bool = False


class Kpis(NamedTuple):
    """What the overview page, and the totals of the other tables, report for a whole trace.

    Attributes:
        step_seconds: mean step time; 0 if the trace marks no steps for the tool.
        span_seconds: from the first op to the last, summed over devices.
        busy_seconds: the part during which an op runs.
        hbm_bytes: of all runs of all ops.
        bytes_per_second: peak bandwidth of a device's memory; 0 if unknown.
    """

    step_seconds: float
    span_seconds: float
    busy_seconds: float
    hbm_bytes: float
    bytes_per_second: float

    def shown(self) -> dict[str, float]:
        """The values by their names on the page."""
        moving = self.span_seconds * self.bytes_per_second
        return {
            "step time, ms": self.step_seconds * 1e3,
            "device time, s": self.span_seconds,
            "device idle, %": 100 * (1 - self.busy_seconds / self.span_seconds),
            "HBM bytes": self.hbm_bytes,
            "HBM bandwidth utilisation, %": 100 * self.hbm_bytes / moving if moving else 0.0,
        }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--xprof", required=True, help="Python of a venv that has xprof")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        file = with_accelerators(trace_files(arguments.trace)[0], Path(name))
        ours, our_own, kernels = our_table(file), our_kpis(file), our_kernels(file)
        process = subprocess.run(
            [arguments.xprof, "-c", _CHILD, str(file)], stdout=subprocess.PIPE, check=True
        )
    theirs = json.loads(process.stdout.splitlines()[-1])
    tables = {
        "hlo_stats": dict(_of_rows(theirs["hlo_stats"], "hlo_op_name")),
        "roofline_model": dict(_of_rows(theirs["roofline_model"][0], "operation")),
        "op_profile": dict(_of_tree(theirs["op_profile"]["byProgram"])),
    }
    lines, is_right = _report(ours, tables)
    if kernels:  # in command buffers, which xprof's other tables leave out
        more, is_also = _report(kernels, {"kernel_stats": _of_kernels(theirs["kernel_stats"])})
        lines, is_right = lines + more, is_right and is_also
    print("\n".join([*lines, *_report_kpis(our_own, _their_kpis(theirs))]))
    return 0 if is_right else 1


def with_accelerators(file: Path, folder: Path) -> Path:
    """The trace; if it has only CPU devices, a copy whose first CPU device is a GPU."""
    planes = {plane.name: plane for plane in ProfileData.from_file(str(file)).planes}
    if any(name.startswith("/device:") for name in planes):
        return file
    plane, host = Plane("/device:GPU:0", gpu_device_name=_GPU), planes["/host:CPU"]
    streams = [events for line in host.lines if (events := list(_thunks(line)))]
    for number, events in enumerate(streams, 1):
        plane.line(f"Stream #{number}(Compute)", events, timestamp_ns=0)
    out = folder / "plugins" / "profile" / "2026_01_01_00_00_00" / "relabelled.xplane.pb"
    out.parent.mkdir(parents=True)
    out.write_bytes(space(plane) + _programs(file.read_bytes()))
    return out


def _thunks(line: Any) -> Iterator[tuple[Any, ...]]:
    for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" in stats and not stats.get("device_ordinal"):
            kept = {key: stats[key] for key in _KEPT if key in stats}
            yield event.name, round(event.start_ns * 1000), round(event.duration_ns * 1000), kept


def _programs(content: bytes) -> bytes:
    """The encoded plane of a file that holds its programs."""
    planes = (content[f.start : f.end] for f in fields(content, 0, len(content)) if f.number == 1)
    return b"".join(chunk(1, plane) for plane in planes if b"/host:metadata" in plane[:64])


def our_table(file: Path) -> dict[str, OpRow]:
    """All events of the trace by op, with the FLOPs of its instruction; summed over devices."""
    trace = Trace(file)
    timelines = [timeline for timeline, _ in read_devices([trace])]
    rows: dict[str, OpRow] = {}
    programs: dict[str, set[Program]] = {}
    for timeline in timelines:
        for name in timeline.names:
            programs.setdefault(name.name, set()).add(name.program)
    for timeline in timelines:
        joined = Join(ProgramLibrary([trace], [], timeline.names)).ops(timeline.names)
        counted = ~np.isin(timeline.lanes, list(timeline.beside))
        for op, (often, total) in zip(joined, _sums(timeline, counted), strict=True):
            before = rows.get(op.name.name, OpRow(0, 0.0, 0))
            rows[op.name.name] = OpRow(
                before.runs + often,
                before.seconds + total,
                op.record.flops if op.record else 0,
                op.work is DeviceWork.CONTROL,
            )
    # xprof's tables name an op without its program: names used by several programs are left out.
    return {name: row for name, row in rows.items() if len(programs[name]) == 1}


def _sums(timeline: DeviceTimeline, counted: Any) -> Iterator[tuple[int, float]]:
    """Runs and seconds of every op of a timeline, in the events that are counted."""
    ops, count = timeline.ops[counted], len(timeline.names)
    lengths = (timeline.ends - timeline.starts)[counted] / _PICOSECONDS
    seconds = np.bincount(ops, lengths, count).tolist()
    return zip(np.bincount(ops, minlength=count).tolist(), seconds, strict=True)


def our_kernels(file: Path) -> dict[str, OpRow]:
    """All kernels in command buffers, by their own names."""
    rows: dict[str, OpRow] = {}
    for timeline, _ in read_devices([Trace(file)]):
        everything = np.ones(len(timeline.ops), bool)
        for name, (often, total) in zip(timeline.names, _sums(timeline, everything), strict=True):
            if name.buffer and not name.name.startswith("Mem"):  # xprof lists no copies
                before = rows.get(name.name, OpRow(0, 0.0, 0))
                rows[name.name] = OpRow(before.runs + often, before.seconds + total, 0)
    return rows


def our_kpis(file: Path) -> Kpis:
    """A trace's KPIs by xprof's definitions: over the whole trace, not only the steps."""
    trace = Trace(file)
    devices = read_devices([trace])
    names = [name for timeline, _ in devices for name in timeline.names]
    join = Join(ProgramLibrary([trace], [], names))
    span, idle, moved = 0, 0.0, 0
    for timeline, _ in devices:
        counted = ~np.isin(timeline.lanes, list(timeline.beside))
        starts, ends = timeline.starts[counted], timeline.ends[counted]
        begin, end = int(starts.min()), int(ends.max())
        flat = np.zeros(len(starts), np.int64)
        span += end - begin
        idle += attribute_time(starts, ends, flat, flat + NO_PARENT, begin, end).idle
        events = np.bincount(timeline.ops[counted], minlength=len(timeline.names)).tolist()
        executions = Counter(timeline.executions.programs)
        ops = zip(join.ops(timeline.names), events, strict=True)
        moved += sum(_moved(op, often, executions[op.name.program]) for op, often in ops)
    measured = measure(devices, join)
    return Kpis(
        step_seconds=measured.step_seconds,
        span_seconds=span / _PICOSECONDS,
        busy_seconds=(span - idle) / _PICOSECONDS,
        hbm_bytes=moved,
        bytes_per_second=_bandwidth(measured.kind),
    )


def _bandwidth(kind: str) -> float:
    try:
        return hardware.lookup(kind).memory_bandwidth_bytes_per_sec or 0.0
    except UserError:  # traces of AMD GPUs name the device differently from JAX
        return 0.0


def _moved(op: JoinedOp, events: int, executions: int) -> int:
    """Bytes of an op's runs; a library call may be several kernels, each under its name."""
    if op.record is None or op.work is DeviceWork.CONTROL:
        return 0
    runs = op.record.runs * executions
    return op.record.hbm_bytes * (min(events, runs) if runs else events)


def _their_kpis(theirs: Mapping[str, Any]) -> Kpis:
    """From the page where it has more than one digit, else from the totals beside it."""
    roofline, profile = theirs["roofline_model"][0], theirs["op_profile"]
    pages = [table["p"] for table in theirs["overview_page"] if table and table.get("p")]
    page = {key: value for p in pages for key, value in p.items()}
    total = profile["byProgram"]["metrics"]
    return Kpis(
        step_seconds=float(page["steptime_ms_average"]) / 1e3,
        span_seconds=total["rawTime"] / _PICOSECONDS,
        busy_seconds=profile["byProgramExcludeIdle"]["metrics"]["rawTime"] / _PICOSECONDS,
        hbm_bytes=total["rawBytesAccessedArray"][0],
        bytes_per_second=float(roofline["p"]["peak_hbm_bw"]) * 2**30,
    )


def _report_kpis(ours: Kpis, theirs: Kpis) -> list[str]:
    """A line per KPI; those without a number from xprof are not compared."""
    rows = [("KPI", "xprof", "ours", "off")]
    for name, their in theirs.shown().items():
        our = ours.shown()[name]
        off = f"{abs(our / their - 1):.4%}" if their else "no number"
        rows.append((name, f"{their:,.6g}", f"{our:,.6g}", off))
    return ["", *columns(rows, "<>>>")]


def _of_rows(table: Any, name: str) -> Iterator[tuple[str, OpRow]]:
    ids = [column["id"] for column in table["cols"]]
    for row in table["rows"]:
        cells = dict(zip(ids, (cell["v"] for cell in row["c"]), strict=True))
        if cells.get("step", "Total") == "Total" and cells[name] != "Program":
            flops = cells["model_flop_rate"] * 1e9 * cells["avg_time"] / 1e6
            yield cells[name], OpRow(cells["occurrences"], cells["total_time"] / 1e6, flops)


def _of_kernels(table: Any) -> dict[str, OpRow]:
    """A kernel has a row for each launch configuration."""
    table = table[0] if isinstance(table, list) else table
    ids = [column["id"] for column in table["cols"]]
    found: dict[str, OpRow] = {}
    for row in table["rows"]:
        cells = dict(zip(ids, (cell["v"] for cell in row["c"]), strict=True))
        before = found.get(cells["kernel_name"], OpRow(0, 0.0, 0))
        seconds = before.seconds + cells["total_duration_us"] / 1e6
        found[cells["kernel_name"]] = OpRow(before.runs + cells["occurrences"], seconds, 0)
    return found


def _of_tree(node: Any) -> Iterator[tuple[str, OpRow]]:
    if "xla" in node and node["metrics"]["occurrences"]:
        numbers = node["metrics"]
        runs = numbers["occurrences"]
        seconds = numbers["rawTime"] / _PICOSECONDS
        yield node["name"], OpRow(runs, seconds, numbers["rawFlops"] / runs)
    for child in node["children"]:
        yield from _of_tree(child)


def _report(ours: Table, tables: Mapping[str, Table]) -> tuple[list[str], bool]:
    """A line for each table, and one for each matmul whose FLOPs differ."""
    head = ("table", "ops", "of ours", "time off, most", "matmuls", "FLOPs off by over 1%")
    rows, notes = [head], []
    is_right = True
    for name, theirs in tables.items():
        shared = [op for op in ours if op in theirs and not ours[op].is_control]
        if not shared:
            rows.append((name, str(len(theirs)), "0.00%", "no shared ops", "", ""))
            continue
        off = max(abs(theirs[op].seconds / ours[op].seconds - 1) for op in shared)
        matmuls = [op for op in shared if ours[op].flops]
        wrong = [op for op in matmuls if abs(theirs[op].flops / ours[op].flops - 1) > _WITHIN]
        covered = sum(ours[op].seconds for op in shared)
        leaves = sum(row.seconds for row in ours.values() if not row.is_control)
        share = f"{covered / leaves:.2%}"
        is_right &= off <= _WITHIN
        rows.append(
            (name, str(len(theirs)), share, f"{off:.4%}", str(len(matmuls)), str(len(wrong)))
        )
        notes += [
            f"{name}: {op}: {theirs[op].flops:,.0f} FLOPs, ours {ours[op].flops:,}" for op in wrong
        ]
    return [*columns(rows, "<>>>>>"), "", *notes], is_right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
