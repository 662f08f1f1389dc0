"""The logger's cost: on the training thread, in the whole process, and in loop speed.

    python -m scripts.benchmarks.logger [--steps 400] [--write]

Run it from the repository root. Console (to a file), JSONL and TensorBoard are on unless a row
says otherwise. Waiting for the device is not counted as a cost: without a logger, the loop would
wait for the same step where it next needs the outputs. Every number is shown beside that of the
bare loop, or of MaxText's logger where installed, from the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.summary import percentile
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.sinks.console import ConsoleSink
from mfu_jax.logger.sinks.jsonl import JsonlSink
from mfu_jax.logger.sinks.tensorboard import TensorBoardSink
from scripts import results
from scripts.benchmarks.maxtext_logger import MaxTextLogger

WARMUP = 20
STEP_SECONDS, PAUSE_SECONDS = 0.005, 0.01
START_SECONDS = 0.3  # time for a logger's threads to open their files
COST: dict[str, Any] = {
    "model_flops_per_device": 10**9,
    "executed_flops_per_device": 10**9,
    "tokens_per_device": 2048,
    "peak_flops_per_sec": 1e15,
}
_NOTE = "Console, JSONL and TensorBoard are on; waiting for the device is excluded."


def make_logger(folder: Path, console: Any) -> MetricLogger:
    """A logger with all three sinks; its FLOPs and peak are arbitrary."""
    return MetricLogger(**COST, sinks=three_sinks(folder, console))


def three_sinks(folder: Path, console: Any) -> list[Sink]:
    """What most users turn on."""
    return [
        ConsoleSink(console, progress=False),
        JsonlSink(folder / "metrics.jsonl"),
        TensorBoardSink(folder / "tensorboard"),
    ]


@jax.jit
def tiny_step(x: jax.Array) -> dict[str, jax.Array]:
    """A training step's metrics."""
    return {
        "loss": x.mean(),
        "grad_norm": jnp.abs(x).max(),
        "current_learning_rate": x[0, 0],
        "total_weights": jnp.int32(2048),
    }


@jax.jit
def busy_step(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """About ten milliseconds of matmuls on two cores, and a training step's metrics."""
    for _ in range(4):
        x = x @ x * 1e-3
    return x, tiny_step(x)


def microseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def record_costs(steps: int) -> dict[str, list[float]]:
    """Cost of each call on the training thread in µs, by situation."""
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, open(os.path.join(name, "log"), "w") as console:
        folder = Path(name)
        x = jnp.full((700, 700), 0.5)
        waits = []
        with make_logger(folder / "busy", console) as logger:
            for step in range(steps):
                waits.append(microseconds(lambda: wait_for_nothing(logger)))
                x, metrics = busy_step(x)
                logger.record(step, metrics)
        lines = (folder / "busy" / "metrics.jsonl").read_text().splitlines()
        costs["`record()`, device busy"] = [
            json.loads(line)["perf/logger_overhead_us"] for line in lines
        ]
        costs["`waiting()`, device busy"] = waits
        with make_logger(folder / "idle", console) as logger:
            costs |= costs_after_pauses(steps, {"`record()`": logger.record})
        if maxtext := MaxTextLogger.of(folder / "maxtext"):
            costs |= costs_after_pauses(steps, {"MaxText's logger": maxtext.record})
            maxtext.close()
    return {situation: values[WARMUP:] for situation, values in costs.items()}


def costs_after_pauses(
    steps: int, calls: dict[str, Callable[[int, Any], object]]
) -> dict[str, list[float]]:
    """Costs of calls after 10 ms of idling, and of an empty ``with`` block beside them."""
    costs: dict[str, list[float]] = {}
    small = jnp.ones((8, 8))
    for name, call in {"an empty `with`": lambda *_: do_nothing(), **calls}.items():
        values = costs.setdefault(f"{name}, after a pause of 10 ms", [])
        for step in range(steps):
            time.sleep(PAUSE_SECONDS)
            metrics = tiny_step(small)
            values.append(microseconds(lambda: call(step, metrics)))  # noqa: B023
    return costs


def do_nothing() -> None:
    with contextlib.nullcontext():
        pass


def cpu_costs(steps: int, blocks: int) -> dict[tuple[str, float], float]:
    """CPU milliseconds per step of the whole process, beyond the bare loop's.

    Args:
        steps: per block.
        blocks: alternating blocks; the result is the median of their differences.

    Returns:
        (sinks, seconds between steps) → milliseconds.
    """
    result: dict[tuple[str, float], float] = {}
    for pause in (STEP_SECONDS, PAUSE_SECONDS):
        found: dict[str, list[float]] = {}
        for _ in range(blocks):
            with tempfile.TemporaryDirectory() as name, open(Path(name) / "log", "w") as console:
                makers: dict[str, Callable[[], MetricLogger]] = {
                    "`sinks=[]`": lambda: MetricLogger(sinks=[], **COST),
                    "console, JSONL, TensorBoard": lambda: make_logger(Path(name), console),
                }
                for sinks, make in makers.items():
                    bare = cpu_milliseconds(steps, pause, None)  # before a logger starts any thread
                    with make() as logger:
                        time.sleep(START_SECONDS)
                        ours = cpu_milliseconds(steps, pause, logger)
                    found.setdefault(sinks, []).append(ours - bare)
        result |= {(sinks, pause): statistics.median(values) for sinks, values in found.items()}
    return result


def cpu_milliseconds(steps: int, pause: float, logger: MetricLogger | None) -> float:
    x = jnp.ones((8, 8))
    for step in range(-WARMUP, steps):
        if step == 0:
            begin = time.process_time()
        metrics = tiny_step(x)
        if logger is not None:
            logger.record(WARMUP + step, metrics)
        time.sleep(pause)
    if logger is not None:
        logger.flush()  # what waits for its tick is a cost, too
    return 1e3 * (time.process_time() - begin) / steps


@jax.jit
def one_core_step(x: jax.Array, times: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Arithmetic too small for XLA to split among cores, repeated `times` times."""
    x = jax.lax.fori_loop(0, times, lambda _, x: jnp.sin(x) + 0.5, x)
    return x, {"loss": x.mean()}


@jax.jit
def all_cores_step(x: jax.Array, times: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = jax.lax.fori_loop(0, times, lambda _, x: x @ x * 1e-3, x)
    return x, {"loss": x.mean()}


def loop_speeds(steps: int, blocks: int) -> dict[str, list[float]]:
    """Loop speed with 5 ms steps and the logger, as fractions of the bare loop's."""
    return {
        "one core computes": speeds(one_core_step, jnp.ones((64,)), steps, blocks),
        "all cores compute": speeds(all_cores_step, jnp.ones((512, 512)), steps, blocks),
    }


def speeds(step: Callable[..., Any], x: jax.Array, steps: int, blocks: int) -> list[float]:
    def run(logger: MetricLogger | None, times: int) -> float:
        state = x
        begin = time.perf_counter()
        for number in range(steps):
            state, metrics = step(state, times)
            if logger is not None:
                logger.record(number, metrics)
            else:
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    run(None, 1)
    times = 16
    while (seconds := run(None, times) / steps) < STEP_SECONDS:
        times = int(times * min(4.0, 1.05 * STEP_SECONDS / seconds)) + 1
    ratios = []
    for _ in range(blocks):
        with tempfile.TemporaryDirectory() as name, open(Path(name) / "log", "w") as console:
            before = run(None, times)
            with make_logger(Path(name), console) as logger:
                ours = run(logger, times)
            ratios.append((before + run(None, times)) / 2 / ours)
    return sorted(ratios)


def wait_for_nothing(logger: MetricLogger) -> None:
    with logger.waiting("data"):
        pass


def quantiles(values: Iterable[float], *columns: str) -> results.Row:
    """Median, p90 and p99 in three columns."""
    ordered = sorted(values)
    shown = (round(percentile(ordered, share), 1) for share in (0.5, 0.9, 0.99))
    return dict(zip(columns, shown, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=7)
    results.add_write(parser)
    options = parser.parse_args()

    measured: dict[str, list[results.Row]] = {
        "cost of one call on the training thread": [
            {"call": situation, **quantiles(costs, "median µs", "p90 µs", "p99 µs")}
            for situation, costs in record_costs(options.steps).items()
        ],
        "CPU time of the whole process": [
            {
                "sinks": sinks,
                "seconds between steps": pause,
                "CPU ms a step, whole process": round(spent, 3),
            }
            for (sinks, pause), spent in cpu_costs(options.steps, options.blocks).items()
        ],
        "speed of a loop with the logger": [],
    }
    for situation, ratios in loop_speeds(options.steps // 2, options.blocks).items():
        low, median, high = (f"{percentile(ratios, q):.2%}" for q in (0.25, 0.5, 0.75))
        measured["speed of a loop with the logger"].append(
            {
                "5 ms steps": situation,
                "speed with the logger, median": median,
                "quartiles": f"{low} to {high}",
            }
        )
    results.publish("logger_cost", measured, is_written=options.write, notes=[_NOTE])


if __name__ == "__main__":
    main()
