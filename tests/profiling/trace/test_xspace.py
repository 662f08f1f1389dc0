"""Trace files are read as JAX's own reader reads them; damaged ones are one line."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.profiling.trace.xspace import ABSENT, Trace
from mfu_jax.storage.trace_folders import trace_files
from tests.support.messages import is_told
from tests.support.xspace import Plane, space

NUMBERS, TEXTS = ("program_id", "run_id", "device_ordinal", "step_num"), ("hlo_op", "hlo_module")


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # JAX's, on Python 3.12
def test_a_real_trace_is_read_as_jax_reads_it(cpu_folder: Path) -> None:
    (file,) = trace_files(cpu_folder)
    trace = Trace(file)
    planes = {plane.name: plane for plane in trace.planes}
    compared = 0
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        lines = planes[plane.name].lines
        for line, own in zip(plane.lines, lines, strict=True):
            assert line.name == own.name
            events = own.events(NUMBERS, TEXTS)
            columns = (events.metadata, events.starts, events.ends)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for number, (event, (kind, start, end)) in enumerate(
                zip(line.events, rows, strict=True)
            ):
                stats = dict(event.stats)
                assert event.name == planes[plane.name].metadata[kind].name
                assert event.start_ns == pytest.approx(trace.epoch_ns + start / 1000, abs=1)
                assert event.duration_ns == pytest.approx((end - start) / 1000, abs=1)
                for name in NUMBERS:
                    assert stats.get(name, ABSENT) == events.numbers[name][number]
                for name in TEXTS:
                    key = events.texts[name][number]
                    assert stats.get(name) == (None if key == ABSENT else trace.texts[key])
                compared += 1
    assert compared > 1000


def test_events_of_every_shape(tmp_path: Path) -> None:
    plane = Plane("/device:TPU:0", kind="v5e", cores=2)
    name = "x" * 300  # a length of two bytes
    long = {"step_num": 2**40, "hlo_op": name, "hlo_module": "m" * 200}
    epoch = 1_700_000_000 * 10**9
    events = [("e", 0, 7, {}), (name, 2**45, 3, long), ("e", 5, 0, {"step_num": -3})]
    plane.line("a", events, timestamp_ns=epoch)
    plane.line("later", [("e", 1, 1, {"step_num": "17"})], timestamp_ns=epoch + 2)
    plane.line("empty", [])
    file = tmp_path / "t.xplane.pb"
    file.write_bytes(space(plane))
    trace = Trace(file)
    assert trace.epoch_ns == epoch
    (read,) = trace.planes
    assert read.stats == {"kind": "v5e", "cores": 2}
    first, later, empty = (line.events(("step_num",), ("hlo_op",)) for line in read.lines)
    assert first.starts.tolist() == [0, 2**45, 5]
    assert (first.ends - first.starts).tolist() == [7, 3, 0]
    assert first.numbers["step_num"].tolist() == [ABSENT, 2**40, -3]
    assert [trace.texts[key] for key in first.texts["hlo_op"].tolist() if key != ABSENT] == [name]
    assert [read.metadata[kind].name for kind in first.metadata.tolist()] == ["e", name, "e"]
    assert later.starts.tolist() == [2000 + 1]
    assert later.numbers["step_num"].tolist() == [17]
    assert len(empty.starts) == 0


def read_all(file: Path) -> None:
    for plane in Trace(file).planes:
        for line in plane.lines:
            line.events(NUMBERS, TEXTS)


def test_damaged_files_are_one_line(cpu_folder: Path, tmp_path: Path) -> None:
    whole = trace_files(cpu_folder)[0].read_bytes()
    contents = {
        "empty": b"",
        "text": b"not a trace\n" * 100,
        "zeros": bytes(1000),
        **{f"cut {n}": whole[: len(whole) * n // 7] for n in range(1, 7)},
    }
    for name, content in contents.items():
        file = tmp_path / f"{name}.xplane.pb"
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"(?s)cannot be read .*expected an \.xplane") as error:
            read_all(file)
        assert is_told(str(error.value))
    with pytest.raises(UserError, match="cannot be read"):
        Trace(tmp_path / "missing.xplane.pb")


def test_the_newest_session_of_a_folder_with_all_its_hosts(tmp_path: Path) -> None:
    for path in ("2026_01_01/a", "2026_01_02/a", "2026_01_02/b"):
        file = tmp_path / "plugins" / "profile" / f"{path}.xplane.pb"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert [file.name for file in trace_files(tmp_path)] == ["a.xplane.pb", "b.xplane.pb"]
    assert {file.parent.name for file in trace_files(tmp_path)} == {"2026_01_02"}
    for missing in (tmp_path / "nothing", tmp_path / "plugins" / "profile" / "2026_01_01" / "x"):
        with pytest.raises(UserError, match="expected the folder given to"):
            trace_files(missing)


def test_a_missing_trace_says_why(tmp_path):
    with pytest.raises(UserError, match="no such folder") as caught:
        trace_files(tmp_path / "none")
    assert caught.value.hint == "usually a typo"
    with pytest.raises(UserError, match="without traces") as caught:
        trace_files(tmp_path)
    assert "profile_steps=" in caught.value.hint
