"""Which host the others wait for, from a trace of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.profiling.host_waits import read_collective_times
from mfu_jax.runs.report.collective_waits import CollectiveWaits
from mfu_jax.storage.trace_folders import move_to_sessions, own_folder, trace_files
from tests.support import accelerator_traces as traces

# The first op takes until `begin`; from there to 18 µs the all-gather is waited for.
_REST = traces.OPS[3:]


def ops(begin: int) -> tuple[tuple[str, int, int], ...]:
    first = (("gather-start.1", 0, 0), ("fusion.3", 0, begin), ("gather-done.1", begin, 18))
    return (*first, *_REST)


def write_hosts(folder: Path, *begins: int) -> None:
    traces.write_program(folder, "TPU v5 lite")
    for number, begin in enumerate(begins):
        name = f"host{number}.cluster"
        traces.write_trace(folder, traces.host(), traces.tpu(ops=ops(begin)), name=name)


def test_the_last_one_waits_least(tmp_path: Path) -> None:
    write_hosts(tmp_path, 4, 17, 6)
    found = CollectiveWaits.of("traces", read_collective_times(tmp_path)).hosts
    assert [host.host for host in found] == ["host1", "host2", "host0"]
    seconds = [1e6 * host.collective_seconds for host in found]
    assert seconds == pytest.approx([1, 12, 14])
    assert [1e6 * host.wait_seconds for host in found] == pytest.approx([0, 11, 13])
    assert [1e6 * host.step_seconds for host in found] == pytest.approx([100, 100, 100])


def test_one_host_waits_for_nobody(tmp_path: Path) -> None:
    write_hosts(tmp_path, 4)
    assert read_collective_times(tmp_path) == {}


def test_hosts_that_end_within_a_minute_are_one_session(tmp_path: Path) -> None:
    sessions = tmp_path / "plugins" / "profile"
    for place in (
        *("2026_01_01_23_58_59/a", "2026_01_01_23_59_50/a", "2026_01_01_23_59_50/b"),
        *("2026_01_02_00_00_00/b", "other/c"),
    ):
        (sessions / place).parent.mkdir(parents=True, exist_ok=True)
        (sessions / f"{place}.xplane.pb").touch()
    (sessions / "other").rename(sessions / "0_other")
    found = [str(file.relative_to(sessions)) for file in trace_files(tmp_path)]
    assert found == ["2026_01_01_23_59_50/a.xplane.pb", "2026_01_02_00_00_00/b.xplane.pb"]


def test_processes_of_one_machine_keep_their_traces(tmp_path: Path) -> None:
    for process in range(2):
        session = own_folder(tmp_path, process) / "plugins" / "profile" / "2026_01_01_00_00_00"
        session.mkdir(parents=True)
        (session / "node.xplane.pb").write_text(str(process))
        if process:  # what is being written is not read
            assert [file.read_text() for file in trace_files(tmp_path)] == ["0"]
        move_to_sessions(tmp_path, process)
    assert [file.read_text() for file in trace_files(tmp_path)] == ["0", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plugins"]
