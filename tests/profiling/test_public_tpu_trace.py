"""A trace of four TPU v6e against the tables that xprof 2.24.2 makes of it.

The trace is openxla/xprof's (Apache 2.0), xprof/convert/test_xplanes/tpu_inference_2.xplane.pb at
01d85deb: 100 executions of a program that adds to three arrays in the host's memory, 5 GiB each.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.profiling.profile import Profile, read_profile
from tests.campaigns.xprof import our_kpis

FILE = Path(__file__).parents[1] / "data" / "xprof_tpu_v6e.xplane.pb.xz"

# Microseconds of one run, the mean of 400: "avg_time" of xprof's HLO stats.
XPROF = {
    "copy-done.4": 194433.039328125,
    "copy-done.2": 194106.93204687498,
    "copy-done": 189177.596284375,
    "copy-done.5": 182365.45665625,
    "broadcast_add_fusion.1": 8155.268534375,
    "broadcast_add_fusion": 7976.4559125,
    "broadcast_add_fusion.2": 7918.009646875,
    "copy-start.4": 0.006,
}
# The totals of its roofline model and op profile over all four chips, and the overview page's idle
# time, which has one digit.
XPROF_SPAN, XPROF_BUSY = 363.72969876875, 315.11790370625  # seconds
XPROF_IDLE_PERCENT = 13.4
XPROF_HBM_BYTES = 25_904_021_504_000
XPROF_HBM_UTILISATION = 0.04347867965403494  # of 1525.5 GiB/s
ARRAY = 5 * 1024 * 1024 * 256 * 4  # bytes


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tpu") / "host.xplane.pb"
    path.write_bytes(lzma.decompress(FILE.read_bytes()))
    return path


@pytest.fixture(scope="module")
def profile(trace: Path) -> Profile:
    return read_profile(trace)


def test_the_devices_are_known_by_what_a_trace_calls_them(profile: Profile) -> None:
    assert (profile.measured.kind, profile.measured.platform) == ("TPU v6 Lite", "tpu")
    assert profile.peaks.bytes_per_sec == 1638e9
    assert len(profile.measured.devices) == 4
    assert profile.measured.steps == 99  # the hundredth only ends the one before


def test_times_are_the_devices_own(profile: Profile) -> None:
    rows = {row.name: row for row in profile.table("op")}
    for name, microseconds in XPROF.items():
        assert rows[name].runs == 1
        if name != "copy-start.4":  # on the one device that shows copies under way, they fill gaps
            assert rows[name].seconds == pytest.approx(microseconds / 1e6, rel=1e-3)
    seconds = sum(XPROF.values()) / 1e6
    assert profile.measured.step_seconds == pytest.approx(seconds, rel=1e-3)


def test_key_numbers_of_the_whole_trace(trace: Path) -> None:
    """A step is not among them: xprof finds none in this trace."""
    ours = our_kpis(trace)
    assert ours.hbm_bytes == XPROF_HBM_BYTES
    assert ours.span_seconds == pytest.approx(XPROF_SPAN, rel=1e-9)
    assert ours.busy_seconds == pytest.approx(XPROF_BUSY, rel=1e-9)
    shown = ours.shown()
    assert f"{shown['device idle, %']:.1f}" == str(XPROF_IDLE_PERCENT)
    used = shown["HBM bandwidth utilisation, %"] / 100
    assert used == pytest.approx(XPROF_HBM_UTILISATION, rel=1e-4)


def test_waits_for_the_host_are_a_bar_of_their_own(profile: Profile) -> None:
    waits = sum(us for name, us in XPROF.items() if name.startswith("copy-done")) / 1e6
    bars = {bar.name: bar.seconds for bar in profile.waterfall}
    assert bars["exposed copies to and from the host"] == pytest.approx(waits, rel=1e-3)
    assert sum(bars.values()) == pytest.approx(profile.measured.step_seconds, rel=1e-9)
    assert profile.coverage > 0.999


def test_bytes_of_a_copy_are_not_the_bandwidth_of_its_start(profile: Profile) -> None:
    rows = {row.name: row for row in profile.table("op")}
    adds = rows["broadcast_add_fusion"]
    assert adds.hbm_bytes == 2 * ARRAY
    assert adds.bandwidth_share == pytest.approx(2 * ARRAY / 1638e9 / 7976.456e-6, rel=1e-3)
    to_device, to_host = rows["copy-start"], rows["copy-start.1"]
    assert to_device.hbm_bytes == to_host.hbm_bytes == ARRAY  # the other side is the host's memory
    assert to_device.bandwidth_share == to_host.bandwidth_share == 0
    assert {rows[name].bound_by for name in ("copy-done", "copy-start.1")} == {"copies"}


def test_tables_sort_by_any_column(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--by", "op", "sort=bandwidth", "--top", "3"]
    assert main(["profile", str(trace), *words]) == 0
    table = capsys.readouterr().out.partition("by op")[2].splitlines()[1:4]
    fastest = ["broadcast_add_fusion.2", "broadcast_add_fusion", "broadcast_add_fusion.1"]
    assert [line.split()[0] for line in table] == fastest  # 10 GiB in 7.92, 7.98 and 8.16 ms
