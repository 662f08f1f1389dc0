"""The timeline for ui.perfetto.dev: every op of the trace, with the FLOPs that it ran."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.profiling.profile import read_profile
from mfu_jax.profiling.report.perfetto import write_perfetto
from tests.profiling.conftest import MODEL_FLOPS, STEPS
from tests.support import accelerator_traces as traces

PEAK = 0.1


def test_each_device_is_a_process_whose_ops_have_the_flops_of_the_step(
    cpu_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json.gz"
    words = (f"perfetto={file}", f"peak_tflops_per_device={PEAK}")
    assert main(["profile", str(cpu_folder), *words]) == 0
    assert str(file) in capsys.readouterr().err
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert len(names) == 8
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) >= 0
    assert all(event["dur"] > 0 for event in spans if "work" in event["args"])
    runs = Counter(e["name"] for e in spans if e["pid"] == 0 and "work" not in e["args"])
    assert runs == {"jit_step": STEPS}
    matmuls = [event for event in spans if event["args"].get("flops")]
    profile = read_profile(cpu_folder, peak_tflops_per_device=PEAK)
    executed = sum(event["args"]["flops"] for event in matmuls)
    assert executed == profile.program.ledger.executed * STEPS * 8
    assert executed > MODEL_FLOPS * STEPS
    for event in matmuls:
        args = event["args"]
        at_peak = args["flops"] / (PEAK * 1e12) / (event["dur"] * 1e-6)
        assert args["hfu"] == pytest.approx(at_peak, rel=1e-6)
        assert 0 <= args["mfu"] <= args["hfu"] * (1 + 1e-9)
    assert any("mlp" in event["args"].get("scope", "") for event in matmuls)


def test_perfetto_drops_no_event(tmp_path: Path) -> None:
    """It reads whole nanoseconds, and drops what overlaps another event of its track in part."""
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    file = tmp_path / "t.json"
    write_perfetto(read_profile(tmp_path), str(file))
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["ph"] == "X":
            start, length = (1000 * event[name] for name in ("ts", "dur"))
            assert (start, length) == (round(start), round(length))
            tracks[event["pid"], event["tid"]].append((round(start), -round(length)))
    for track in tracks.values():
        around: list[int] = []
        for start, minus in sorted(track):
            while around and around[-1] <= start:
                around.pop()
            assert not around or start - minus <= around[-1]
            around.append(start - minus)


def test_a_name_without_gz_is_plain_json(cpu_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    assert (
        main(["profile", str(cpu_folder), "--perfetto", str(file), "--peak_tflops_per_device=1"])
        == 0
    )
    assert json.loads(file.read_text())["traceEvents"]
