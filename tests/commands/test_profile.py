"""`mfu-jax profile`: its pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfu_jax import cli
from mfu_jax.published import find_run
from tests.support import accelerator_traces as traces
from tests.support.metrics_lines import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    return tmp_path


def test_the_page_goes_beside_the_trace_or_where_it_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(folder), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "profile.html")
    assert cli.main(["profile", str(folder), "--html", str(folder / "other.html")]) == 0
    page = (folder / "other.html").read_text(encoding="utf-8")
    assert page == (folder / "profile.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")


def test_pages_that_cannot_be_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, error in (
        ([str(folder), "--html", str(folder / "programs" / "step.mfu" / "p.html")], "--html"),
        ([str(folder), "p.html"], "'p.html' without --html"),
        ([str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder)] * 3, "expected a folder with a trace"),
        ([str(folder), str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder), str(folder), "--html"], "--html and two profiles: expected one folder"),
        ([], "got none"),
        ([str(folder), "perfetto=nowhere://bucket/t.json"], "cannot be reached"),
    ):
        assert cli.main(["profile", *words]) == 2
        assert error in capsys.readouterr().err


def test_an_mfu_above_100_percent_is_called_impossible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(folder), "peak_tflops_per_device=0.001"]) == 0
    assert capsys.readouterr().out.startswith("impossible numbers (more than the peak); ")
    assert cli.main(["profile", str(folder), "peak_tflops_per_device=1000"]) == 0
    assert "impossible" not in capsys.readouterr().out


def test_the_peak_that_the_run_was_given_is_the_profiles(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder / "metrics.jsonl", [2.0] * 9)
    values = {"peak of one device": "100 TFLOP/s/device in bf16 (flag: peak_tflops_per_device=100)"}
    setup = {"e": "setup", "seq": 0, "t": 0.0, "m": 0.0, "values": values, "texts": {}}
    (folder / "metrics.jsonl.events.0.jsonl").write_text(
        json.dumps(setup, separators=(",", ":")) + "\n"
    )
    for words, peak in (([], 100), (["peak_tflops_per_device=50"], 50), (["hardware=v5e"], 197)):
        assert cli.main(["profile", str(folder), "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["peak"]["flops_per_sec"] == peak * 1e12


def test_the_tokens_of_a_step_place_the_mfu_among_models_of_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the run's, where its records are beside the trace or its folder, or are given."""
    traces.write_program(tmp_path / "profile", "NVIDIA H100 80GB HBM3")
    traces.write_trace(tmp_path / "profile", traces.host(), traces.gpu())

    def verdict(*words: str) -> dict[str, Any]:
        assert cli.main(["profile", str(tmp_path / "profile"), "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        flops = found["mfu"] * found["peak"]["flops_per_sec"] * found["step_time_seconds"]
        return {**found["verdict"], "flops": flops}

    alone = verdict()
    assert alone["like_runs"]["like"].startswith("models of any size (")
    assert alone["next_steps"][-1]["text"].startswith("tokens_per_step=N, ")
    tokens = alone["flops"] / find_run("torchtitan-llama3-8b-8xh100-fsdp-compile").flops_per_token(
        "exact"
    )
    given = verdict(f"tokens_per_step={tokens:.6g}")
    assert given["like_runs"]["like"].startswith("models like this (")
    assert "torchtitan-llama3-8b-8xh100-fsdp-compile" in given["like_runs"]["runs"]
    assert "tokens_per_step" not in str(given["next_steps"])
    rates = {"perf/per_device_tokens": tokens, "perf/per_device_tokens_per_sec": tokens / 2}
    write_run(tmp_path / "metrics.jsonl", [2.0] * 9, **rates)
    assert verdict()["like_runs"] == given["like_runs"]
    reading = {"gpu/sm_clock_mhz": 1455.0, "perf/mfu_at_clock": 0.63, "gpu/throttled_power": 1.0}
    write_run(tmp_path / "metrics.jsonl", [2.0] * 9, **rates, **reading)
    assert cli.main(["profile", str(tmp_path / "profile")]) == 0
    assert "the power limit held the clock at 1455 MHz, of whose peak the MFU is 63.0%" in " ".join(
        capsys.readouterr().out.split()
    )
    write_run(tmp_path / "metrics.jsonl", [2.0] * 9, **rates, **reading, **{"perf/mfu": 0.65})
    assert cli.main(["profile", str(tmp_path / "profile")]) == 0
    assert "power limit" not in capsys.readouterr().out  # a clock above the one of the peak
