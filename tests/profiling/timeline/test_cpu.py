"""CPU devices of a trace written by hand; times are picoseconds."""

from __future__ import annotations

from pathlib import Path

from mfu_jax.profiling.timeline.cpu import timelines
from mfu_jax.profiling.timeline.platforms import read_devices
from mfu_jax.profiling.trace.xspace import Trace
from tests.support.xspace import Plane, space


def test_an_execution_is_over_when_its_executor_is_done(tmp_path: Path) -> None:
    """It frees memory after the last op; the other execution has no such event."""
    plane = Plane("/host:CPU")
    of = {"hlo_module": "jit_step", "program_id": 7, "device_ordinal": 0}
    first, second = ({**of, "run_id": run, "hlo_op": "fusion.1"} for run in (1, 2))
    events = [
        ("ThunkExecutor::Execute", 0, 100, {}),
        ("fusion.1", 10, 20, first),
        ("fusion.1", 40, 50, first),
    ]
    plane.line("worker", events, timestamp_ns=0)
    plane.line("other", [("fusion.1", 120, 30, second)], timestamp_ns=0)
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space(plane))
    [(timeline, _)] = read_devices([Trace(file)])
    assert timeline.executions.starts.tolist() == [10, 120]
    assert timeline.executions.ends.tolist() == [100, 150]
    assert timeline.ends.tolist() == [30, 90, 150]


MS = 10**9


def test_a_thunk_that_goes_on_after_its_return(tmp_path: Path) -> None:
    """Two matmuls return after 1 ms, and their ids tell when they are done.

    What waits for the first one runs when it is ready, at 40 ms, before its end is recorded.
    Nothing waits for the other, which is done at 60 ms. The loop around them is no work of its own.
    """
    plane = Plane("/host:CPU")
    of = {"hlo_module": "jit_step", "program_id": 7, "device_ordinal": 0, "run_id": 1}

    def op(name: str, start: int, length: int, producer: int) -> tuple[str, int, int, object]:
        return name, start * MS, length * MS, {**of, "hlo_op": name, "_p": producer}

    def end(name: str, at: float, producer: int) -> tuple[str, int, int, object]:
        return f"end: {name}", int(at * MS), 1, {"_c": producer}

    plane.line(
        "worker",
        [
            ("ThunkExecutor::Execute", 0, 5 * MS, {}),
            *(op("while.1", 0, 5, 1), op("dot.1", 1, 1, 2), op("dot.2", 2, 1, 3)),
            *(op("copy.1", 3, 2, 4), end("copy.1", 5, 4)),
        ],
    )
    plane.line(
        "other",
        [
            ("ThunkExecutor::Execute", 40 * MS, 10 * MS, {}),
            *(op("fusion.1", 40, 10, 5), end("fusion.1", 50, 5), end("dot.1", 50.001, 2)),
            *(end("dot.2", 60, 3), end("while.1", 60.001, 1)),
        ],
    )
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space(plane))
    [(timeline, _)] = read_devices([Trace(file)])
    first = min(timeline.starts.tolist())
    ends = {
        timeline.names[o].name: (end - first) // MS
        for o, end in zip(timeline.ops.tolist(), timeline.ends.tolist(), strict=True)
    }
    assert ends == {"while.1": 5, "dot.1": 40, "dot.2": 60, "copy.1": 5, "fusion.1": 50}
    lanes = {timeline.names[o].name: n for o, n in zip(timeline.ops, timeline.lanes, strict=True)}
    assert len({lanes[name] for name in ("while.1", "dot.1", "dot.2", "fusion.1")}) == 4
    assert timeline.executions.ends.tolist() == [first + 60 * MS]


def test_a_host_without_threads_has_no_devices(tmp_path: Path) -> None:
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space(Plane("/host:CPU")))
    trace = Trace(file)
    assert list(timelines(trace, trace.planes[0])) == []
