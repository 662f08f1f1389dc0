"""Values and names that no metric should have, in every sink: only they may be missing."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import Sink, make_sink
from tests.campaigns.promises import Promise

STEPS = 20
BAD_STEP = 7


def _raise() -> float:
    raise RuntimeError("not today")


METRICS: dict[str, Mapping[Any, Any]] = {
    "10**400": {"big": 10**400},
    "-10**400": {"big": -(10**400)},
    "10**30": {"big": 10**30},
    "1e308": {"large": 1e308},
    "NaN": {"other": math.nan},
    "infinity": {"other": math.inf},
    "float32 of NumPy": {"other": np.float32(1.5)},
    "a bool": {"other": True},
    "a complex number": {"other": 1 + 2j},
    "a text": {"other": "much"},
    "None": {"other": None},
    "a list": {"other": [1.0, 2.0]},
    "an object": {"other": object()},
    "an array of a million numbers": {"other": np.zeros(10**6, np.float32)},
    "a function that raises": {"other": _raise},
    "a name with @": {"acc@1": 0.5},
    "two names alike but for punctuation": {"top-1": 0.5, "top_1": 0.25},
    "a name that is a number": {5: 0.5},
    "a name that is a tuple": {("a", 1): 0.5},
    "an empty name": {"": 0.5},
    "a name with a surrogate": {"bad\udc80name": 0.5},
    "a name with a newline and a NUL": {"a\nb\0c": 0.5},
    "a name of 10,000 letters": {"x" * 10_000: 0.5},
    "a name with a slash at its end": {"a/": 0.5},
    "a nested mapping": {"a": {"b": {"c": 1.0}}},
    "a thousand metrics": {f"m{i}": 1.0 for i in range(1000)},
}
TIMES: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": math.inf,
    "negative": -1.0,
    "zero": 0.0,
    "text": "0.1 s",
    "1e308": 1e308,
    "1e-320": 1e-320,
    "float32 of NumPy": np.float32(0.5),
    "an array": np.zeros(3),
    "None": None,
}


def rows(folder: Path) -> list[Promise]:
    """One row for bad metrics, one for bad step times."""
    logging.getLogger("mfu_jax").setLevel(logging.CRITICAL)
    sinks = _sinks()
    by_metric = Promise(f"a record with a bad metric, in {', '.join(sinks)}")
    by_time = Promise(f"a bad step_time_seconds, in {', '.join(sinks)}")
    number = 0
    for sink, (make, read) in sinks.items():
        for row, cases in ((by_metric, METRICS), (by_time, TIMES)):
            for name, value in cases.items():
                number += 1
                row.count += 1
                _try(row, f"{name} in {sink}", make, read, value, folder / str(number))
    by_metric.worst = by_time.worst = "that value"
    return [by_metric, by_time]


Make = Callable[[Path], Sink]
Read = Callable[[Path, Sink], list[int]]


def _try(row: Promise, name: str, make: Make, read: Read, bad: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    sink = make(folder)
    is_metric = row.kind.startswith("a record")
    try:
        with MetricLogger(sinks=[sink], warmup_steps=0, peak_flops_per_sec=1e12) as logger:
            for step in range(STEPS):
                is_bad = step == BAD_STEP
                metrics = {"loss": 1.0, **(bad if is_bad and is_metric else {})}
                time = bad if is_bad and not is_metric else 0.25
                logger.record(step, metrics, step_time_seconds=time)
        summary = logger.summary()
        steps = read(folder, sink)
    except Exception as error:
        row.expect(False, f"{name}: {type(error).__name__}: {str(error)[:100]}")
        return
    row.expect(steps == list(range(STEPS)), f"{name}: {len(steps)} of {STEPS} records")
    row.expect(summary.dropped_records == 0, f"{name}: {summary.dropped_records} dropped")
    row.expect(summary.median_seconds == 0.25, f"{name}: median {summary.median_seconds}")
    mean = summary.mean_seconds
    row.expect(mean is not None and 0.2 < mean < 0.3, f"{name}: mean {mean}")


def _strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _read_jsonl(folder: Path, sink: Sink) -> list[int]:
    for path in folder.glob("*.json"):
        _strict(path.read_text())
    return [_strict(line)["step"] for line in (folder / "m.jsonl").read_text().splitlines()]


def _read_csv(folder: Path, sink: Sink) -> list[int]:
    csv.field_size_limit(10**7)
    with open(folder / "m.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def _read_tensorboard(folder: Path, sink: Sink) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("learning/loss")]


def _read_console(folder: Path, sink: Sink) -> list[int]:
    lines = (folder / "console.txt").read_text(errors="replace").splitlines()
    starts = [line for line in lines if line.startswith("completed step: ")]
    return [int(line.split()[2].rstrip(",")) for line in starts]


def _read_prometheus(folder: Path, sink: Any) -> list[int]:
    # A gauge keeps only its last value.
    last = sink.registry.get_sample_value("mfu_jax_step")
    return list(range(int(last) + 1)) if last is not None else []


def _sinks() -> dict[str, tuple[Make, Read]]:
    found: dict[str, tuple[Make, Read]] = {
        "jsonl": (lambda f: make_sink("jsonl", f / "m.jsonl"), _read_jsonl),
        "csv": (lambda f: make_sink("csv", f / "m.csv"), _read_csv),
        "tensorboard": (lambda f: make_sink("tensorboard", f / "events"), _read_tensorboard),
        "console": (
            lambda f: make_sink("console", open(f / "console.txt", "w", errors="replace")),  # noqa: SIM115
            _read_console,
        ),
    }
    if importlib.util.find_spec("prometheus_client"):
        found["prometheus"] = (lambda f: make_sink("prometheus", None), _read_prometheus)
    return found
