"""What the journal and the exchange between hosts add to a step on the training thread.

    python -m scripts.benchmarks.journal [--rounds 1000]

Three loggers take turns in one loop: without either, with a journal, and with both. The last two
columns are the medians of the differences from the first logger's call in the same round, which
other programs disturb equally. Every exchange is answered at once; an unanswered one waits on a
separate thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mfu_jax.logger.hosts.exchange import ProcessPlace
from mfu_jax.logger.hosts.report import HostReport
from mfu_jax.logger.journal.absent import NoJournal
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.summary import percentile
from mfu_jax.sinks import JsonlSink
from mfu_jax.util.formatting import columns

WARMUP = 50
_PAUSE_SECONDS = 0.002
_PERIOD = 10  # steps between two exchanges, ten times as frequent as by default
_HEAD = ("logger", "median", "p90", "more than the first", "p90 of that")


class Echo:
    """An exchange of two processes in which the other one echoes this one's report."""

    def __init__(self) -> None:
        self.count = 0
        self._texts: list[str] = []

    def put(self, process: int, text: str) -> None:
        self.count += 1
        other = dataclasses.replace(HostReport.of_text(text), process=1)
        self._texts = [text, other.to_text()]

    def get_all(self) -> list[str]:
        return self._texts


def make_logger(folder: Path, *, journal: bool, exchange: Echo | None) -> MetricLogger:
    """A logger with a metrics file."""
    logger = MetricLogger(
        sinks=[JsonlSink(folder / "metrics.jsonl")],
        journal=None if journal else NoJournal(),
        host_log_period=_PERIOD if exchange else 0,
        peak_flops_per_sec=1e15,
        model_flops_per_device=10**9,
    )
    if exchange:
        place = ProcessPlace(0, 2, exchange, False)
        hosts = logger._pipeline.hosts
        assert hosts is not None
        hosts._find_place = lambda config: place
    return logger


def step_microseconds(logger: MetricLogger, step: int) -> float:
    """Time of the logger's calls in one step."""
    time.sleep(_PAUSE_SECONDS)
    metrics = {"loss": np.float32(1.0)}
    begin = time.perf_counter()
    with logger.waiting("data"):
        pass
    logger.record(step, metrics)
    return 1e6 * (time.perf_counter() - begin)


def costs(rounds: int) -> dict[str, list[float]]:
    """Microseconds per round, by logger."""
    echo, chance = Echo(), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        loggers = {
            "neither": make_logger(Path(name) / "a", journal=False, exchange=None),
            "journal": make_logger(Path(name) / "b", journal=True, exchange=None),
            "journal and exchange": make_logger(Path(name) / "c", journal=True, exchange=echo),
        }
        found: dict[str, list[float]] = {name: [] for name in loggers}
        for step in range(WARMUP + rounds):
            for name in chance.sample(list(loggers), len(loggers)):
                found[name].append(step_microseconds(loggers[name], step))
        for logger in loggers.values():
            logger.close()
    if 2 * echo.count < rounds // _PERIOD:  # an exchange due while another is pending is skipped
        raise RuntimeError(f"{echo.count} exchanges; expected one in {_PERIOD} steps")
    return {name: values[WARMUP:] for name, values in found.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    found = costs(parser.parse_args(argv).rounds)
    first = found["neither"]
    rows = [_HEAD]
    for name, values in found.items():
        more = sorted(b - a for a, b in zip(first, values, strict=True))
        rows.append(
            (
                name,
                f"{statistics.median(values):.1f} µs",
                f"{percentile(sorted(values), 0.9):.1f} µs",
                f"{statistics.median(more):+.2f} µs",
                f"{percentile(more, 0.9):+.1f} µs",
            )
        )
    print("\n".join(columns(rows, "<>>>>")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
