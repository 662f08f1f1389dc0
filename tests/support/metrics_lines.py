"""Metrics files with the step times that a test wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def line(
    step: int,
    seconds: float,
    *,
    tokens: float = 1024.0,
    tflops: float = 2.0,
    peak: float = 10.0,
    kind: str | None = "step",
    **more: Any,
) -> str:
    """One record as the logger writes it; without `kind`, as MaxText does."""
    record: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "perf/step_time_seconds": seconds,
        "perf/per_device_tflops": tflops,
        "perf/per_device_tflops_per_sec": tflops / seconds,
        "perf/per_device_tokens": tokens,
        "perf/per_device_tokens_per_sec": tokens / seconds,
        "perf/mfu": tflops / seconds / peak,
        **more,
    }
    if kind is None:
        del record["kind"]
    return json.dumps(record) + "\n"


def write_run(path: Path, seconds: Sequence[float], **more: Any) -> Path:
    """A file with a record for each step time; `more` as `line` takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line(n, s, **more) for n, s in enumerate(seconds)))
    return path
