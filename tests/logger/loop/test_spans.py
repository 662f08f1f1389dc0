"""Evals, checkpoints, waits and compilations are excluded from every step."""

import math
import threading

import pytest

from mfu_jax.logger.records.non_finite import NonFiniteLossError
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.logger.timing.timer import SHORT_WAITS
from mfu_jax.sinks import StepRecord
from tests.support.logger_run import RUN_COST, Run
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS


def test_a_recompile_inside_of_the_run_is_noted_and_its_step_kept_out() -> None:
    log = CompileLog()
    run = Run(compile_log=log)
    log._on_duration("/jax/core/compile/backend_compile_duration", 0.0, fun_name="jit(step)")
    run.steps(1.0, 1.0)
    log._on_duration("/jax/core/compile/backend_compile_duration", 0.0, fun_name="jit(step)")
    run.steps(7.0, 1.0, start=2)
    summary = run.logger.close()
    log.close()
    assert [record.kind for record in run.sink.records] == ["compile", "step", "compile", "step"]
    assert any("recompiled jit(step)" in note for note in run.sink.records[2].notes)
    assert summary.steps == 2
    assert summary.p99_seconds == 1.0


def test_a_first_compilation_is_no_recompilation_and_an_explained_one_is_not_noted() -> None:
    log = CompileLog()
    run = Run(compile_log=log)
    run.logger.suppress_recompile_notes(["jit(train_step)"])
    for step, function in enumerate(["train_step", "evaluate", "train_step", "evaluate"]):
        log._on_duration(
            "/jax/core/compile/backend_compile_duration", 0.25, fun_name=f"jit({function})"
        )
        run.steps(1.0, start=step)
    run.logger.close()
    log.close()
    notes = [[note.split(" in ")[0] for note in record.notes] for record in run.sink.records]
    assert notes == [[], ["compiled jit(evaluate)"], [], ["recompiled jit(evaluate)"]]


def test_a_compilation_on_another_thread_or_in_a_pause_marks_no_step() -> None:
    log = CompileLog()
    run = Run(compile_log=log)
    compiled = ("/jax/core/compile/backend_compile_duration", 0.5)
    run.steps(1.0)
    other = threading.Thread(target=log._on_duration, args=compiled)
    other.start()
    other.join()
    with run.logger.pause("eval"):
        log._on_duration(*compiled)
    run.steps(1.0, start=1)
    summary = run.logger.close()
    log.close()
    assert [record.kind for record in run.sink.records] == ["step", "step"]
    assert summary.compile_count == 2


def test_an_eval_is_part_of_its_steps_record_and_of_no_steps_time() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    with run.logger.pause("eval"):
        run.clock.advance(30.0)
        run.logger.record_eval(1, {"avg_loss": 2.5})
    run.steps(1.0, start=2)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0, 1.0]
    assert run.sink.scalar("eval/avg_loss") == [None, 2.5, None]
    assert run.sink.scalar("goodput/eval_seconds") == [None, 30.0, None]
    assert summary.seconds_by_use == {"train": 3.0, "eval": 30.0, "other": 0.0}
    assert summary.train_fraction == 3.0 / 33.0


def test_an_eval_that_comes_late_tells_of_which_step_it_is() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    run.logger.record_eval(0, {"avg_loss": 2.5})
    run.steps(1.0, start=2)
    run.logger.close()
    assert run.sink.scalar("eval/avg_loss") == [None, None, 2.5]
    assert run.sink.scalar("eval/step") == [None, None, 0]


def test_all_steps_are_written_before_a_checkpoint_begins() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    with run.logger.pause("checkpoint"):
        assert [record.step for record in run.sink.records] == [0, 1]
        run.clock.advance(5.0)
    run.steps(1.0, start=2)
    summary = run.logger.close()
    assert run.sink.scalar("goodput/checkpoint_seconds") == [None, None, 5.0]
    assert summary.seconds_by_use["checkpoint"] == 5.0


def test_a_pause_or_wait_inside_of_a_pause_belongs_to_the_outer_one() -> None:
    run = Run()
    run.steps(1.0)
    with run.logger.pause("eval"), run.logger.waiting("data"), run.logger.pause("checkpoint"):
        run.clock.advance(4.0)
    run.steps(1.0, start=1)
    summary = run.logger.close()
    assert summary.seconds_by_use == {"train": 2.0, "eval": 4.0, "other": 0.0}


def test_an_exposed_wait_for_data_is_shown_separately() -> None:
    run = Run()
    for step in range(3):
        with run.logger.waiting("data"):
            run.clock.advance(1.5)
        run.steps(1.0, start=step)
    summary = run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0, 1.0]
    assert run.sink.scalar("goodput/data_wait_seconds") == [1.5, 0.5, 0.5]
    assert summary.seconds_by_use == {"train": 3.0, "data_wait": 2.5, "other": 0.0}


def calls(run: Run, *seconds: float) -> None:
    """Calls of an instrumented function, each with a share of a step's cost."""
    for duration in seconds:
        run.logger.begin_call()
        run.logger.observe_call("f", run.device.run(duration), StepCost(**RUN_COST), None)


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_pause_between_the_calls_of_a_step_is_no_time_of_theirs(before: int) -> None:
    run = Run(calls_per_step=4)
    for _ in range(3):
        calls(run, *[1.0] * before)
        with run.logger.pause("eval"):
            run.clock.advance(30.0)
        calls(run, *[1.0] * (4 - before))
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [4.0, 4.0, 4.0]
    assert run.sink.scalar("perf/mfu") == [0.4, 0.4, 0.4]
    assert sum(filter(None, run.sink.scalar("goodput/eval_seconds"))) == 90.0


def test_a_wait_between_the_calls_of_a_step_counts_only_while_the_device_is_idle() -> None:
    run = Run(calls_per_step=4)
    for _ in range(3):
        calls(run, 1.0, 1.0)
        with run.logger.waiting("data"):
            run.clock.advance(6.0)
        calls(run, 1.0, 1.0)
    with run.logger.waiting("data"):
        run.clock.advance(0.5)
    calls(run, 1.0)
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [4.0, 4.0, 4.0]
    assert run.sink.scalar("goodput/data_wait_seconds") == [4.0, 2.0, 2.0]


def test_an_unexpected_wait_between_calls_makes_no_step_too_fast() -> None:
    run = Run(calls_per_step=2)
    for _ in range(SHORT_WAITS + 5):
        with run.logger.waiting("data"):
            run.clock.advance(0.0005)
        calls(run, 1.0)
    with run.logger.waiting("data"):
        run.clock.advance(20.0)
    calls(run, 1.0)
    run.logger.close()
    seconds = run.sink.scalar("perf/step_time_seconds")
    assert seconds[1:-1] == pytest.approx([2.0] * (len(seconds) - 2))
    assert 2.0 <= seconds[-1] <= 4.0  # nobody saw when the first of its calls ended


def test_a_wait_inside_a_step_is_not_idle_while_a_call_of_it_runs() -> None:
    run = Run()
    for _ in range(2):
        with run.logger.step():
            calls(run, 3.0)
            with run.logger.waiting("data"):
                run.clock.advance(2.0)
            calls(run, 1.0)
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [4.0, 4.0]


def test_nested_metrics_are_means_over_the_calls_of_a_step_or_an_eval() -> None:
    run = Run(calls_per_step=2)

    def call(loss: float) -> None:
        metrics = run.device.run(1.0, loss)
        nested = {**metrics, "aux": {"norm": metrics["loss"], "deep": {"x": metrics["loss"]}}}
        run.logger.observe_call("f", nested, StepCost(**RUN_COST), None)

    for loss in (1.0, 3.0):
        call(loss)
    with run.logger.pause("eval"):
        for loss in (5.0, 8.0):
            call(loss)
    run.logger.close()
    (record,) = run.sink.records
    assert record.notes == ()
    for folder, mean in (("learning", 2.0), ("eval", 6.5)):
        names = [f"{folder}/{name}" for name in ("loss", "aux/norm", "aux/deep/x")]
        assert [record.scalars.get(name) for name in names] == [mean] * 3


def test_an_eval_that_is_entered_again_has_the_means_of_its_last_calls() -> None:
    run = Run()
    pause = run.logger.pause("eval")
    for step, loss in ((0, 5.0), (1, 8.0)):
        run.steps(1.0, start=step)
        with pause:
            run.logger.observe_call("f", {"acc": loss}, StepCost(**RUN_COST), None)
    run.logger.close()
    assert run.sink.scalar("eval/acc") == [5.0, 8.0]


def test_the_calls_of_a_refused_thread_fill_no_step() -> None:
    run = Run(calls_per_step=2)
    for _ in range(4):
        calls(run, 1.0)
        other = threading.Thread(target=calls, args=(run, 100.0))
        run.device.free_at, free_at = 0.0, run.device.free_at
        other.start()
        other.join()
        run.device.free_at = free_at
    run.logger.close()
    assert [record.step for record in run.sink.records] == [0, 1]
    assert run.sink.scalar("perf/per_device_tflops") == [800e-12, 800e-12]
    assert run.sink.scalar("perf/step_time_seconds") == [2.0, 2.0]


def test_the_end_of_the_data_inside_of_a_wait_leaves_the_logger_usable() -> None:
    run = Run()
    run.steps(1.0)
    with pytest.raises(StopIteration), run.logger.waiting("data"):
        next(iter(()))
    assert run.logger.close().steps == 1


def test_compiling_before_the_logger_is_part_of_the_whole() -> None:
    log = CompileLog()
    log._on_duration("/jax/core/compile/backend_compile_duration", 6.0)
    run = Run(compile_log=log)
    run.steps(2.0)
    summary = run.logger.close()
    log.close()
    assert summary.total_seconds == pytest.approx(8.0)
    assert summary.shares["compile"] == pytest.approx(0.75)
    assert summary.compile_seconds == pytest.approx(6.0)


def test_no_checkpoint_is_made_of_a_state_with_a_broken_loss() -> None:
    run = Run(abort_on_nan_loss=True)
    run.steps(1.0)
    run.steps(1.0, start=1, loss=math.nan)
    saved = False
    with pytest.raises(NonFiniteLossError), run.logger.pause("checkpoint"):
        saved = True
    assert not saved
    run.logger.close()


def test_a_sink_that_hangs_holds_up_one_checkpoint_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.DRAIN_SECONDS", 0.0)
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.HUNG_DRAIN_SECONDS", -1.0)
    release = threading.Event()

    class Hanging(ListSink):
        def write(self, record: StepRecord) -> None:
            release.wait(HANG_SECONDS)
            super().write(record)

    sink = Hanging()
    run = Run(sinks=[sink])
    for step in range(3):
        run.steps(1.0, start=step)
        with run.logger.pause("checkpoint"):
            pass
    assert caplog.text.count("metrics were not all written") == 1
    release.set()
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.HUNG_DRAIN_SECONDS", HANG_SECONDS)
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.DRAIN_SECONDS", 2 * HANG_SECONDS)
    run.logger.close()
    assert [record.step for record in sink.records] == [0, 1, 2]
