"""`mfu-jax report` on files that MaxText 0.2.5 wrote (20 steps on a CPU), and on our own."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfu_jax
from mfu_jax.cli import main
from mfu_jax.logger.records.summary import Summary
from mfu_jax.runs.goodput.run_time import CATEGORIES
from mfu_jax.runs.metrics.files import read_metrics
from mfu_jax.sinks import ConsoleSink, JsonlSink
from tests.support.messages import is_told
from tests.support.metrics_lines import write_run
from tests.support.paths import DATA
from tests.support.written_logs import UNIX, WrittenLog

METRICS, LOG = DATA / "maxtext_0.2.5_metrics.jsonl", DATA / "maxtext_0.2.5.log"
WITH_EVAL = DATA / "maxtext_0.2.5_with_eval.jsonl"
# What these runs were given.
MODEL = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_target_length": 128,
}

Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def run(*arguments: object) -> dict[str, Any]:
        assert main(["report", *map(str, arguments), "--json"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in MODEL.items()))
    return path


def test_maxtexts_metrics_file(report: Report) -> None:
    answer = report(METRICS, "peak_tflops_per_device=0.5")
    measured = [json.loads(line) for line in METRICS.read_text().splitlines()][3:]
    seconds = [step["perf/step_time_seconds"] for step in measured]
    rates = np.array([step["perf/per_device_tflops_per_sec"] for step in measured])
    assert (answer["form"], answer["steps"], answer["warmup_steps"]) == ("maxtext", 9, 3)
    for name, fraction in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert answer[f"{name}_seconds"] == pytest.approx(np.quantile(seconds, fraction))
    assert answer["mfu"] == pytest.approx(np.average(rates, weights=seconds) / 0.5)
    assert answer["tokens_per_sec_per_device"] == pytest.approx(9 * 256 / sum(seconds))
    assert answer["last_loss"] == measured[-1]["learning/loss"]


def test_the_config_gives_what_maxtext_reports_and_the_exact_number(
    report: Report, model: Path
) -> None:
    flags = (f"model={model}", "per_device_batch_size=2", "peak_tflops_per_device=0.5")
    answer, plain = report(METRICS, *flags), report(METRICS, flags[-1])
    tflops = {name: row["tflops"] for name, row in answer["conventions"].items()}
    assert answer["reported_tflops"] == tflops["maxtext"] == 0.000176160768
    # Two layers, two sequences of 128 tokens: S(S+1)/2 pairs, not S²/2, cost 64 pairs more in each.
    more = 3 * 2 * 2 * (2 * 2 * 64 * 64)
    assert round(tflops["exact"] * 1e12) == 176160768 + more
    assert answer["mfu"] == pytest.approx(plain["mfu"], rel=1e-12)
    exact = report(METRICS, *flags, "convention=exact")
    assert exact["mfu"] / plain["mfu"] == pytest.approx((176160768 + more) / 176160768, rel=1e-12)
    assert answer["conventions"]["exact"]["mfu"] == pytest.approx(exact["mfu"], rel=1e-12)


def test_maxtexts_log(report: Report, model: Path) -> None:
    answer = report(LOG, "peak_tflops_per_device=0.5")
    assert (answer["form"], answer["first_step"], answer["last_step"]) == ("log", 0, 19)
    seconds = [21, 11, 4, 8, 7, 10, 22, 1, 8, 17, 12, 8, 8, 6, 21, 1, 8]  # read off the file
    assert answer["median_seconds"] == sorted(seconds)[8] / 1000
    assert answer["last_loss"] == 5.965
    exact = report(LOG, f"model={model}", "per_device_batch_size=2", "peak_tflops_per_device=0.5")
    assert exact["mfu"] == pytest.approx(17 * 0.000176160768 / (sum(seconds) / 1000) / 0.5)


def test_evaluations_are_no_steps(report: Report) -> None:
    """MaxText empties the file when evaluation step 0 is written: what is left starts there."""
    answer = report(WITH_EVAL, "warmup_steps=0")
    assert (answer["first_step"], answer["last_step"], answer["steps"]) == (16, 19, 4)
    assert read_metrics(WITH_EVAL).other_records == 3


def test_our_own_file_and_log_say_what_the_run_said(report: Report, tmp_path: Path) -> None:
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log.txt"
    with (
        log.open("w") as stream,
        mfu_jax.MetricLogger(
            model_flops_per_device=40_000_000_000,
            tokens_per_device=8,
            peak_flops_per_sec=1e12,
            sinks=[JsonlSink(path), ConsoleSink(stream, progress=False)],
        ) as logger,
    ):
        for step in range(9):
            logger.record(step, {"loss": 1 / (1 + step)}, step_time_seconds=0.25 + step / 100)
    summary = json.loads(path.with_name("metrics.jsonl.summary.json").read_text())
    answer = report(path)
    for name in summary.keys() - {"steps"}:  # all steps that counted
        told = summary[name]
        same = pytest.approx(told, rel=1e-12) if isinstance(told, float) else told
        assert answer[name] == same, name
    assert (answer["steps"], answer["measured_steps"]) == (9, summary["steps"])
    assert answer["tokens_per_sec_per_device"] == summary["tokens_per_sec_per_device"]
    of_log = report(log)
    assert (of_log["steps"], of_log["warmup_steps"]) == (summary["steps"], summary["warmup_steps"])
    assert of_log["mean_seconds"] == pytest.approx(summary["mean_seconds"])
    doubled = report(path, "peak_tflops_per_device=2")
    assert doubled["mfu"] == pytest.approx(summary["mfu"] / 2)


def line(step: int, seconds: float = 1.0, **more: Any) -> str:
    scalars = {"perf/step_time_seconds": seconds, "perf/per_device_tflops": 2.0, **more}
    return json.dumps({"step": float(step), **scalars}) + "\n"


def test_a_resumed_run_warms_up_again(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    steps = [*range(6), *range(4, 8)]
    path.write_text("".join(line(n, 9.0 if n in (0, 4) else 1.0) for n in steps))
    answer = report(path, "warmup_steps=1")
    assert (answer["restarts"], answer["steps"], answer["warmup_steps"]) == (1, 8, 2)
    assert answer["p99_seconds"] == pytest.approx(np.quantile([1.0] * 7 + [9.0], 0.99))


def test_other_hosts_lines_torn_lines_and_nan_losses(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    text = "".join(2 * line(n) for n in range(5)) + line(5, **{"learning/loss": math.nan})
    path.write_text(text + '{"step": 6, "perf/step_ti')
    answer = report(path)
    assert (answer["repeated_lines"], answer["unreadable_lines"], answer["steps"]) == (5, 1, 3)
    assert answer["last_loss"] == "nan"
    assert answer["mfu"] is None


def test_the_text_names_file_peak_and_conventions(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(METRICS), "hardware=v5p", f"model={model}", "num_experts=1"]) == 2
    assert "has 256 tokens per step and device" in capsys.readouterr().err
    assert (
        main(["report", str(METRICS), "hardware=v5p", f"model={model}", "per_device_batch_size=2"])
        == 0
    )
    text = capsys.readouterr().out
    for words in ("MaxText metrics_file, steps 0 to 11", "median", "TPU v5p", "exact", "dense"):
        assert words in text


def test_a_dtype_without_the_peak_that_it_is_of_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", str(METRICS), "dtype=fp8"]) == 2
    assert "expected hardware= or peak_tflops_per_device= beside it" in capsys.readouterr().err


def stopped_run(folder: Path) -> WrittenLog:
    """Two processes: ten steps of 1 s, of which the second does five again; 4 s between them."""
    log = WrittenLog(folder)
    log.start(0.0, 1.0)
    log.steps(12.0, 0, [1_000_000] * 10)
    log.stop(12.0, "SIGTERM")
    log.start(16.0, 17.0)
    log.steps(28.0, 5, [1_000_000] * 10)
    log.stop(28.0)
    text = "".join(line(n, **{"perf/mfu": 0.5, "perf/hfu": 0.6}) for n in range(15))
    (folder / "metrics.jsonl").write_text(text)
    return log


@pytest.mark.parametrize("run", ["", "metrics.jsonl"])
def test_the_time_of_a_stopped_run_by_its_folder_or_file(
    report: Report, tmp_path: Path, run: str
) -> None:
    stopped_run(tmp_path)
    answer = report(tmp_path / run)
    assert answer["time"] == {
        **dict.fromkeys(CATEGORIES, 0.0),
        **{"train": 15.0, "startup": 4.0, "lost_steps": 5.0, "down": 4.0},
    }
    assert answer["wall_seconds"] == 28.0
    assert (answer["steps"], answer["restarts"], answer["lost_steps"]) == (15, 1, 5)
    assert (answer["mfu"], answer["hfu"]) == pytest.approx((0.5, 0.6))
    assert answer["goodput"] == 15 / 28
    assert answer["effective_mfu"] == pytest.approx(0.5 * 15 / 28)
    assert [attempt["how"] for attempt in answer["attempts"]] == ["SIGTERM", "clean"]
    assert answer["processes"][0]["time"] == answer["time"]


def test_the_text_shows_the_ledger_of_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "wall clock   28 s in 2 processes: goodput 53.6%, effective MFU 26.8%" in text
    assert "15 counted, 5 lost" in text
    assert re.search(r"lost_steps +5 s +17\.9%  WASTED_PROGRESS_FROM_DISRUPTION", text)


def test_the_time_of_one_of_several_processes_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_run(tmp_path)
    other = WrittenLog(tmp_path, process=1)
    other.start(0.0, 1.0)
    other.steps(6.0, 0, [10**6] * 4)
    assert main(["report", str(tmp_path)]) == 0
    assert "28 s in 2 processes (number 0 of the job's 2): " in capsys.readouterr().out


def test_without_a_run_log_the_wall_clock_is_not_known(report: Report, tmp_path: Path) -> None:
    stopped_run(tmp_path).path.unlink()
    _has_no_wall_clock(report(tmp_path))


def test_a_run_log_that_cannot_be_read_is_not_said_to_be_missing(
    report: Report, tmp_path: Path
) -> None:
    stopped_run(tmp_path).path.write_bytes(b"\xff, not a log\n")
    _has_no_wall_clock(report(tmp_path))


def _has_no_wall_clock(answer: dict[str, Any]) -> None:
    for name in ("goodput", "effective_mfu", "wall_seconds", "lost_steps"):
        assert answer[name] is None, name
    assert answer["time"] == {**dict.fromkeys(CATEGORIES), "train": 15.0}
    assert "no run log that can be read lies beside the file" in answer["notes"][0]


def test_without_a_measured_step_the_time_is_still_known(report: Report, tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.alive(10.0)  # a sign of life every 0.05 s: it lived for half of that after the last one
    answer = report(tmp_path)
    assert (answer["wall_seconds"], answer["time"]["startup"]) == (10.025, 10.025)
    assert (answer["steps"], answer["mfu"], answer["goodput"]) == (0, None, 0.0)


def test_the_answer_has_the_totals_and_the_peak_that_the_run_logged(
    report: Report, tmp_path: Path
) -> None:
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    peak = "0.17 TFLOP/s/device in fp32 (calibrated: 768² matmuls)"
    log.line("setup", 1.0, values={"peak of one device": peak}, texts={})
    log.steps(6.0, 0, [10**6] * 4)
    totals = Summary(
        steps=4,
        compile_seconds=13.07,
        compile_count=3,
        total_seconds=20.0,
        seconds_by_use={"train": 18.0, "compile": 2.0},
        flags={"mfu_over_1": 1},
    )
    log.line("summary", 7.0, **totals.to_json())
    log.stop(7.0)
    write_run(tmp_path / "metrics.jsonl", [1.0] * 4)
    answer = report(tmp_path)
    assert (answer["compile_seconds"], answer["compile_count"]) == (13.07, 3)
    assert (answer["total_seconds"], answer["flags"]) == (20.0, {"mfu_over_1": 1})
    assert (answer["peak"], answer["peak_tflops_per_device"]) == (peak, 0.17)
    assert answer["train_fraction"] == 0.9  # of the process; goodput is of the wall clock
    assert answer["goodput"] == pytest.approx(4 / answer["wall_seconds"])
    own = report(tmp_path, "peak_tflops_per_device=0.5")
    assert own["peak_tflops_per_device"] == 0.5


def test_totals_of_one_process_are_not_those_of_a_run_of_two(
    report: Report, tmp_path: Path
) -> None:
    stopped_run(tmp_path).line("summary", 28.0, **Summary(steps=7, compile_seconds=3.0).to_json())
    answer = report(tmp_path)
    assert answer["compile_seconds"] == answer["time"]["compile"]
    assert (answer["total_seconds"], answer["train_fraction"], answer["peak"]) == (None,) * 3


def test_events_in_the_format_of_ml_goodput_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_run(tmp_path)
    file = tmp_path / "out.jsonl"
    assert main(["report", str(tmp_path), str(file), "--export=ml_goodput"]) == 0
    events = [json.loads(text) for text in file.read_text().splitlines()]
    steps = [event for event in events if "step_count" in event]
    assert [step["step_count"] for step in steps] == [*range(10), *range(5, 15)]
    assert steps[0]["step_start_time"] == UNIX + 2
    starts = [event["job_start_time"] - UNIX for event in events if "job_start_time" in event]
    assert starts == [0, 16]
    assert events[-1] == {"job_name": tmp_path.name, "job_end_time": UNIX + 28}
    assert main(["report", str(tmp_path), "--export=ml_goodput"]) == 2
    assert "usually the file to write is missing" in capsys.readouterr().err


def test_the_summary_can_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = stopped_run(tmp_path), tmp_path / "again.json"
    command = ["report", str(tmp_path), str(file), "--export=summary"]
    assert main(command) == 0
    totals = json.loads(file.read_text())
    assert (totals["steps"], totals["warmup_steps"]) == (12, 3)
    assert (totals["mean_seconds"], totals["mfu"], totals["total_seconds"]) == (1.0, 0.5, 28.0)
    assert totals["seconds_by_use"]["lost_steps"] == 5.0
    assert totals.keys() == Summary(steps=0).to_json().keys()
    logged = Summary(steps=7, clock_jumps=1).to_json()
    log.line("summary", 29.0, **logged)
    assert main(command) == 0
    assert json.loads(file.read_text()) == logged
    log.start(40.0, 41.0)  # and was killed
    assert main(command) == 0
    assert json.loads(file.read_text())["steps"] == 12
    assert main([*command[:-1], "--export=summaries"]) == 2
    assert "or summary, and nothing else" in capsys.readouterr().err


def test_a_restarted_runs_summary_has_the_compilation_before_its_steps(
    report: Report, tmp_path: Path
) -> None:
    """It is in the run's log alone: no record of a step has it."""
    log, file = WrittenLog(tmp_path), tmp_path / "again.json"
    for begin, first in ((0.0, 0), (16.0, 10)):
        log.start(begin, begin + 0.25)
        log.line("compile", begin + 2.0, spans=[[begin + 0.5, 1_500_000]])
        log.steps(begin + 12.0, first, [1_000_000] * 10)
    log.alive(28.0)
    (tmp_path / "metrics.jsonl").write_text("".join(map(line, range(20))))
    assert report(tmp_path)["compile_seconds"] == 2 * 1.5
    assert main(["report", str(tmp_path), str(file), "--export=summary"]) == 0
    totals = json.loads(file.read_text())
    assert totals["compile_seconds"] == 2 * 1.5
    assert totals["seconds_by_use"]["compile"] == 2 * 1.5
    assert totals["compile_count"] is None


def test_each_of_two_runs_has_its_verdict(report: Report, tmp_path: Path) -> None:
    """As docs/verdict.md says; the comparison's own is a word."""
    for name in "ab":
        write_run(tmp_path / name / "metrics.jsonl", [1.0] * 9)
    answer = report(tmp_path / "a", tmp_path / "b")
    assert [run["verdict"]["kind"] for run in answer["runs"]] == ["report", "report"]
    assert "verdict" not in answer


def test_a_process_that_ends_before_its_first_step_has_a_verdict_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.line("compile", 9.0, spans=[[1.0, 8_000_000]])
    log.stop(10.0)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "no measured step; MFU not known; largest loss: compilation, 80.0% of the wall clock, 8 s;"
        "\nnext: export JAX_COMPILATION_CACHE_DIR=~/.cache/jax\n"
    )


def test_a_run_whose_records_are_gone_or_unreadable_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl' holds no training step" in capsys.readouterr().err

    def denied(folder: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", denied)
    assert main(["report", str(tmp_path)]) == 1
    assert f"Permission denied: '{tmp_path}'" in capsys.readouterr().err


def test_a_dash_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(METRICS.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    piped, read = report("-"), report(METRICS)
    assert piped.pop("verdict")["mfu"] == read.pop("verdict")["mfu"]
    assert {**piped, "file": ""} == {**read, "file": ""}
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["report", "-"]) == 2
    assert "'-' cannot be read (no standard input)" in capsys.readouterr().err


def test_what_is_not_finite_is_a_string_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    path = tmp_path / "m.jsonl"
    path.write_text("".join(line(n) for n in range(9)))
    assert main(["report", str(path), "peak_tflops_per_device=5e-320", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["mfu"] == "Infinity"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "usage: mfu-jax report"),
        (("missing.jsonl",), "cannot be read (No such file or directory)"),
        (("folder",), "the folder 'folder' holds no metrics file"),
        (("empty.txt",), "holds no training step"),
        (("noise.txt",), "holds no training step"),
        (("both.txt",), "holds the steps as log and as maxtext"),
        (("short.jsonl",), "none with a measured time"),
        (("zero.log",), "none with a measured time"),
        (("short.jsonl", "warmup_steps=-1"), "warmup_steps=-1: expected 0 or more"),
        (("short.jsonl", "peak_tflops_per_device=x"), "is not a peak"),
        (("short.jsonl", "hardware=abacus"), "hardware 'abacus' is not known"),
        (("short.jsonl", "hardwear=h100"), "did you mean"),
        (("short.jsonl", "emb_dim=4"), "needs model=NAME_OR_FILE"),
        (("short.jsonl", "convention=exact"), "needs model=NAME_OR_FILE"),
        (("short.jsonl", "model=llama9"), "llama9"),
        (("short.jsonl", "model=llama2-7b", "convention=mine"), "mine"),
        (("empty.txt", "short.jsonl"), "holds no training step"),
        (("--html",), "expected one file"),
        (("short.jsonl", "page.html"), "without --html"),
        (("short.jsonl", "--html", "--json"), "expected one of them"),
        (("short.jsonl", "--html=empty.txt/page.html", "warmup_steps=0"), "--html"),
        (("short.jsonl", "price=0"), "expected a number above 0"),
        (("short.jsonl", "devices=x"), "devices"),
        (("--yaml",), "unknown flag '--yaml'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.txt").touch()
    Path("noise.txt").write_bytes(b"\xff\x00 completed step: soon\n" + b"{" * 5000)
    Path("both.txt").write_text(line(0) + "completed step: 1, seconds: 0.1, loss: 2.0\n")
    Path("short.jsonl").write_text(line(0) + line(1))
    Path("zero.log").write_text("".join(f"completed step: {n}, seconds: 0.000\n" for n in range(9)))
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err + captured.out
    assert is_told(captured.err, hint=True) if arguments else not captured.err


def test_several_runs_are_compared_with_the_first(report: Report, tmp_path: Path) -> None:
    paths = []
    for name, seconds in (("a", 1.0), ("b", 0.8), ("c", 1.0)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(line(n, seconds * (1 + n % 5 / 1000)) for n in range(60)))
        paths.append(path)
    found = report(*paths)
    assert [run["file"] for run in found["runs"]] == [str(path) for path in paths]
    assert [pair["result"] for pair in found["comparisons"]] == ["faster", "same"]
    assert found["comparisons"][0]["faster"] == pytest.approx(0.25)  # 1 / 0.8


def test_runs_whose_mfu_refers_to_different_peaks_say_so(report: Report, tmp_path: Path) -> None:
    for name, peak in (("a", "100"), ("b", "100"), ("c", "200")):
        write_run(tmp_path / name / "metrics.jsonl", [1.0] * 20)
        log = WrittenLog(tmp_path / name)
        log.start(0.0, 1.0)
        values = {"peak of one device": f"{peak} TFLOP/s/device in bf16 (flag: {peak})"}
        log.line("setup", 1.0, values=values, texts={})
    same, other = report(*(tmp_path / name for name in "abc"))["comparisons"]
    assert same["notes"] == []
    (note,) = other["notes"]
    assert note.endswith("A's is 100 TFLOP/s bf16, B's is 200 TFLOP/s bf16")


def test_the_page_goes_into_the_runs_folder_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    other = tmp_path / "other.jsonl"
    for file in (metrics, other):
        file.write_text("".join(line(n) for n in range(20)))
    for words, page in (
        ((str(tmp_path), "--html"), tmp_path / "report.html"),
        ((str(metrics), "--html"), tmp_path / "report.html"),
        ((str(other), "--html"), tmp_path / "other.html"),
        ((str(metrics), "--html=" + str(tmp_path / "a.html")), tmp_path / "a.html"),
        ((str(metrics), "--html", str(tmp_path / "b.html")), tmp_path / "b.html"),
        ((str(metrics), str(tmp_path), "--html", str(tmp_path / "c.htm")), tmp_path / "c.htm"),
    ):
        assert main(["report", *words]) == 0
        assert capsys.readouterr().out.strip() == str(page)
        assert page.read_text().startswith("<!doctype html>")


def test_the_last_reading_of_the_gpus_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records with a reading are few: one every ten seconds."""
    gpu = {"gpu/power_watts": 1400.0, "gpu/tokens_per_joule": 12.5, "perf/mfu_at_clock": 0.44}
    gpu["gpu/throttled_power"] = 1.0
    lines = [line(n, 1.0, **(gpu if n == 7 else {})) for n in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    assert (
        "GPUs         1400 W, 12.5 tokens/J, MFU at that clock 44.0%, at the power limit, which "
        "lowers the clock (at step 7)"
    ) in capsys.readouterr().out
    main(["report", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["gpu"] == {"step": 7, **gpu}
    main(["report", str(tmp_path), "--html"])
    assert "GPUs at step 7" in (tmp_path / "report.html").read_text()


def test_the_counters_of_the_tensor_cores_are_beside_the_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.612 and 0.589 are means of 0.6 and 0.624, and of 0.58 and 0.598; step 9 has no count."""
    active, by_count = "hardware/tensor_active", "hardware/tensor_active_by_count"
    read = {
        3: {active: 0.6, by_count: 0.58},
        9: {active: 0.1},
        15: {active: 0.624, by_count: 0.598},
    }
    lines = [line(n, 1.0, **read.get(n, {})) for n in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "  tensor cores active 61.2% by counter, 58.9% by count\n" in shown
    assert "GPUs" not in shown
    main(["report", str(tmp_path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["tensor_active"] == pytest.approx(0.612)
    assert answer["tensor_active_by_count"] == pytest.approx(0.589)
    main(["report", str(tmp_path), "--html"])
    page = (tmp_path / "report.html").read_text()
    assert "61.2% (58.9% by count)" in page
    assert "TPUs at step 15" in page


def test_counters_without_a_count_are_shown_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(n, 1.0, **{"hardware/tensor_active": 0.25}) for n in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    assert "tensor cores active 25.0% by counter\n" in capsys.readouterr().out


def test_a_later_comparison_does_not_hide_the_last_reading_of_the_gpus(tmp_path: Path) -> None:
    read = {7: {"gpu/power_watts": 700.0}, 9: {"hardware/tensor_active": 0.5}}
    lines = [line(n, 1.0, **read.get(n, {})) for n in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    main(["report", str(tmp_path), "--html"])
    assert "GPUs at step 7" in (tmp_path / "report.html").read_text()
