"""A run's steps with FLOPs recounted from a config, or relative to another peak."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.totals import calculate_tokens_per_device
from mfu_jax.runs.metrics.files import MetricsRun
from mfu_jax.runs.metrics.step_table import STEP_SECONDS

_LOGGED = ("step_time_seconds", "per_device_tflops_per_sec")  # three decimals in a log
_SMALLEST = 1e-9


def tflops_of_a_step(run: MetricsRun) -> float:
    """From the file; for a log, time × rate of the step where rounding matters least."""

    best = math.inf, 0.0
    for segment in run.steps.segments():
        missing = [0.0] * len(segment.numbers)
        seconds, rates = (segment.columns.get(f"perf/{name}", missing) for name in _LOGGED)
        rounded = [
            1 / max(time, _SMALLEST) + 1 / max(rate, _SMALLEST)
            for time, rate in zip(seconds, rates, strict=True)
        ]
        if (least := min(rounded)) < best[0]:
            best = least, segment.columns["perf/per_device_tflops"][rounded.index(least)]
    return best[1]


def check_tokens(run: MetricsRun, config: Any, model: str) -> None:
    """Refuses a model whose steps differ in tokens from the run's.

    Args:
        run: the run.
        config: the model's.
        model: its name, for the message.

    Raises:
        UserError: the run's steps have a different number of tokens.
    """
    tokens = float(calculate_tokens_per_device(config))
    longest = run.steps.longest.scalars
    logged, seconds = longest["perf/per_device_tokens"], longest[STEP_SECONDS]
    # A log rounds seconds and tokens/s to three decimals.
    tolerance = 0.001 + (0.0005 / max(seconds, _SMALLEST) if run.form == "log" else 0.0)
    if logged and abs(logged / tokens - 1) > tolerance:
        raise UserError(
            f"{run.path!r} has {logged:,.0f} tokens per step and device, {model} as given has "
            f"{tokens:,.0f}",
            hint="pass its per_device_batch_size= and max_target_length=",
        )


def with_flops(run: MetricsRun, tflops: float) -> MetricsRun:
    """The run with other model FLOPs per step; a known MFU scales with them."""

    def change(scalars: Mapping[str, float]) -> dict[str, float]:
        new = dict(scalars, **{"perf/per_device_tflops": tflops})
        if "perf/mfu" in scalars and scalars["perf/per_device_tflops"]:
            new["perf/mfu"] *= tflops / scalars["perf/per_device_tflops"]
        return new

    return run.with_scalars(change)


def with_peak(run: MetricsRun, peak: hardware.Peak) -> MetricsRun:
    """The run with MFU relative to another peak; a known HFU keeps its ratio to MFU."""

    def change(scalars: Mapping[str, float]) -> dict[str, float]:
        optimal = scalars["perf/per_device_tflops"] / peak.tflops_per_sec
        new = dict(scalars)
        if not optimal:  # unknown, as for a growing batch
            return new
        new["perf/mfu"] = optimal / max(scalars[STEP_SECONDS], _SMALLEST)
        if "perf/hfu" in scalars and scalars.get("perf/mfu"):
            new["perf/hfu"] = scalars["perf/hfu"] * new["perf/mfu"] / scalars["perf/mfu"]
        else:
            new.pop("perf/hfu", None)
        return new

    return run.with_scalars(change)
