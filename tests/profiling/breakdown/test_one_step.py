"""The events of one step, for the timeline of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.profiling.breakdown.one_step import Lane
from mfu_jax.profiling.profile import read_profile
from tests.profiling.conftest import STEPS
from tests.support import accelerator_traces as traces
from tests.support.xspace import Plane

US = 10**6  # picoseconds


def lanes_of(folder: Path, *planes: Plane) -> dict[str, Lane]:
    traces.write_program(folder, "TPU v5 lite")
    traces.write_trace(folder, *planes)
    return {lane.name: lane for lane in read_profile(folder).picture.lanes}


def test_a_step_as_it_was_written(tmp_path: Path) -> None:
    lanes = lanes_of(tmp_path, traces.host(), traces.tpu())
    assert list(lanes) == ["host", "TPU:0 · 1", "TPU:0 · 2"]
    found = [(e.name, e.start, e.start + e.seconds) for e in lanes["TPU:0 · 1"].events]
    shown = [op for op in traces.OPS if op[2] > op[1]]
    for (name, start, end), (op, begin, finish) in zip(found, shown, strict=True):
        assert (name, start, end) == (op, pytest.approx(begin / 1e6), pytest.approx(finish / 1e6))
    scopes = [e.op.record.scope for e in lanes["TPU:0 · 1"].events if e.op and e.op.record]
    assert scopes[0] == "norm"


def test_devices_keep_their_places_in_time(tmp_path: Path) -> None:
    lanes = lanes_of(tmp_path, traces.host(), traces.tpu(), traces.tpu(1, late=7))
    first, second = lanes["TPU:0 · 1"].events[0], lanes["TPU:1 · 1"].events[0]
    assert first.start == 0
    late = next(e for e in lanes["TPU:1 · 1"].events if e.name == "fusion.3" and e.start > 0)
    assert late.start == pytest.approx(7e-6)
    assert second.start <= late.start


def test_of_many_devices_eight_are_shown(tmp_path: Path) -> None:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), *(traces.tpu(n) for n in range(20)))
    picture = read_profile(tmp_path).picture
    assert picture.devices == 8
    names = {lane.name.partition(" ")[0] for lane in picture.lanes} - {"host"}
    assert len(names) == 8


def test_short_events_are_drawn_together(tmp_path: Path) -> None:
    plane, kernels = traces.gpu(), 9000
    starts = [(80 + 100 * step) * US + i * 2000 for step in range(3) for i in range(kernels)]
    plane.line("Stream #8(Compute)", [("mystery", start, 1000, {}) for start in starts])
    lanes = lanes_of(tmp_path, traces.host(), plane)
    drawn = [event for lane in lanes.values() for event in lane.events]
    assert len(drawn) < 2400 + 6 * 400
    together = [int(e.name.split()[0]) for e in drawn if e.name.endswith("short events")]
    alone = sum(event.name == "mystery" for event in drawn)
    assert sum(together) + alone == kernels


def test_a_cpu_has_one_lane_for_all_its_idle_threads(cpu_folder: Path) -> None:
    profile = read_profile(cpu_folder, peak_tflops_per_device=0.01)
    lanes = [lane.name for lane in profile.picture.lanes]
    assert lanes[0] == "host"
    assert profile.picture.devices == 8
    assert all(len([n for n in lanes if n.startswith(f"CPU:{d}")]) <= 6 for d in range(8))
    assert 0 < profile.picture.seconds < STEPS * profile.measured.step_seconds * 2
