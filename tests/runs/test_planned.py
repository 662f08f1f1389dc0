"""A plan beside a run: numbers of both files, by cause in the groups that they share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.cli import main
from tests.support.metrics_lines import line

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
        "all-gather on ici": 0.06,
        "all-gather on dcn": 0.03,
        "copy": 0.01,
    },
}
# A profiled step of 1 s, as the run's own record has it.
BARS = {
    "idle: between calls": 0.05,
    "exposed communication: all-gather over fsdp": 0.1,
    "exposed communication: all-reduce over data": 0.05,
    "exposed copies to and from memory": 0.02,
    "memory-bound and vector work": 0.18,
    "matmuls below peak": 0.3,
    "rematerialised": 0.1,
    "MFU": 0.2,
}


def write(folder: Path, *, is_profiled: bool = True) -> list[str]:
    profile = {f"profile/waterfall/{name}": seconds for name, seconds in BARS.items()}
    profile |= {"profile/mfu": 0.2, "profile/step_time_seconds": 1.0}
    memory = {"memory/peak_bytes_in_use": 3.0 * 2**30}
    lines = [line(n, 1.0, **memory) for n in range(20)]
    if is_profiled:
        lines[12] = line(12, 1.0, **memory, **profile)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return ["report", str(folder), "--plan", str(folder / "plan.json")]


def test_a_plan_beside_a_profiled_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    causes = {row["name"]: (row["predicted"], row["measured"]) for row in plan["time_by_cause"]}
    assert causes == {
        "matmuls and kernels": (0.5, pytest.approx(0.6)),
        "memory-bound and vector work": (0.2, 0.18),
        "all-gather": (pytest.approx(0.09), 0.1),
        "all-reduce": (0.0, 0.05),
        "copies": (0.01, 0.02),
        "idle": (0.0, 0.05),
    }
    assert sum(predicted for predicted, _ in causes.values()) == pytest.approx(0.8)
    assert sum(measured for _, measured in causes.values()) == pytest.approx(1.0)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step time +800\.000 ms +1\.000 s +1\.25\n", shown)
    assert re.search(r"  all-gather +90\.000 ms +100\.000 ms +1\.11\n", shown)


def test_the_page_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*write(tmp_path), "--html"]) == 0
    page = (tmp_path / "report.html").read_text()
    start = page.index('data-by="cause"')
    row = page[page.index('title="idle"', start) :].partition("</tr>")[0]
    assert re.findall(r'data-value="(.*?)"', row) == ["0.0", "0.05"]


def test_without_a_profile_no_cause_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*write(tmp_path, is_profiled=False), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert {row["measured"] for row in plan["time_by_cause"]} == {None}
    assert plan["notes"] == ["the run has no profile (profile_steps=): no measured causes"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"time_by_cause": {}}', "\x00"])
def test_a_file_that_holds_no_plan_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "expected what mfu-jax plan … --json prints" in error
    assert error.count("\n") == 1
