"""The logger's cost: on the training thread, in the whole process, and in loop speed.

    python -m scripts.benchmarks.logger [--steps 400] [--no-demo] [--write]

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.summary import percentile
from mfu_jax.logger.run_log import events
from mfu_jax.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink
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
_YOUNG = "console, JSONL, TensorBoard"
_OLD = "the same, from the seventh minute on"


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
def busy_step(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """About ten milliseconds of matmuls on two cores, and a training step's metrics."""
    for _ in range(4):
        x = x @ x * 1e-3
    metrics = {
        "loss": x.mean(),
        "grad_norm": jnp.abs(x).max(),
        "current_learning_rate": x[0, 0],
        "total_weights": jnp.int32(2048),
    }
    return x, metrics


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
    """Costs of calls after 10 ms of idling, and of an empty ``with`` block beside them.

    Args:
        steps: number of calls of each.
        calls: name → function of step and metrics.
    """
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


@jax.jit
def tiny_step(x: jax.Array) -> dict[str, jax.Array]:
    return {
        "loss": x.mean(),
        "grad_norm": jnp.abs(x).max(),
        "current_learning_rate": x[0, 0],
        "total_weights": jnp.int32(2048),
    }


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
                    _YOUNG: lambda: make_logger(Path(name) / "young", console),
                    _OLD: lambda: make_logger(Path(name) / "old", console),
                }
                for sinks, make in makers.items():
                    bare = cpu_milliseconds(steps, pause, None)  # before a logger starts any thread
                    with _aged(sinks == _OLD), make() as logger:
                        time.sleep(START_SECONDS)
                        ours = cpu_milliseconds(steps, pause, logger)
                    found.setdefault(sinks, []).append(ours - bare)
        result |= {(sinks, pause): statistics.median(values) for sinks, values in found.items()}
    return result


@contextlib.contextmanager
def _aged(is_old: bool) -> Iterator[None]:
    """Signs of life are as infrequent as in a process of 400 s and more."""
    shortest = events._LONGEST_SECONDS if is_old else events._SHORTEST_SECONDS
    with mock.patch.object(events, "_SHORTEST_SECONDS", shortest):
        yield


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


def seconds_a_step(steps: int, run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) / steps


def demo_blocks(block: int) -> Iterator[tuple[float, float]]:
    """Seconds per step of the demo without and with the logger, in alternating blocks."""
    from mfu_jax.trainer.config.pyconfig import load
    from mfu_jax.trainer.data.batches import make_iterator
    from mfu_jax.trainer.step.mesh import make_mesh, put_batch, rows_per_process
    from mfu_jax.trainer.step.state import abstract_state, create_state
    from mfu_jax.trainer.step.train_step import compile_train_step

    config = load(["enable_checkpointing=false", "attention=dot_product"])
    mesh = make_mesh(config)
    train_step = compile_train_step(config, mesh, abstract_state(config, mesh))
    state = create_state(config, mesh)
    data = make_iterator(
        config,
        split="train",
        rows_per_process=rows_per_process(config, mesh),
        accumulation=1,
        share=0,
        shares=1,
    )

    def plain() -> None:
        nonlocal state
        for _ in range(block):
            state, metrics = train_step(state, put_batch(next(data), mesh))
        jax.block_until_ready(metrics)

    def logged(logger: MetricLogger) -> None:
        nonlocal state
        for step in range(block):
            with logger.waiting("data"):
                batch = put_batch(next(data), mesh)
            state, metrics = train_step(state, batch)
            logger.record(step, metrics)
        logger.close()

    plain()
    while True:
        with tempfile.TemporaryDirectory() as name, open(os.path.join(name, "log"), "w") as console:
            before = seconds_a_step(block, plain)
            logger = make_logger(Path(name), console)
            between = seconds_a_step(block, lambda: logged(logger))  # noqa: B023
            after = seconds_a_step(block, plain)  # a machine that slows down biases neither
            yield (before + after) / 2, between


def cost_rows(costs: dict[str, list[float]]) -> Iterator[results.Row]:
    for situation, values in costs.items():
        yield {"call": situation, **quantiles(values, "median µs", "p90 µs", "p99 µs")}


def quantiles(values: Iterable[float], *columns: str) -> results.Row:
    """Median, p90 and p99 in three columns."""
    ordered = sorted(values)
    shown = (round(percentile(ordered, share), 1) for share in (0.5, 0.9, 0.99))
    return dict(zip(columns, shown, strict=True))


def cpu_rows(costs: dict[tuple[str, float], float]) -> Iterator[results.Row]:
    for (sinks, pause), spent in costs.items():
        yield {
            "sinks": sinks,
            "seconds between steps": pause,
            "CPU ms a step, whole process": round(spent, 3),
        }


def speed_rows(speeds: dict[str, list[float]]) -> Iterator[results.Row]:
    for situation, ratios in speeds.items():
        low, median, high = (f"{percentile(ratios, q):.2%}" for q in (0.25, 0.5, 0.75))
        yield {
            "5 ms steps": situation,
            "speed with the logger, median": median,
            "quartiles": f"{low} to {high}",
        }


def demo_row(blocks: Sequence[tuple[float, float]], block: int) -> results.Row:
    ratios = [with_logger / without for without, with_logger in blocks]
    low, ratio, high = (f"{quartile:.1%}" for quartile in statistics.quantiles(ratios, n=4))
    return {
        "step ms": round(1e3 * statistics.median(without for without, _ in blocks), 1),
        "time with the logger, median": ratio,
        "quartiles": f"{low} to {high}",
        "blocks": len(blocks),
        "steps of each": block,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--demo-pairs", type=int, default=16)
    parser.add_argument("--no-demo", action="store_true")
    results.add_write(parser)
    options = parser.parse_args()

    measured: dict[str, list[results.Row]] = {
        "cost of one call on the training thread": list(cost_rows(record_costs(options.steps))),
        "CPU time of the whole process": list(cpu_rows(cpu_costs(options.steps, options.blocks))),
        "speed of a loop with the logger": list(
            speed_rows(loop_speeds(options.steps // 2, options.blocks))
        ),
    }
    if not options.no_demo:
        block = 5
        blocks = [pair for pair, _ in zip(demo_blocks(block), range(options.demo_pairs))]  # noqa: B905
        measured["speed of the demo with the logger"] = [demo_row(blocks, block)]
    results.publish("logger_cost", measured, is_written=options.write, notes=[_NOTE])


if __name__ == "__main__":
    main()
