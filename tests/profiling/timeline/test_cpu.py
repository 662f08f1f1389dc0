"""CPU devices of a trace written by hand; times are picoseconds."""

from __future__ import annotations

from pathlib import Path

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
