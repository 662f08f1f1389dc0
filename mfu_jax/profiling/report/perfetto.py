"""A trace with each op's FLOPs, in Chrome's trace-event format: ui.perfetto.dev opens it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.breakdown.tables import model_share
from mfu_jax.profiling.join.callbacks import with_callbacks
from mfu_jax.profiling.join.ops import Join, JoinedOp
from mfu_jax.profiling.join.programs import open_traces
from mfu_jax.profiling.join.unnamed_kernels import with_instructions
from mfu_jax.profiling.timeline.devices import DeviceTimeline, apart
from mfu_jax.storage.targets import write_whole
from mfu_jax.storage.trace_folders import trace_files

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile

_SECOND = 1e12  # picoseconds
_NANOSECOND = 1000
_PROGRAMS = 10_000  # the lane of whole programs


def write_perfetto(profile: Profile, path: str) -> str:
    """Writes the timeline that a profile was made of; returns `path`.

    Args:
        profile: the profile.
        path: a name in ``.gz`` is compressed.

    Raises:
        UserError: the file cannot be written.
    """
    devices, library = open_traces(trace_files(Path(profile.source)))
    join = Join(library)
    began = min(int(np.min(timeline.starts)) for timeline, _ in devices)
    events: list[Mapping[str, Any]] = []
    for number, (timeline, host) in enumerate(devices):
        named = with_callbacks(with_instructions(timeline, join), host, join)
        events += _device(named, number, began, join, profile)
    content = json.dumps({"traceEvents": events}, separators=(",", ":")).encode()
    write_whole(path, "--perfetto", gzip.compress(content) if path.endswith(".gz") else content)
    return path


def _device(
    timeline: DeviceTimeline, process: int, began: int, join: Join, profile: Profile
) -> Iterator[Mapping[str, Any]]:
    """A process of the trace: a track for each lane, and one for whole programs."""
    yield _name("process_name", process, 0, timeline.device)
    for lane in sorted({*map(int, timeline.lanes)}):
        yield _name("thread_name", process, lane, f"lane {lane}")
    runs = timeline.executions
    spans = [*zip(map(int, runs.starts), map(int, runs.ends), strict=True)]
    # Perfetto drops a span that overlaps another one of its track.
    tracks = (_PROGRAMS + apart(runs.starts, runs.ends)).tolist()
    for track in sorted({*tracks}):
        yield _name("thread_name", process, track, "programs")
    for program, track, run in zip(runs.programs, tracks, spans, strict=True):
        yield _event(program.module, process, track, run, began, {})
    joined = join.ops(timeline.names)
    costs = [_cost(op, profile) for op in joined]
    for op, lane, *span in zip(
        timeline.ops, timeline.lanes, timeline.starts, timeline.ends, strict=True
    ):
        name, (args, flops, least, share) = joined[op].name.name, costs[op]
        if seconds := (int(span[1]) - int(span[0])) / _SECOND:
            # A library's call is several kernels on GPUs: a faster one than the peak allows is not
            # the one that multiplies.
            rates: dict[str, Any] = {}
            if 0 < least <= seconds:
                rates = {"mfu": least * share / seconds, "hfu": least / seconds, "flops": flops}
            yield _event(name, process, int(lane), span, began, {**args, **rates})


def _cost(op: JoinedOp, profile: Profile) -> tuple[dict[str, Any], int, float, float]:
    """An op's scope and kind; of one run its FLOPs, shortest seconds, and the model's share."""
    args = {"work": op.work.name.lower(), "kind": op.kind}
    if op.record is None:
        return args, 0, 0.0, 0.0
    once = OpTime(op=op, seconds=0.0, self_seconds=0.0, runs=1.0)
    cost = {
        "scope": op.record.scope,
        "phase": op.record.phase,
        "hbm_bytes": op.record.hbm_bytes,
    }
    known = {name: value for name, value in cost.items() if value}
    return args | known, op.record.flops, once.shortest(profile.peaks), model_share(once)


def _event(
    name: str, process: int, lane: int, span: Any, began: int, args: Mapping[str, Any]
) -> Mapping[str, Any]:
    # Whole nanoseconds: Perfetto cuts both numbers off there, and drops an op whose end then lies
    # behind that of the op around it.
    start, end = ((int(at) - began) // _NANOSECOND for at in span)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "pid": process, "tid": lane, **times, "args": args}


def _name(what: str, process: int, lane: int, name: str) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}
