"""From a timed step with device arrays to a record of plain numbers, on the writer's thread."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mfu_jax.formatting import readable
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.diagnosis import diagnose
from mfu_jax.logger.sinks.base import StepRecord
from mfu_jax.logger.step_cost import StepCost
from mfu_jax.logger.summary import StepStatistics, Summary
from mfu_jax.logger.timing.timer import TimedStep

# The rolling window, in measured steps, where every step is logged.
DEFAULT_WINDOW = 100


class RecordBuilder:
    """Fetches values, derives rates, labels and flags steps, and keeps the run's statistics.

    Args:
        cost: what a step costs, unless the step says otherwise.
        config: which step is the first, which are warm-up, and which are logged.
        compile_is_seen: JAX reports compilations; otherwise the first step counts as one.

    Attributes:
        explained: JAX's names of functions whose compilations are told elsewhere.
    """

    def __init__(self, cost: StepCost, config: LoggerConfig, *, compile_is_seen: bool) -> None:
        self._cost = cost
        self._start_step = config.start_step
        self._warmup_steps = config.warmup_steps
        self._log_period = config.log_period
        self._compile_is_seen = compile_is_seen
        self._run = StepStatistics()
        self._window = StepStatistics()
        self.explained: set[str] = set()
        self._compiled: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._flags: Counter[str] = Counter()
        self._seconds_by_use: defaultdict[str, float] = defaultdict(float, train=0.0)
        self._dropped_metrics: set[str] = set()
        self._last_loss: float | None = None
        self._clock_jumps = 0
        self._memory_device = _device_with_memory_stats()

    def build(self, step: TimedStep, *, is_last: bool = False) -> StepRecord:
        """The record of one step, which is also added to the statistics."""
        notes: list[str] = []
        kind = self._kind(step)
        cost = step.cost or self._cost
        if callable(cost):
            cost = cost()
        scalars = cost.rates(step.seconds)
        findings = diagnose(cost, scalars) if kind == "step" else []
        notes += [found.text for found in findings if not self._flags[found.flag]]
        notes += self._happened(step)
        self._count(step, kind, scalars, [found.flag for found in findings])

        scalars |= self._fetch(step.metrics, "learning", notes)
        scalars |= self._fetch(step.extra, "eval", notes)
        self._last_loss = scalars.get("learning/loss", self._last_loss)
        scalars["perf/logger_overhead_us"] = round(1e6 * step.overhead_seconds, 3)
        scalars |= {f"goodput/{name}_seconds": spent for name, spent in step.spans.items()}
        spent = sum(self._seconds_by_use.values())
        if spent > 0:
            scalars["goodput/train_fraction"] = self._seconds_by_use["train"] / spent
        if step.compile_events:
            scalars["compile/seconds"] = _compile_seconds(step)
        is_logged = bool(
            step.step % self._log_period == 0 or kind != "step" or notes or step.extra or is_last
        )
        if is_logged:
            scalars |= self._memory()
        if self._window_is_full(step.step):
            scalars |= self._roll()
            is_logged = True
        return StepRecord(
            step=step.step,
            kind=kind,
            unix_seconds=step.ended_at,
            scalars=scalars,
            flags=tuple(found.flag for found in findings),
            notes=tuple(notes),
            is_logged=is_logged,
        )

    def add_spans(self, spans: Mapping[str, float]) -> None:
        """Adds time not attributed to any step, such as after the last one."""
        for name, spent in spans.items():
            self._seconds_by_use[name] += spent

    def summary(
        self,
        *,
        total_seconds: float,
        compile_seconds: float = 0.0,
        compile_count: int = 0,
        dropped_records: int = 0,
    ) -> Summary:
        """The run so far."""
        uses = dict(self._seconds_by_use)
        uses["other"] = max(0.0, total_seconds - sum(uses.values()))
        return Summary(
            **self._run.fields(),
            warmup_steps=self._kinds["warmup"],
            compile_steps=self._kinds["compile"],
            last_loss=self._last_loss,
            compile_seconds=compile_seconds,
            compile_count=compile_count,
            total_seconds=max(total_seconds, sum(uses.values())),
            seconds_by_use=uses,
            clock_jumps=self._clock_jumps,
            dropped_records=dropped_records,
            flags=dict(self._flags),
        )

    def _kind(self, step: TimedStep) -> str:
        index = step.step - self._start_step
        if step.is_compile or (index == 0 and not self._compile_is_seen):
            return "compile"
        return "warmup" if index < self._warmup_steps else "step"

    def _happened(self, step: TimedStep) -> Iterator[str]:
        compiled = dict.fromkeys(e.function for e in step.compile_events if e.stage == "compile")
        again = self._compiled.intersection(compiled)
        self._compiled.update(compiled)
        told = [name or "a function" for name in compiled if name not in self.explained]
        if told and step.step > self._start_step:
            what = f"{', '.join(told)} in {readable(_compile_seconds(step))} s"
            yield (
                f"recompiled {what}; usually a shape, dtype or static argument changed"
                if again.intersection(told)
                else f"compiled {what}"
            )
        if step.clock_jump_seconds is not None:
            self._clock_jumps += 1
            yield (
                f"the wall clock jumped by {step.clock_jump_seconds:+.3f} s; this step's time is "
                f"the monotonic clock's"
            )

    def _count(
        self, step: TimedStep, kind: str, scalars: Mapping[str, float], flags: list[str]
    ) -> None:
        self._kinds[kind] += 1
        self._flags.update(flags)
        self.add_spans(step.spans)
        compiling = min(step.seconds, _compile_seconds(step)) if kind == "compile" else 0.0
        self.add_spans({"train": step.seconds - compiling})
        if compiling:
            self.add_spans({"compile": compiling})
        if kind == "step":
            self._run.add(scalars)
            self._window.add(scalars)

    def _window_is_full(self, step: int) -> bool:
        if self._log_period == 1:
            return len(self._window) >= DEFAULT_WINDOW
        return len(self._window) > 0 and step % self._log_period == 0

    def _roll(self) -> dict[str, float]:
        window = self._window.fields()
        self._window = StepStatistics()
        names = {
            "steps": "rolling/steps",
            "median_seconds": "rolling/step_time_seconds_median",
            "p90_seconds": "rolling/step_time_seconds_p90",
            "p99_seconds": "rolling/step_time_seconds_p99",
            "tokens_per_sec_per_device": "rolling/per_device_tokens_per_sec",
            "tflops_per_sec_per_device": "rolling/per_device_tflops_per_sec",
            "mfu": "rolling/mfu",
            "hfu": "rolling/hfu",
            "mbu": "rolling/mbu",
        }
        return {name: window[field] for field, name in names.items() if field in window}

    def _fetch(self, metrics: Mapping[str, Any], folder: str, notes: list[str]) -> dict[str, float]:
        arrays = dict(_named(metrics, folder))
        for value in arrays.values():
            start_copy = getattr(value, "copy_to_host_async", None)
            if start_copy is not None:  # start all copies before waiting for the first
                start_copy()
        scalars = {}
        for name, value in arrays.items():
            try:
                number = value() if callable(value) else value
                if number is not None:
                    scalars[name] = _scalar(number)
            except Exception as error:
                if name not in self._dropped_metrics:
                    self._dropped_metrics.add(name)
                    notes.append(f"metric {name!r} is left out: {error}")
        return scalars

    def _memory(self) -> dict[str, float]:
        if self._memory_device is None:
            return {}
        stats = self._memory_device.memory_stats() or {}
        wanted = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
        return {f"memory/{name}": stats[name] for name in wanted if name in stats}


def _compile_seconds(step: TimedStep) -> float:
    return sum(event.own_seconds for event in step.compile_events)


def _named(metrics: Mapping[str, Any], folder: str) -> Iterator[tuple[str, Any]]:
    """Leaves under their full names; a name with a slash, like MaxText's, is already full.

    Values under a name with a leading underscore are waited for, but not shown.
    """
    for name, value in metrics.items():
        if name.startswith("_"):
            continue
        full = name if "/" in name else f"{folder}/{name}"
        if isinstance(value, Mapping):
            yield from _named(value, full if name not in ("scalar", "scalars") else folder)
        elif value is not None:
            yield full, value


def _scalar(value: Any) -> float:
    if isinstance(value, int | float):
        return value
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(
            f"it has shape {array.shape}; expected one number; usually a loss per token or per "
            f"device; take its mean inside the step"
        )
    number = array.reshape(-1)[0]
    return int(number) if array.dtype.kind in "iub" else float(number)


def _device_with_memory_stats() -> Any:
    device = jax.local_devices()[0]
    return device if device.memory_stats() else None
