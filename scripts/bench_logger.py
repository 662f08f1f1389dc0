"""What the logger costs: microseconds per step on the training thread, and the demo's slow-down.

    python -m scripts.bench_logger [--steps 400] [--no-demo] [--markdown docs/benchmarks.md]

Run it from the repository's root. Console (to a file), JSONL and TensorBoard are on. Waiting for
the device is not a cost: without a logger the loop would wait for the same step wherever it next
needs the outputs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.sinks import ConsoleSink, JsonlSink, TensorBoardSink
from mfu_jax.logger.summary import percentile
from scripts.benchmark_page import machine, replace_section

WARMUP = 20
HEADING = "## Logger cost"


def make_logger(folder: Path, console: Any) -> MetricLogger:
    """A logger with all three sinks; its FLOPs and peak are arbitrary."""
    return MetricLogger(
        model_flops_per_device=10**9,
        executed_flops_per_device=10**9,
        tokens_per_device=2048,
        peak_flops_per_sec=1e15,
        sinks=[
            ConsoleSink(console, progress=False),
            JsonlSink(folder / "metrics.jsonl"),
            TensorBoardSink(folder / "tensorboard"),
        ],
    )


@jax.jit
def busy_step(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """About ten milliseconds of matmuls on two cores, and the metrics of a training step."""
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
    """Costs of each call in µs, by situation."""
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
        costs["record(), device busy"] = [
            json.loads(line)["perf/logger_overhead_us"] for line in lines
        ]
        costs["waiting(), device busy"] = waits
        calls = []
        with make_logger(folder / "idle", console) as logger:
            jax.block_until_ready(metrics)
            for step in range(steps):
                time.sleep(0.005)
                calls.append(microseconds(lambda: logger.record(step, metrics)))  # noqa: B023
        costs["record(), device idle"] = calls
    return {situation: values[WARMUP:] for situation, values in costs.items()}


def wait_for_nothing(logger: MetricLogger) -> None:
    with logger.waiting("data"):
        pass


def seconds_a_step(steps: int, run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) / steps


def demo_blocks(block: int) -> Iterator[tuple[float, float]]:
    """Seconds per step of the demo without and with the logger, in alternating blocks."""
    from mfu_jax.trainer.data import make_iterator
    from mfu_jax.trainer.mesh import make_mesh, put_batch, rows_per_process
    from mfu_jax.trainer.pyconfig import load
    from mfu_jax.trainer.state import abstract_state, create_state
    from mfu_jax.trainer.step import compile_train_step

    config = load(["enable_checkpointing=false", "attention=dot_product"])
    mesh = make_mesh(config)
    train_step = compile_train_step(config, mesh, abstract_state(config, mesh))
    state = create_state(config, mesh)
    data = make_iterator(
        config,
        split="train",
        rows_per_process=rows_per_process(config, mesh),
        accumulation=1,
        process_index=0,
        process_count=1,
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


def cost_table(costs: dict[str, list[float]]) -> str:
    rows = ["| call | median µs | p90 µs | p99 µs |", "|---|---|---|---|"]
    for situation, values in costs.items():
        ordered = sorted(values)
        shown = " | ".join(f"{percentile(ordered, q):.1f}" for q in (0.5, 0.9, 0.99))
        rows.append(f"| `{situation.split(',')[0]}`,{situation.split(',')[1]} | {shown} |")
    return "\n".join(rows)


def demo_text(blocks: Sequence[tuple[float, float]], block: int) -> str:
    bare = statistics.median(without for without, _ in blocks)
    ratios = [with_logger / without for without, with_logger in blocks]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return (
        f"A step of the demo takes {1e3 * bare:.0f} ms without the logger; with it, {ratio:.3f} of "
        f"that (median of {len(blocks)} blocks of {block} steps, each between two without; "
        f"quartiles {low:.3f} and {high:.3f})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--demo-pairs", type=int, default=16)
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--markdown", type=Path, help="file whose section is replaced")
    options = parser.parse_args()

    parts = [
        f"{HEADING}\n",
        f"{datetime.date.today()}, {machine()}, by `scripts/bench_logger.py`. Console, JSONL and "
        f"TensorBoard are on; waiting for the device is excluded.\n",
        cost_table(record_costs(options.steps)) + "\n",
    ]
    if not options.no_demo:
        block = 5
        blocks = [pair for pair, _ in zip(demo_blocks(block), range(options.demo_pairs))]  # noqa: B905
        parts.append(demo_text(blocks, block) + "\n")
    text = "\n".join(parts)
    print(text)
    if options.markdown:
        replace_section(options.markdown, text, HEADING)


if __name__ == "__main__":
    main()
