"""What a kill within a run's first period leaves, without a process: the files at that moment."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.runs.goodput import read_run
from mfu_jax.sinks import JsonlSink

_ENOUGH = 10


def test_a_run_that_is_killed_early_keeps_more_than_its_first_step(tmp_path: Path) -> None:
    """Steps used to wait for a whole period after the first, which alone was written at once."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    path = run / "metrics.jsonl"
    sinks, most = [JsonlSink(path)], 10**6
    begun = time.monotonic()
    with MetricLogger(sinks=sinks, write_period_seconds=60.0) as logger:
        logger._pipeline._thread.size = most
        for step in range(most):
            logger.record(step, {"loss": 1.0})
            time.sleep(0.005)
            is_long = path.read_bytes().count(b"\n") >= _ENOUGH  # else it may hold no step yet
            if is_long and read_run(run).steps >= _ENOUGH:
                break
            assert time.monotonic() - begun < 30.0
        shutil.copytree(run, killed)
    assert _ENOUGH <= read_run(killed).steps <= step + 1
