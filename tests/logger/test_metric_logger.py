"""MetricLogger on a fake clock and device: what it measures, writes, excludes and refuses."""

import dataclasses
import io
import json
import logging
import math
import re
import subprocess
import sys
import threading
import typing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger import assembly
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.metric_logger import Judge, MetricLogger
from mfu_jax.logger.records.non_finite import NonFiniteLossError
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.runs.metrics.files import read_metrics
from mfu_jax.sinks import ConsoleSink, CsvSink, JsonlSink, Sink
from mfu_jax.verdict import NextStep, TimeLoss, Verdict
from tests.support.logger_run import RUN_COST, Run
from tests.support.sinks import ListSink


def test_rates_are_flops_and_tokens_over_the_measured_time() -> None:
    run = Run(xla_reported_flops=123e12, bytes_per_device=30, peak_bytes_per_sec=100.0)
    run.steps(0.5, 1.0)
    run.logger.close()
    scalars = run.sink.records[1].scalars
    assert scalars["perf/step_time_seconds"] == 1.0
    assert scalars["perf/per_device_tflops"] == 400e-12
    assert scalars["perf/per_device_tflops_per_sec"] == 400e-12
    assert scalars["perf/per_device_tokens"] == 64
    assert scalars["perf/per_device_tokens_per_sec"] == 64.0
    assert scalars["perf/mfu"] == 0.4
    assert scalars["perf/hfu"] == 0.5
    assert scalars["perf/mbu"] == 0.3
    assert scalars["perf/xla_reported_tflops"] == 123.0
    assert run.sink.scalar("perf/mfu") == [0.8, 0.4]


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_last_step_is_shown_where_a_checkpoint_follows_it_too(is_saved: bool) -> None:
    stream = io.StringIO()
    logger = MetricLogger(
        model_flops_per_device=10**12,
        log_period=4,
        warmup_steps=1,
        sinks=[ConsoleSink(stream, progress=False)],
    )
    for step in range(7):
        logger.record(step, {"loss": 1.0}, step_time_seconds=2.0)
    if is_saved:
        with logger.pause("checkpoint"):
            pass
    logger.close()
    assert re.findall(r"completed step: (\d+)", stream.getvalue()) == ["0", "4", "6"]


def test_without_tokens_no_record_window_file_or_summary_has_their_rate(tmp_path: Path) -> None:
    path, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    sink, stream = ListSink(), io.StringIO()
    logger = MetricLogger(
        model_flops_per_device=10**12,
        log_period=2,
        warmup_steps=1,
        sinks=[sink, JsonlSink(path), CsvSink(table), ConsoleSink(stream, progress=False)],
    )
    for step in range(5):
        logger.record(step, {"loss": 1.0}, step_time_seconds=2.0)
    summary = logger.close()
    assert summary.tokens_per_sec_per_device is None
    assert summary.tflops_per_sec_per_device == 0.5
    names = {name for record in sink.records for name in record.scalars}
    assert "rolling/per_device_tflops_per_sec" in names
    assert not [name for name in names if "tokens" in name]
    for text in (path.read_text(), table.read_text(), stream.getvalue()):
        assert "0.5" in text
        assert "okens" not in text
    read = read_metrics(path).summary(warmup_steps=0)
    assert (read.steps, read.tokens_per_sec_per_device) == (4, None)
    assert read.tflops_per_sec_per_device == 0.5


def test_without_flops_no_record_file_line_or_summary_has_their_rate(tmp_path: Path) -> None:
    path, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    stream, short = io.StringIO(), io.StringIO()
    consoles = [ConsoleSink(stream, line="maxtext"), ConsoleSink(short, line="short")]
    logger = MetricLogger(
        tokens_per_device=128, warmup_steps=1, sinks=[JsonlSink(path), CsvSink(table), *consoles]
    )
    for step in range(3):
        logger.record(step, {"loss": 1.0}, step_time_seconds=2.0)
    assert logger.close().tflops_per_sec_per_device is None
    for text in (path.read_text(), table.read_text()):
        assert "tokens_per_sec" in text
        assert "tflops" not in text
    # MaxText's line without the one number; its labels find the others.
    line = "completed step: 2, seconds: 2.000, Tokens/s/device: 64.0, loss: 1.000, MFU: n/a"
    assert line in stream.getvalue()
    for text in (stream.getvalue(), short.getvalue()):
        steps, _, summary = text.partition("summary: ")
        assert "TFLOP" not in steps
        assert "n/a TFLOP/s/device" in summary


def test_whatever_comes_after_the_last_step_is_no_part_of_it() -> None:
    run = Run()
    run.steps(1.0, 1.0, 1.0)
    run.clock.advance(17.0)  # the last step ends after one second of these
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0, 1.0]
    assert run.sink.scalar("perf/mfu") == [0.4, 0.4, 0.4]
    assert summary.seconds_by_use == {"train": 3.0, "other": 16.0}


def test_without_a_peak_there_is_no_utilisation_but_all_else() -> None:
    run = Run(peak_flops_per_sec=None)
    run.steps(0.5)
    summary = run.logger.close()
    assert "perf/mfu" not in run.sink.records[0].scalars
    assert "perf/hfu" not in run.sink.records[0].scalars
    assert run.sink.scalar("perf/per_device_tokens_per_sec") == [128.0]
    assert summary.mfu is None


def test_a_step_of_mixed_dtypes_is_compared_with_its_optimal_seconds() -> None:
    run = Run(optimal_model_seconds=0.2, optimal_executed_seconds=0.3)
    run.steps(0.5)
    run.logger.close()
    assert run.sink.scalar("perf/mfu") == [0.4]
    assert run.sink.scalar("perf/hfu") == [0.6]


def test_a_step_can_cost_something_else_than_the_others() -> None:
    run = Run()
    run.steps(1.0)
    long = StepCost(model_flops_per_device=800, tokens_per_device=128, peak_flops_per_sec=1000.0)
    run.logger.record(1, run.device.run(1.0), cost=long)
    run.logger.close()
    assert run.sink.scalar("perf/mfu") == [0.4, 0.8]
    assert run.sink.scalar("perf/per_device_tokens") == [64, 128]


def test_metrics_get_maxtexts_names_and_keep_their_own_slashes() -> None:
    run = Run()
    run.logger.record(
        0,
        {
            "loss": np.float32(2.5),
            "grad_norm": 0.25,
            "total_weights": np.int32(2048),
            "moe/balance": 3.0,
            "scalar": {"learning/current_learning_rate": 1e-3},  # MaxText's way to nest
            "absent": None,
        },
    )
    run.logger.close()
    scalars = run.sink.records[0].scalars
    assert scalars["learning/loss"] == 2.5
    assert scalars["learning/grad_norm"] == 0.25
    assert scalars["learning/total_weights"] == 2048
    assert isinstance(scalars["learning/total_weights"], int)
    assert scalars["moe/balance"] == 3.0
    assert scalars["learning/current_learning_rate"] == 1e-3
    assert not any("absent" in name for name in scalars)


def test_a_metric_that_is_not_a_number_is_left_out_and_noted_once() -> None:
    run = Run()
    for step in range(3):
        run.logger.record(step, {"loss": 1.0, "per_token": np.ones((2, 3))}, step_time_seconds=1.0)
    run.logger.close()
    assert run.sink.scalar("learning/loss") == [1.0, 1.0, 1.0]
    notes = [note for record in run.sink.records for note in record.notes]
    assert len(notes) == 1
    assert "'learning/per_token'" in notes[0]
    assert "(2, 3)" in notes[0]


def test_warmup_and_compile_steps_are_labelled_and_excluded_from_summaries() -> None:
    log = CompileLog()
    run = Run(warmup_steps=3, start_step=10, compile_log=log)
    log._on_duration("/jax/core/compile/backend_compile_duration", 0.5, fun_name="jit(step)")
    run.steps(9.0, 5.0, 5.0, 1.0, 1.0, start=10)
    summary = run.logger.close()
    log.close()
    kinds = [record.kind for record in run.sink.records]
    assert kinds == ["compile", "warmup", "warmup", "step", "step"]
    assert run.sink.scalar("compile/seconds")[1:] == [None] * 4
    assert (summary.steps, summary.compile_steps, summary.warmup_steps) == (2, 1, 2)
    assert summary.median_seconds == summary.p99_seconds == summary.mean_seconds == 1.0
    assert summary.mfu == 0.4


def test_a_clock_jump_is_noted_once_and_counted() -> None:
    run = Run()
    run.steps(1.0)
    run.clock.wall_offset += 3600.0
    run.steps(1.0, start=1)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0]
    assert any("+3600.000 s" in note for note in run.sink.records[0].notes)
    assert not run.sink.records[1].notes
    assert summary.clock_jumps == 1


def test_a_run_without_steps_has_no_summary() -> None:
    run = Run()
    assert run.logger.close().steps == 0
    assert run.sink.summary is None
    assert run.sink.closed


def test_without_a_count_there_are_times_but_no_rates() -> None:
    run = Run(model_flops_per_device=None)
    run.steps(0.5, 0.5)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [0.5, 0.5]
    assert run.sink.scalar("perf/per_device_tokens_per_sec") == [128.0, 128.0]
    assert run.sink.scalar("perf/hfu") == [1.0, 1.0]
    for name in ("perf/mfu", "perf/per_device_tflops", "perf/per_device_tflops_per_sec"):
        assert run.sink.scalar(name) == [None, None]
    assert summary.tflops_per_sec_per_device is None
    assert "n/a TFLOP/s/device" in summary.render()


def test_an_error_in_the_loop_still_drains_and_closes() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    with pytest.raises(KeyError), run.logger:
        raise KeyError
    assert [record.step for record in run.sink.records] == [0, 1]
    assert run.sink.closed
    assert run.sink.summary is not None


def test_an_error_of_the_device_reaches_the_loop_and_the_rest_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.steps(1.0, 1.0)
    metrics = run.device.run(1.0)

    def fail() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    metrics["loss"].block_until_ready = fail  # type: ignore[assignment]
    run.logger.record(2, metrics)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        run.steps(1.0, start=3)
    run.logger.close()
    assert [record.step for record in run.sink.records] == [0, 1]


def test_only_steps_of_the_log_period_are_logged_but_some_sinks_keep_all() -> None:
    some, all_of_them = ListSink(every_step=False), ListSink()
    run = Run(log_period=4, sinks=[some, all_of_them])
    run.steps(*[1.0] * 10)
    run.logger.close()
    assert [record.step for record in some.records] == [0, 4, 8, 9]
    assert [record.step for record in all_of_them.records] == list(range(10))


def test_the_rolling_window_is_the_log_period() -> None:
    run = Run(log_period=4)
    run.steps(1.0, 1.0, 1.0, 2.0, 4.0, 8.0)
    run.logger.close()
    record = next(record for record in run.sink.records if record.step == 4)
    # Steps 1 to 4 took 1, 1, 2 and 4 s; MFU is 4·400 / (8·1000).
    assert record.scalars["rolling/steps"] == 4
    assert record.scalars["rolling/step_time_seconds_median"] == 1.5
    assert record.scalars["rolling/mfu"] == 0.2


def test_times_measured_elsewhere_are_taken_as_they_are() -> None:
    run = Run()
    for step in range(3):
        run.logger.record(step, {"loss": 1.0}, step_time_seconds=0.5)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [0.5, 0.5, 0.5]
    assert run.sink.scalar("perf/mfu") == [0.8, 0.8, 0.8]
    assert summary.clock_jumps == 0


def test_the_set_up_reaches_the_sinks_before_the_steps() -> None:
    run = Run()
    run.logger.write_setup({"device": "cpu"}, {"ledger": "a\nb"})
    run.steps(1.0)
    run.logger.close()
    assert run.sink.texts == [("setup/values", "device: cpu"), ("setup/ledger", "a\nb")]


def test_the_overhead_is_what_the_training_thread_spent_beside_waiting() -> None:
    run = Run()
    run.steps(3.0, 3.0, 3.0)
    run.logger.close()
    # On the fake clock only waiting takes time.
    assert run.sink.scalar("perf/logger_overhead_us") == [0.0, 0.0, 0.0]


def test_a_summary_can_be_read_during_the_run() -> None:
    run = Run()
    run.steps(1.0, 1.0, 1.0)
    assert run.logger.summary().steps == 2  # the third is in flight
    assert run.logger.close().steps == 3
    assert run.logger.summary().steps == 3
    assert run.logger.close() == run.logger.summary()


def test_the_fraction_of_time_spent_training_so_far() -> None:
    run = Run()
    run.steps(1.0)
    with run.logger.pause("eval"):
        run.clock.advance(2.0)
    run.steps(1.0, start=1)
    run.logger.close()
    # The pause is known when the record of the step before it is written, so it is in that one.
    assert run.sink.scalar("goodput/train_fraction") == [1.0 / 3.0, 2.0 / 4.0]


def test_the_memory_of_a_device_is_shown_if_it_reports_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": 10, "peak_bytes_in_use": 20, "num_allocs": 3}

    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    run = Run()
    run.steps(1.0)
    run.logger.close()
    memory = {k: v for k, v in run.sink.records[0].scalars.items() if k.startswith("memory/")}
    assert memory == {"memory/bytes_in_use": 10, "memory/peak_bytes_in_use": 20}


def test_a_failing_sink_never_stops_training(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = ListSink([OSError("disk full")] * 1000), ListSink()
    run = Run(sinks=[broken, good])
    with caplog.at_level(logging.WARNING, "mfu_jax"):
        run.steps(*[1.0] * 5)
        run.logger.close()
    assert len(good.records) == 5
    assert sum("ListSink failed at step 0" in message for message in caplog.messages) == 1
    assert "5 records could not be written" in caplog.text


def test_wrong_use_says_what_to_do() -> None:
    run = Run(start_step=5)
    with pytest.raises(UserError, match=r"(?s)step 3 was recorded first; expected 5.*start_step=3"):
        run.steps(1.0, start=3)
    with pytest.raises(UserError, match="given float as metrics; expected a mapping"):
        run.logger.record(5, 1.0)  # type: ignore[arg-type]
    run.steps(1.0, start=5)
    run.logger.close()
    with pytest.raises(UserError, match=r"after close\(\)"):
        run.steps(1.0, start=6)


def test_a_daemon_threads_step_after_the_close_at_exit_is_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    run = Run()
    run.steps(1.0)
    for close in reversed(at_exit):
        close()
    run.steps(1.0, start=1)
    assert ([record.step for record in run.sink.records], caplog.messages) == ([0], [])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("peak_flops_per_sec", 0.0),
        ("peak_flops_per_sec", math.nan),
        ("peak_flops_per_sec", "h100"),
        ("model_flops_per_device", -1),
        ("log_period", 0),
        ("warmup_steps", -1),
        ("write_period_seconds", -1.0),
        ("write_period_seconds", 100.0),
        ("write_period_seconds", math.nan),
    ],
)
def test_impossible_numbers_are_refused(option: str, value: float | str) -> None:
    with pytest.raises(UserError, match=option):
        Run(**{option: value})


def test_tokens_may_be_counted_in_an_array() -> None:
    for tokens in (jax.numpy.int32(128), np.array(128), np.int64(128)):
        rates = StepCost(model_flops_per_device=800, tokens_per_device=tokens).rates(2.0)
        assert rates["perf/per_device_tokens_per_sec"] == 64


def test_cost_and_config_can_be_given_whole_and_by_field() -> None:
    cost = StepCost(model_flops_per_device=800, tokens_per_device=128)
    run = Run(cost=cost, config=LoggerConfig(log_period=2, warmup_steps=5))
    run.steps(1.0, 1.0, 1.0)
    run.logger.close()
    # The fields that Run gives by name replace those of `cost` and `config`.
    assert run.logger.cost == dataclasses.replace(cost, **RUN_COST)
    assert [record.kind for record in run.sink.records] == ["step"] * len(run.sink.records)
    assert [record.step for record in run.sink.records] == [0, 2]


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        UserError, match=r"(?s)'warmup_step'; expected.*did you mean 'warmup_steps'"
    ):
        MetricLogger(warmup_step=3)


def test_the_text_of_a_number_or_a_switch_is_converted_as_a_flags_is() -> None:
    config = LoggerConfig(log_period="5", abort_on_nan_loss="false")  # type: ignore[arg-type]
    assert (config.log_period, config.abort_on_nan_loss) == (5, False)
    with pytest.raises(UserError, match="hang_seconds='x': expected a number"):
        MetricLogger(sinks=[], hang_seconds="x")


def test_every_field_of_the_cost_and_the_config_is_a_keyword() -> None:
    cost = StepCost(
        model_flops_per_device=1,
        tokens_per_device=2,
        peak_flops_per_sec=3.0,
        executed_flops_per_device=4,
        optimal_model_seconds=5.0,
        optimal_executed_seconds=6.0,
        removed_flops_per_device=7,
        xla_reported_flops=8.0,
        bytes_per_device=9,
        peak_bytes_per_sec=10.0,
    )
    config = LoggerConfig(start_step=1, warmup_steps=3, log_period=4, abort_on_nan_loss=True)
    given = dataclasses.asdict(cost) | dataclasses.asdict(config)
    assert assembly.with_fields(None, None, given) == (cost, config)


def in_thread(function: typing.Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def compiled() -> None:
    """What JAX says at the end of a compilation of a second, on its thread."""
    jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)


def test_compilations_count_on_the_thread_that_runs_the_steps() -> None:
    run = Run()
    in_thread(compiled)
    run.steps(1.0)
    in_thread(compiled)
    run.steps(1.0, start=1)
    compiled()
    run.steps(1.0, start=2)

    def call() -> None:
        run.logger.begin_call()
        compiled()

    in_thread(call)
    run.steps(1.0, start=3)
    run.logger.close()
    assert [record.kind for record in run.sink.records] == ["step", "step", "compile", "step"]


def test_a_loop_in_another_thread_than_its_logger_was_made_in_has_compiled() -> None:
    run = Run()

    def loop() -> None:
        compiled()
        run.steps(1.0, 1.0)

    in_thread(loop)
    run.logger.close()
    assert [record.kind for record in run.sink.records] == ["compile", "step"]


def test_sinks_are_told_that_the_loop_raised() -> None:
    class Told(ListSink):
        reasons: typing.ClassVar[list[str]] = []

        def write_failure(self, reason: str) -> None:
            assert not self.closed
            self.reasons.append(reason)

    def loop() -> None:
        with MetricLogger(**RUN_COST, sinks=[Told()]):
            raise ValueError("her own")

    with pytest.raises(ValueError, match="her own"):
        loop()
    assert Told.reasons == ["ValueError('her own')"]
    MetricLogger(**RUN_COST, sinks=[Told()]).close()
    assert len(Told.reasons) == 1


@pytest.mark.full
def test_what_a_logger_may_not_need_is_imported_when_it_does() -> None:
    """Start-up: sinks and monitors are much of the room."""
    code = "import sys, mfu_jax; mfu_jax.MetricLogger; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [name for name in done.stdout.split() if name.startswith("mfu_jax")]
    rooms = "hosts|health|watchdog|sinks.(?!base)"
    assert [name for name in modules if re.match(rf"mfu_jax\.logger\.({rooms})", name)] == []
    assert len(modules) <= 45


def test_the_summary_has_the_judges_verdict_first_and_what_to_do_last(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(summary: Summary, setup: Any, profile: Any) -> Verdict:
        seen.append((summary.steps, setup, profile))
        step = NextStep(text="mfu-jax report RUN")
        loss = TimeLoss(name="idle", fraction=0.3)
        return Verdict(kind="report", mfu=summary.mfu, losses=(loss,), next_steps=(step,))

    text, path = io.StringIO(), tmp_path / "metrics.jsonl"
    logger = MetricLogger(**RUN_COST, warmup_steps=0, sinks=[ConsoleSink(text), JsonlSink(path)])
    logger.judge = judge
    logger.write_setup({"devices": "1 × cpu"}, {"config": "a=1"})
    logger.add_numbers({"profile/mfu": 0.1, "other": 2.0})
    logger.record(0, {"loss": 1.0}, step_time_seconds=1.0)
    summary = logger.close()
    setup = {"values": {"devices": "1 × cpu"}, "texts": {"config": "a=1"}}
    assert seen[-1] == (1, setup, {"profile/mfu": 0.1})
    assert summary.verdict is not None
    lines = text.getvalue().splitlines()
    at = lines.index("summary: 1 measured step")
    assert "\n".join(lines[at - 2 : at]).endswith(summary.verdict.render())
    assert lines[-2:] == [
        "  lost to      idle, 30.0% of the step",
        "  next         mfu-jax report RUN",
    ]
    written = json.loads(path.with_name("metrics.jsonl.summary.json").read_text())
    assert written["verdict"]["schema"] == 1


@pytest.mark.parametrize(
    "judge", [lambda *_: 1 / 0, lambda *_: Verdict(kind="report", next_steps=())]
)
def test_a_judge_that_fails_costs_the_verdict_only(
    judge: Judge, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = MetricLogger(**RUN_COST, warmup_steps=0, sinks=[JsonlSink(path)])
    logger.judge = judge
    logger.record(0, {"loss": 1.0}, step_time_seconds=1.0)
    summary = logger.close()
    assert (summary.steps, summary.verdict) == (1, None)
    assert json.loads(path.with_name("metrics.jsonl.summary.json").read_text())["steps"] == 1
    assert "the summary has no verdict" in caplog.text


def test_a_logger_whose_file_is_taken_over_writes_its_steps_first(tmp_path: Path) -> None:
    """A notebook's loop that goes on in another logger at once."""
    path = tmp_path / "metrics.jsonl"
    first = MetricLogger(sinks=[JsonlSink(path)], write_period_seconds=60.0)
    for step in range(3):
        first.record(step, {"loss": 1.0}, step_time_seconds=1.0)
    second = MetricLogger(sinks=[JsonlSink(path, resume_from_step=3)], start_step=3)
    second.record(3, {"loss": 1.0}, step_time_seconds=1.0)
    second.close()
    first.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_sink_of_the_user_may_have_a_lock_of_its_own() -> None:
    sink = ListSink()
    sink.lock = threading.Lock()  # type: ignore[attr-defined]
    with MetricLogger(sinks=[sink]) as logger:
        logger.record(0, {"loss": 1.0}, step_time_seconds=1.0)
    assert [record.step for record in sink.records] == [0]


@pytest.mark.parametrize("array", [np.asarray, jax.numpy.array])
def test_the_losses_of_many_steps_of_a_call_are_their_mean(
    array: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**RUN_COST, "warmup_steps": 0, "abort_on_nan_loss": True}
    logger = MetricLogger(sinks=[sink := ListSink()], **options)
    losses = np.arange(32, dtype=np.float32)
    for last in (31, 63):
        logger.record(last, {"loss": array(losses)}, steps=32)
        losses += 32  # the loop may use its buffer again
    logger.record(95, {"loss": array(losses * np.nan)}, steps=32)
    with pytest.raises(NonFiniteLossError):
        logger.close()
    assert sink.scalar("learning/loss")[:64] == [15.5] * 32 + [47.5] * 32
    assert not any("left out" in text for text in caplog.messages)


def test_the_losses_of_many_steps_of_a_call_are_waited_for() -> None:
    run = Run()
    for last in (31, 63):
        metrics = run.device.run(32.0)
        metrics["loss"].shape = (32,)  # type: ignore[attr-defined]
        run.logger.record(last, metrics, steps=32)
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0] * 64


def test_an_object_that_only_looks_like_a_sink_is_refused_before_the_first_step() -> None:
    class Printer:
        def write(self, record: Any) -> None:
            print(record)

    with pytest.raises(UserError, match=r"the sink Printer lacks .*missing.*flush") as e:
        MetricLogger(sinks=[ConsoleSink(), Printer()])
    assert "expected a class derived from mfu_jax.sinks.Sink" in str(e.value)

    class Silent(Sink):
        def flush(self) -> None:
            pass

    with pytest.raises(UserError, match=r"the sink Silent writes nothing; .* write\(record\)"):
        MetricLogger(sinks=[Silent()])
