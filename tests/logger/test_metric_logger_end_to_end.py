"""MetricLogger around real jitted steps, with all file sinks on."""

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.cli import main
from mfu_jax.errors import UserError
from mfu_jax.instrumentation.instrumented_step import instrument
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import ConsoleSink, CsvSink, JsonlSink, Sink, TensorBoardSink
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@jax.jit
def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)
    metrics = {
        "loss": loss,
        "grad_norm": jnp.linalg.norm(gradient).astype(jnp.bfloat16),
        "total_weights": jnp.int32(batch.size),
    }
    return weights - 0.1 * gradient, metrics


def train(folder: Path, steps: range) -> str:
    """Runs `steps` with every sink on, and an eval and a checkpoint after every fourth."""
    console = io.StringIO()
    resume = {"resume_from_step": steps.start}
    sinks: list[Sink] = [
        ConsoleSink(console, progress=False),
        JsonlSink(folder / "metrics.jsonl", **resume),
        CsvSink(folder / "metrics.csv", **resume),
        TensorBoardSink(folder / "tensorboard", **resume),
    ]
    weights = jnp.zeros((8, 1))
    with MetricLogger(
        model_flops_per_device=3 * 2 * 16 * 8,
        tokens_per_device=16,
        peak_flops_per_sec=1e12,
        sinks=sinks,
        start_step=steps.start,
        warmup_steps=1,
    ) as logger:
        logger.write_setup({"device": "cpu"}, {"ledger": "model 768"})
        for step in steps:
            with logger.waiting("data"):
                batch = jnp.ones((16, 8))
            weights, metrics = train_step(weights, batch)
            logger.record(step, metrics)
            if step % 4 == 3:
                with logger.pause("eval"):
                    logger.record_eval(step, {"avg_loss": jnp.mean(weights)})
                with logger.pause("checkpoint"):
                    pass
    return console.getvalue()


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_all_sinks_tell_the_same_of_every_step_of_a_resumed_run(tmp_path: Path) -> None:
    train(tmp_path, range(10))
    text = train(tmp_path, range(6, 13))

    lines = records(tmp_path)
    assert [line["step"] for line in lines] == list(range(13))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("perf/step_time_seconds", "perf/mfu", "learning/loss", "learning/grad_norm"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        # Event files hold single precision.
        assert found == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    names = {name for line in lines for name in line} - {"step", "kind", "unix_seconds", "notes"}
    tags = set(events.Tags()["scalars"])
    assert names == {tag for tag in tags if not tag.startswith("Overview/")}
    assert [line["step"] for line in lines if "eval/avg_loss" in line] == [3, 7, 11]
    assert all(line["learning/total_weights"] == 128 for line in lines)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(13))]
    completed = [line for line in text.splitlines() if line.startswith("completed step: ")]
    assert len(completed) == 7
    assert "summary: " in text


@pytest.mark.full
def test_times_and_utilisation_of_real_steps_are_possible(tmp_path: Path) -> None:
    train(tmp_path, range(10))
    for line in records(tmp_path):
        assert line["perf/step_time_seconds"] > 0
        assert line["perf/mfu"] == pytest.approx(
            768 / (line["perf/step_time_seconds"] * 1e12), rel=1e-9
        )
        assert line["perf/logger_overhead_us"] > 0


@jax.jit
def slow_step(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = jax.lax.fori_loop(0, 100, lambda _, w: jnp.tanh(w @ w), weights)
    return weights, jnp.sum(weights)


def linger(seconds: float = 2.0) -> None:
    """What a loop does after its last step, such as an evaluation."""
    threading.Event().wait(seconds)


@pytest.mark.full
@pytest.mark.parametrize("reads", ["nothing", "after", "before"])
def test_the_last_real_step_ends_when_its_outputs_are_ready(reads: str) -> None:
    sink = ListSink()
    logger = MetricLogger(peak_flops_per_sec=1e12, warmup_steps=0, sinks=[sink])
    weights = jnp.eye(128)
    for step in range(10):
        weights, loss = slow_step(weights)
        if reads == "before":
            float(loss)
        logger.record(step, {"loss": loss})
        if reads == "after":
            float(loss)
    linger()
    summary = logger.close()
    assert 0 < sink.records[-1].scalars["perf/step_time_seconds"] < 1.0
    assert summary.seconds_by_use["other"] > 1.0


@pytest.mark.full
def test_the_last_instrumented_step_ends_when_its_outputs_are_ready() -> None:
    sink = ListSink()
    step = instrument(slow_step, peak_tflops_per_device=1.0, warmup_steps=0, sinks=[sink])
    weights = jnp.eye(128)
    for _ in range(10):
        weights, _ = step(weights)
    linger()
    step.close()
    assert 0 < sink.records[-1].scalars["perf/step_time_seconds"] < 1.0


LINGERING_RUN = """
import sys
import jax
import jax.numpy as jnp
import mfu_jax
from tests.logger.test_metric_logger_end_to_end import linger, slow_step

step = mfu_jax.instrument(slow_step, metrics_file=sys.argv[1], peak_tflops_per_device=1.0)
weights = jnp.eye(128)
for _ in range(10):
    weights, _ = step(weights)
linger()
"""


@pytest.mark.full
def test_the_last_step_of_a_process_that_closes_nothing_ends_with_its_outputs(
    tmp_path: Path,
) -> None:
    subprocess.run(
        [sys.executable, "-c", LINGERING_RUN, str(tmp_path / "metrics.jsonl")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    assert 0 < records(tmp_path)[-1]["perf/step_time_seconds"] < 1.0


CRASHING_RUN = """
import sys
import jax.numpy as jnp
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink

logger = MetricLogger(model_flops_per_device=1, sinks=[JsonlSink(sys.argv[1])])
for step in range(5):
    logger.record(step, {"loss": jnp.float32(1.0)})
raise SystemExit("a defect of the loop")
"""


@pytest.mark.full
def test_a_loop_that_dies_without_closing_the_logger_loses_no_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHING_RUN, str(tmp_path / "metrics.jsonl")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "a defect of the loop\n"
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "metrics.jsonl.summary.json").read_text())["steps"] > 0


def record_steps(steps: range, **options: Any) -> None:
    with MetricLogger(peak_flops_per_sec=1e12, start_step=steps.start, **options) as logger:
        for step in steps:
            logger.record(step, {"loss": 1.0}, step_time_seconds=0.1)


def test_a_run_dir_has_what_every_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    record_steps(range(5), run_dir=str(folder))
    record_steps(range(4, 8), run_dir=str(folder))
    assert "completed step: 7" in capsys.readouterr().out
    assert [line["step"] for line in records(folder)] == list(range(8))
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("learning/loss")] == list(range(8))
    assert main(["report", str(folder)]) == 0
    assert "steps 0 to 7" in capsys.readouterr().out


def test_a_run_dir_beside_sinks_is_said_to_lack_what_they_do_not_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_steps(range(2), run_dir=str(tmp_path), sinks=[JsonlSink(tmp_path / "metrics.jsonl")])
    assert f"tensorboard_dir='{tmp_path}/tensorboard': not written" in caplog.text
    assert "metrics_file" not in caplog.text


@pytest.mark.parametrize("run_dir", [True, 0, ["a"]])
def test_a_run_dir_that_is_no_text_is_refused_as_instrument_does(run_dir: Any) -> None:
    with pytest.raises(UserError) as of_logger:
        MetricLogger(run_dir=run_dir)
    with pytest.raises(UserError) as of_instrument:
        instrument(train_step, run_dir=run_dir)
    assert str(of_logger.value).splitlines()[0] == str(of_instrument.value).splitlines()[0]
