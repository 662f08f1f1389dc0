"""JSON lines of levanter and torchtitan, as their sources write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.runs.metrics.files import MetricsRun, read_metrics

# Of levanter's README-like log: the logging prefix, two records a step, rates of all 8 devices.
PREFIX = "2026-01-02T03:04:05 - 0 - levanter.json_logger - INFO :: "


def levanter(step: int | None, **metrics: Any) -> str:
    event = "summary" if step is None else "log"
    record = {"tracker": "json_logger", "event": event, "step": step, "metrics": metrics}
    return f"{PREFIX}{json.dumps(record)}\n"


def read(path: Path, lines: list[str]) -> MetricsRun:
    path.write_text("".join(lines))
    return read_metrics(path)


def test_levanters_records_of_a_step_are_one_step(tmp_path: Path) -> None:
    theory = {"theoretical_flops": 8e12, "theoretical_flops_per_device": 1e12}
    lines = [levanter(None, throughput=theory)]
    for step in range(3):
        lines.append(levanter(step, **{"train/loss": 5.0 - step, "global_step": step}))
        rates = {"throughput/tokens_per_second": 80_000.0, "throughput/gflops_per_second": 3200.0}
        times = {"throughput/duration": 0.5, "throughput/loading_time": 0.01}
        lines.append(levanter(step, **rates, **times, **{"throughput/mfu": 40.0}))
    lines.append(levanter(2, **{"eval/loss": 3.0}))
    run = read(tmp_path / "log.txt", lines)
    assert (run.form, len(run.steps), run.unreadable) == ("levanter", 3, 0)
    assert [step.scalars["learning/loss"] for step in run.steps] == [5.0, 4.0, 3.0]
    (first, *_) = run.steps
    assert first.scalars["perf/per_device_tokens"] == 80_000 / 8 * 0.5
    assert first.scalars["perf/per_device_tflops_per_sec"] == pytest.approx(0.4)
    assert first.scalars["goodput/data_wait_seconds"] == 0.01
    summary = run.summary(warmup_steps=0)
    assert summary.mfu == pytest.approx(0.4)
    assert summary.tokens_per_sec_per_device == pytest.approx(10_000)


def test_rates_of_an_unknown_number_of_devices_are_not_guessed(tmp_path: Path) -> None:
    metrics = {"throughput/duration": 0.5, "throughput/tokens_per_second": 80_000.0}
    run = read(tmp_path / "log.txt", [levanter(0, **metrics)])
    (step,) = run.steps
    assert "perf/per_device_tokens_per_sec" not in step.scalars


def test_torchtitans_metrics_are_per_device(tmp_path: Path) -> None:
    names = {
        "loss_metrics/global_avg_loss": 4.5,
        "throughput(tps)": 3000.0,
        "tflops": 150.0,
        "mfu(%)": 15.2,
        "time_metrics/end_to_end(s)": 2.0,
        "time_metrics/data_loading(s)": 0.01,
        "memory/max_reserved(GiB)": 40.0,
    }
    lines = [json.dumps({"step": n, **names}) + "\n" for n in (1, 10, 20)]
    run = read(tmp_path / "metrics.jsonl", lines)
    assert (run.form, list(run.steps.numbers)) == ("torchtitan", [1, 10, 20])
    (step, *_) = run.steps
    assert step.scalars == {
        "perf/step_time_seconds": 2.0,
        "perf/per_device_tokens_per_sec": 3000.0,
        "perf/per_device_tflops_per_sec": 150.0,
        "perf/mfu": pytest.approx(0.152),
        "learning/loss": 4.5,
        "memory/peak_bytes_in_use": 40 * 2**30,
        "perf/per_device_tflops": 300.0,
        "perf/per_device_tokens": 6000.0,
    }


@pytest.mark.parametrize(
    "damaged",
    [
        '{"tracker": "json_logger", "event": "log", "step": 1, "metr',
        levanter(1, **{"throughput/duration": "soon"}),
        levanter(1, **{"throughput/duration": -1.0}),
        '"tracker": "x"\n',
    ],
)
def test_a_damaged_record_costs_itself(damaged: str, tmp_path: Path) -> None:
    sound = [levanter(n, **{"throughput/duration": 0.5}) for n in (0, 2, 3)]
    run = read(tmp_path / "log.txt", [*sound[:1], damaged.rstrip("\n") + "\n", *sound[1:]])
    assert list(run.steps.numbers) == [0, 2, 3]
    assert run.unreadable == 1


def titan(step: int, second: float, rank: int | None = 0, color: bool = False) -> str:
    """A line as torchtitan's console has it; torchrun puts the rank before it."""
    red, blue, reset = ("\x1b[31m", "\x1b[34m", "\x1b[39m") if color else ("", "", "")
    prefix = "" if rank is None else f"[rank{rank}]:"
    return (
        f"{prefix}[titan] 2026-01-02 03:04:{second:06.3f}".replace(".", ",")
        + f" - root - INFO - {red}step: {step:2}  loss: {12.0 - step / 10:8.5f}  grad_norm:  2.5000"
        f"  memory: 87.87GiB(62.89%)  {blue}tps: 3,000  tflops: 1,150.50  mfu: 40.25%{reset}\n"
    )


@pytest.mark.parametrize("color", [False, True])
def test_torchtitans_console_has_times_between_its_lines(color: bool, tmp_path: Path) -> None:
    other = "[rank0]:[titan] 2026-01-02 03:04:09,000 - root - INFO - Synchronizing timeouts\n"
    validate = titan(10, 12.0, 0, color).replace("step: ", "validate step: ")
    lines = [other, titan(1, 5.0, 0, color), titan(1, 5.001, 1, color)]
    lines += [titan(10, 9.5, 0, color), titan(10, 9.5, 1, color), validate]
    lines += [titan(20, 19.5, 0, color)]
    run = read(tmp_path / "log.txt", lines)
    assert (run.form, run.unreadable, run.other_records) == ("torchtitan", 0, 1)
    assert [(s.number, s.scalars["perf/step_time_seconds"]) for s in run.steps] == [
        (10, pytest.approx(4.5 / 9)),
        (20, pytest.approx(7.5 / 10)),  # 19.5 s − the 12.0 s at which the validation ended
    ]
    (_, last) = run.steps
    assert last.scalars["goodput/eval_seconds"] == pytest.approx(12.0 - 9.5)
    assert last.scalars["learning/loss"] == 10.0
    assert last.scalars["perf/mfu"] == pytest.approx(0.4025)
    assert last.scalars["perf/per_device_tflops_per_sec"] == 1150.5
    assert last.scalars["perf/per_device_tokens"] == pytest.approx(3000.0 * 0.75)


def test_quantised_training_of_torchtitan_has_no_mfu(tmp_path: Path) -> None:
    lines = [titan(n, n).replace("mfu: 40.25%", "mfu: N/A") for n in (1, 2, 3)]
    run = read(tmp_path / "log.txt", lines)
    assert ([step.number for step in run.steps], run.unreadable) == ([2, 3], 0)
    assert all("perf/mfu" not in step.scalars for step in run.steps)
    assert [step.scalars["perf/per_device_tflops_per_sec"] for step in run.steps] == [1150.5] * 2


def test_a_validation_between_two_lines_of_torchtitans_console_is_no_step_time(
    tmp_path: Path,
) -> None:
    """Step 15 is not logged, so what its validation took is not known."""
    validate = titan(15, 14.0).replace("step: ", "validate step: ")
    run = read(tmp_path / "log.txt", [titan(10, 5.0), validate, titan(20, 16.5)])
    (step,) = run.steps
    assert step.scalars["perf/step_time_seconds"] == pytest.approx((16.5 - 14.0) / (20 - 15))
    assert "goodput/eval_seconds" not in step.scalars


def test_a_restart_in_torchtitans_console_has_no_time(tmp_path: Path) -> None:
    lines = [titan(1, 5.0, None), titan(2, 6.0, None), titan(1, 30.0, None), titan(2, 32.0, None)]
    run = read(tmp_path / "log.txt", lines)
    assert [s.scalars["perf/step_time_seconds"] for s in run.steps if s.number == 2][:1] == [1.0]
    assert (run.other_records, run.repeated) == (2, 1)


def test_a_broken_line_of_torchtitans_console_costs_itself(tmp_path: Path) -> None:
    broken = titan(2, 6.0).replace("3,000", "3.0.0")
    run = read(tmp_path / "log.txt", [titan(1, 5.0), broken, titan(3, 7.0)])
    assert (run.unreadable, [s.number for s in run.steps]) == (1, [3])
