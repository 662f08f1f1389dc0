"""`mfu-jax published`: the printed numbers beside the recomputed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.published import published_runs
from tests.support.messages import is_told
from tests.support.metrics_lines import write_run
from tests.support.written_logs import WrittenLog


def test_the_command_prints_all_three_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["published", "palm-540b"]) == 0
    printed = capsys.readouterr().out
    assert "published 46.2" in printed
    assert "recomputed 46.2289" in printed
    assert "+0.063%" in printed
    assert "arXiv 2204.02311" in printed


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]):
    assert main(["published", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in runs] == [run.id for run in published_runs()]
    assert [len(run["checks"]) for run in runs] == [len(run.checks) for run in published_runs()]


def test_a_run_is_placed_among_like_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 GFLOP per token on a v6e; the peak of 900 TFLOP/s is the run's own."""
    path = write_run(tmp_path / "metrics.jsonl", [2.0] * 9, tokens=1000.0, tflops=50.0, peak=900.0)
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    values = {
        "devices": "8 × TPU v6 lite",
        "peak of one device": "900 TFLOP/s/device in bf16 (flag: peak_tflops_per_device=900)",
        "model TFLOP per device per step": "50 (dense; analytic)",
    }
    log.line("setup", 1.0, values=values, texts={})
    assert main(["published", "--like", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    mfus = {row["id"]: row["mfu"] for row in answer["runs"]}
    # 412.32 and 413.433 TFLOP/s are printed, with all pairs counted; the third run is 7% faster.
    assert mfus.pop("v6e-8-qwen3-8b-jax") == pytest.approx(
        412.32 / 900 * 58970 / 55063.97, rel=1e-3
    )
    assert mfus == {
        "v6e-8-qwen3-8b-maxtext": pytest.approx(412.32 / 900, rel=1e-4),
        "tpu-recipes-llama3.1-8b-v6e-8": pytest.approx(413.433 / 900, rel=1e-4),
    }
    like = answer["verdict"]["like_runs"]
    assert like["like"] == "models like this (7.5B to 7.6B active) on TPU v6e (Trillium)"
    assert main(["published", "--like", str(path)]) == 0
    assert "45.8%        8  v6e-8-qwen3-8b-maxtext" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["palm-541b"], ["--jsno"], ["palm-540b", "like=a"]])
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["published", *arguments]) == 2
    assert is_told(capsys.readouterr().err, hint=True)
