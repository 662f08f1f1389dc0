"""What `instrument` adds to a step on the training thread.

    python -m scripts.benchmarks.instrument [--steps 2000] [--write]

Run it from the repository root. The step's model has many leaves, as real ones do, and hardly any
arithmetic. Waiting for the device is not counted as a cost: without `instrument`, the loop would
wait for the same step elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mfu_jax
from mfu_jax.logger.records.summary import percentile
from scripts import results
from scripts.benchmarks.logger import quantiles, three_sinks

WARMUP = 100
_NOTE = "An idle device; console, JSONL and TensorBoard on."
# Leaves of the state, number of batch shapes, seconds between steps.
CASES = ((10, 1, 0.005), (1000, 1, 0.005), (10, 2, 0.005), (1000, 2, 0.005), (10, 1, 0.0))


def make_step() -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, x: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        loss = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(state)) * x.mean()
        return jax.tree.map(lambda w: w * 0.999, state), {"loss": loss, "grad_norm": loss}

    return train_step


def make_state(leaves: int) -> dict[str, jax.Array]:
    return {f"w{i}": jnp.ones((4, 4)) for i in range(leaves)}


class Timed:
    """A jitted function that records how long its own call takes."""

    def __init__(self, jitted: Any) -> None:
        self.__name__ = jitted.__name__
        self.jitted = jitted
        self.lower, self.trace = jitted.lower, jitted.trace
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        output = self.jitted(*args)
        self.seconds = time.perf_counter() - begin
        return output


def costs(leaves: int, steps: int, shapes: int, pause: float) -> tuple[list[float], list[float]]:
    """Per step: microseconds of the jitted call, and of what `instrument` does around it."""
    batches = [jnp.ones((8 + i, 8)) for i in range(shapes)]
    own, added = [], []
    with tempfile.TemporaryDirectory() as name, open(os.path.join(name, "log"), "w") as console:
        inner = Timed(make_step())
        step = mfu_jax.instrument(
            inner, sinks=three_sinks(Path(name), console), peak_tflops_per_device=1
        )
        state = make_state(leaves)
        for number in range(WARMUP + steps):
            x = batches[number % shapes]
            begin = time.perf_counter()
            output = step(state, x)
            spent = time.perf_counter() - begin
            own.append(1e6 * inner.seconds)
            added.append(1e6 * (spent - inner.seconds))
            state = output[0]
            jax.block_until_ready(output)
            time.sleep(pause)  # as long as a short step; the writer thread works meanwhile
        step.close()
    return sorted(own[WARMUP:]), sorted(added[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    results.add_write(parser)
    options = parser.parse_args()
    calls: list[results.Row] = []
    for leaves, shapes, pause in CASES:
        own, added = costs(leaves, options.steps, shapes, pause)
        name = f"{leaves} leaves" + (f", {shapes} alternating shapes" if shapes > 1 else "")
        calls.append(
            {
                "step": name + ("" if pause else ", no pause between steps"),
                "jitted call µs": round(percentile(own, 0.5), 1),
                **quantiles(added, "added µs, median", "added µs, p90", "added µs, p99"),
            }
        )
    measured = {"what a call of the instrumented step adds on the training thread": calls}
    results.publish("instrument_cost", measured, is_written=options.write, notes=[_NOTE])


if __name__ == "__main__":
    main()
