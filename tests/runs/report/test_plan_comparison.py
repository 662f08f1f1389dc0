"""A plan beside a run: numbers of both files, and the gap between them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.cli import main
from mfu_jax.dumps import load
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import parse_target
from tests.support.archives import unpack
from tests.support.messages import is_told
from tests.support.metrics_lines import line
from tests.support.written_logs import WrittenLog

PLAN: dict[str, Any] = {
    "target": "8 × TPU v5p",
    "step_time_seconds": 0.8,
    "mfu": 0.25,
    "hfu": None,
    "memory_peak_bytes": 2**31,
    "time_by_cause": {
        "matmul": 0.4,
        "kernel": 0.1,
        "vector": 0.2,
        "all-gather over fsdp on ici": 0.06,
        "all-gather on dcn": 0.03,
        "copy": 0.01,
    },
}


def write(folder: Path) -> list[str]:
    lines = [line(n, 1.0, **{"memory/peak_bytes_in_use": 3.0 * 2**30}) for n in range(20)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return ["report", str(folder), "--plan", str(folder / "plan.json")]


def test_a_plan_beside_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path)
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    rows = {row["name"]: (row["predicted"], row["measured"], row["ratio"]) for row in plan["rows"]}
    assert rows == {
        "step time": (0.8, 1.0, 1.25),
        "MFU": (0.25, pytest.approx(0.2), pytest.approx(0.8)),
        "HFU": (None, None, None),
        "peak memory": (2**31, 3 * 2**30, 1.5),
    }
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step time +800\.000 ms +1\.000 s +1\.25\n", shown)


def test_the_page_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*write(tmp_path), "--html"]) == 0
    page = (tmp_path / "report.html").read_text()
    start = page.index('data-by="plan and run"')
    row = page[page.index('title="step time"', start) :].partition("</tr>")[0]
    assert re.findall(r'data-value="(.*?)"', row) == ["0.8", "1.0", "1.25"]


SAME = {
    "hardware": "TPU v5p",
    "devices": 8,
    "model_flops": 2 * 10**12,  # of the run's lines
    "convention": "maxtext",
    "step_time_bound_seconds": 0.4,
    "step_time_range": [0.9, 1.1],
}


@pytest.mark.parametrize(
    ("change", "devices", "note"),
    [
        ({}, "8 × TPU v5p (2 processes)", "within the plan's range, 900.000 ms to 1.100 s"),
        ({"step_time_range": [0.7, 0.9]}, "8 × TPU v5p (2 processes)", "outside of the plan's"),
        ({"step_time_range": ["?", 1]}, "8 × TPU v5p (2 processes)", ""),
        ({"step_time_bound_seconds": 1.1}, "8 × TPU v5p (2 processes)", "faster than the plan's"),
        ({"step_time_bound_seconds": 1.01, "step_time_range": None}, "8 × TPU v5p", ""),
        ({"step_time_range": None}, "8 × TPU v6 lite (1 processes)", "the run was on TPU v6 lite"),
        ({"step_time_range": None}, "1 × cpu (1 processes)", "8 devices, the run had 1"),
        (
            {"step_time_range": None, "model_flops": 10**12},
            "8 × TPU v5p (2 processes)",
            "the planned model needs 1 TFLOP a step and device, the run's 2:",
        ),
        (
            {"step_time_range": None, "model_flops": 10**12, "convention": "exact"},
            "8 × TPU v5p",
            "",
        ),
    ],
)
def test_where_the_run_is_not_what_was_planned(
    change: dict[str, Any],
    devices: str,
    note: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = write(tmp_path)
    values = {"devices": devices, "model TFLOP per device per step": "2 (maxtext: …)"}
    WrittenLog(tmp_path).line("setup", 1.0, values=values, texts={})
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, **SAME, **change}))
    assert main([*words, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["plan"]["notes"]
    assert [found for found in notes if note in found] if note else notes == []


@pytest.mark.parametrize(("kind", "is_told_of"), [("TPU v5p", True), ("TPU v5 lite", False)])
def test_the_bound_of_another_chip_is_no_bound(
    kind: str, is_told_of: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path)
    WrittenLog(tmp_path).line("setup", 1.0, values={"devices": f"4 × {kind}"}, texts={})
    plan = {**PLAN, **SAME, "hardware": "TPU v5p", "mfu": 0.4, "step_time_bound_seconds": 0.5}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main([*words, "--json"]) == 0
    bound = json.loads(capsys.readouterr().out)["verdict"]["bound_mfu"]
    assert (bound is not None) == is_told_of


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"time_by_cause": {}}', "\x00"])
def test_a_file_that_holds_no_plan_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "expected what mfu-jax plan … --json prints" in error
    assert is_told(error, hint=True)


def test_without_a_profile_the_log_divides_the_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path)
    lines = [line(n, 0.9 if n < 19 else 2.7) for n in range(20)]
    lines[0] = line(0, 9.0, kind="compile", **{"compile/seconds": 8.0})
    lines[5] = line(5, 0.9, **{"goodput/data_wait_seconds": 1.9})
    lines[6] = line(6, 0.9, **{"gpu/sm_clock_mhz": 1830 / 1.1})
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    plan = {**PLAN, "hardware": "H100 SXM"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main([*words, "--json"]) == 0
    gap = json.loads(capsys.readouterr().out)["plan"]["gap"]
    assert gap["by_reason"] == {
        "compile": pytest.approx(8 / 19),
        "waiting host": pytest.approx(0.1),
        "outlier steps": pytest.approx(1.8 / 19),
        "lower clock": pytest.approx(0.05),  # a tenth of the plan's matmuls
        "unexplained": pytest.approx(0.05),
    }
    assert list(gap["by_reason"])[:3] == ["compile", "waiting host", "outlier steps"]
    assert gap["measured_seconds"] == pytest.approx(0.9 + 9.9 / 19 + 1.8 / 19)
    assert sum(gap["by_reason"].values()) == pytest.approx(gap["seconds"])
    assert "from the log alone" in gap["notes"][0]
    assert main(words) == 0
    assert re.search(
        r"\ncompile +421\.053 ms\nwaiting host +100\.000 ms\n", capsys.readouterr().out
    )
    assert main([*words, "--html"]) == 0
    assert 'data-by="gap"' in (tmp_path / "report.html").read_text()


def test_with_a_trace_the_gap_is_by_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path)
    unpack("h100_loops.tar.xz", tmp_path)
    (tmp_path / "sync_host").rename(tmp_path / "profile")
    program = load(tmp_path / "profile" / "programs" / "step.mfu")
    plan = make_plan(program, parse_target(hardware="h100", devices=1)).to_json()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    gap = found["gap"]
    assert next(iter(gap["by_reason"])) == "waiting host"
    assert gap["measured_seconds"] == pytest.approx(14.305e-3, abs=1e-6)
    assert {row["op"] for row in gap["changes"]} > {"custom-call.0", "custom-call.1"}
    assert main(words) == 0
    times = 14.305e-3 / plan["step_time_seconds"]
    assert f"gap to the plan: a step takes 14.305 ms, {times:.2f} ×" in capsys.readouterr().out
    (tmp_path / "profile" / "programs" / "step.mfu").unlink()
    for trace in (tmp_path / "profile").rglob("*.xplane.pb"):
        trace.write_bytes(b"?")
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["notes"][-1].startswith("no gap by op: ")
    assert "changes" not in plan["gap"]
