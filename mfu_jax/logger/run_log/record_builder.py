"""Turns a timed step with device arrays into a record of numbers, on the recorder's thread."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from mfu_jax.errors import escaped
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.records.step_cost import StepCost, StepRates, diagnose
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import ActivityTotals, StepStatistics, Summary
from mfu_jax.logger.records.values import numbers_of, quick_numbers, start_copies
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Once
from mfu_jax.util.formatting import readable

# The rolling window, in measured steps, if every step is logged.
DEFAULT_WINDOW = 100
# A smaller disagreement of the clocks is not worth a note; the monotonic one is used regardless.
NOTED_JUMP_SECONDS = 0.05
NOTED_JUMP_FRACTION = 0.01
_LATE = (
    "this step is shorter than its FLOPs at the peak, because the one before it was seen to end "
    "late: both together are possible; later steps like it are neither flagged nor noted"
)
_WINDOW_NAMES = {
    "steps": "rolling/steps",
    **{f"{n}_seconds": f"rolling/step_time_seconds_{n}" for n in ("median", "p90", "p99")},
    **{f"{n}_per_sec_per_device": f"rolling/per_device_{n}_per_sec" for n in ("tokens", "tflops")},
    **{n: f"rolling/{n}" for n in ("mfu", "hfu", "mbu")},
}


class RecordBuilder:
    """Fetches values, derives rates, labels and flags steps, and keeps the run's statistics.

    Args:
        cost: cost of a step, unless the step has its own.
        config: which steps are warm-up, and which are logged.

    Attributes:
        without_recompile_notes: JAX's names of functions whose compilations are reported elsewhere.
        activity: of the tensor cores, which a monitor adds to records.
    """

    def __init__(self, cost: StepCost, config: LoggerConfig) -> None:
        self._cost = cost
        self._rates = StepRates(cost)
        self._warmup_steps = config.warmup_steps
        self._log_period = config.log_period
        self._run = StepStatistics()
        self._window = StepStatistics()
        self.without_recompile_notes: set[str] = set()
        self.activity = ActivityTotals()
        self._compiled: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._flags: Counter[str] = Counter()
        self._seconds_by_use: defaultdict[str, float] = defaultdict(float, train=0.0)
        self._is_first = Once()
        self._last_loss: float | None = None
        self._clock_jumps = 0
        self._beyond_shortest = 0.0  # what the last steps took beyond the shortest possible time
        self._memory_device = _device_with_memory_stats()

    def prepare(self, steps: Iterable[TimedStep]) -> None:
        """Starts copying all values of `steps` to the host, before the first record is built."""
        for step in steps:
            start_copies(step.metrics)
            start_copies(step.extra)

    def build(self, step: TimedStep) -> StepRecord:
        """Builds the record of one step, and adds the step to the statistics."""
        notes: list[str] = []
        kind = self._kind(step)
        rates = self._rates_of(step, notes)
        step.cost = rates.cost  # for the monitors
        scalars = rates.at(step.seconds)
        findings: dict[str, str] = {}
        is_late = self._is_of_late_step(kind, step.seconds, rates)
        if kind == "step" and not rates.may_take(step.seconds):
            if not is_late:
                findings = diagnose(rates.cost, scalars)
                notes += [text for flag, text in findings.items() if not self._flags[flag]]
                self._flags.update(findings.keys())
            elif self._is_first("late"):
                notes.append(_LATE)
        if kind == "step" and rates.note and self._is_first("savings"):
            notes.append(rates.note)
        if step.compile_events:
            notes += self._happened(step)
        if step.clock_jump_seconds is not None:
            notes += self._clock_notes(step.clock_jump_seconds, step.seconds)
        self._count(step, kind, rates)

        self._fetch(step.metrics, "learning", scalars, notes)
        if step.extra:
            self._fetch(step.extra, "eval", scalars, notes)
        self._last_loss = scalars.get("learning/loss", self._last_loss)
        scalars["perf/logger_overhead_us"] = round(1e6 * step.overhead_seconds, 3)
        if step.spans:
            for name, spent in step.spans.items():
                scalars[f"goodput/{escaped(name)}_seconds"] = spent
        spent = sum(self._seconds_by_use.values())
        if spent > 0:
            scalars["goodput/train_fraction"] = self._seconds_by_use["train"] / spent
        if step.compile_events:
            scalars["compile/seconds"] = _compile_seconds(step)
        record = StepRecord(
            step=int(step.step),
            kind=kind,
            unix_seconds=step.ended_at,
            scalars=scalars,
            flags=tuple(findings),
            notes=tuple(notes),
            log_period=self._log_period,
        )
        if step.extra and not record.is_logged:  # results whose names do not show that
            scalars["eval/step"] = record.step
        ends_window = self._ends_window(record, step.is_last)
        if self._memory_device is not None and (ends_window or record.is_logged):
            scalars |= self._memory()
        if ends_window:
            window, self._window = self._window.fields(), StepStatistics()
            scalars |= {_WINDOW_NAMES[k]: v for k, v in window.items() if k in _WINDOW_NAMES}
        return record

    def add_spans(self, spans: Mapping[str, float]) -> None:
        """Adds time not attributed to any step, such as time after the last one."""
        for name, spent in spans.items():
            self._seconds_by_use[name] += spent

    def summary(self, total_seconds: float, **of_others: Any) -> Summary:
        """Totals of the run so far.

        Args:
            total_seconds: of the run.
            **of_others: fields of `Summary` that the records do not have.
        """
        uses = dict(self._seconds_by_use)
        uses["other"] = max(0.0, total_seconds - sum(uses.values()))
        return Summary(
            **self._run.fields(),
            **self.activity.fields(),
            warmup_steps=self._kinds["warmup"],
            compile_steps=self._kinds["compile"],
            last_loss=self._last_loss,
            total_seconds=max(total_seconds, sum(uses.values())),
            seconds_by_use=uses,
            clock_jumps=self._clock_jumps,
            flags=dict(self._flags),
            times=self._run.times,
            **of_others,
        )

    def _is_of_late_step(self, kind: str, seconds: float, rates: StepRates) -> bool:
        """Whether a step is too short only because the one before it was seen to end late.

        Then both together took as long as they must; and so for several, if it was very late.
        """
        beyond = seconds - rates.shortest_seconds
        if kind == "compile" or not 0 < seconds < math.inf or not math.isfinite(beyond):
            self._beyond_shortest = 0.0
            return False
        self._beyond_shortest = beyond + (self._beyond_shortest if beyond < 0 else 0.0)
        return beyond < 0 <= self._beyond_shortest

    def _kind(self, step: TimedStep) -> str:
        index = self._kinds.total()  # in this process: the loop may go back before its first step
        if step.is_compile:
            return "compile"
        return "warmup" if index < self._warmup_steps else "step"

    def _happened(self, step: TimedStep) -> Iterator[str]:
        compiled = dict.fromkeys(e.function for e in step.compile_events if e.stage == "compile")
        again = self._compiled.intersection(compiled)
        self._compiled.update(compiled)
        reported = [
            name or "a function" for name in compiled if name not in self.without_recompile_notes
        ]
        if reported and self._kinds:  # not for the first step
            what = f"{', '.join(reported)} in {readable(_compile_seconds(step))} s"
            yield (
                f"recompiled {what}; usually a shape, dtype or static argument changed"
                if again.intersection(reported)
                else f"compiled {what}"
            )

    def _clock_notes(self, jump: float, seconds: float) -> Iterator[str]:
        self._clock_jumps += 1
        if abs(jump) > max(NOTED_JUMP_SECONDS, NOTED_JUMP_FRACTION * seconds):
            yield (
                f"the wall clock jumped by {jump:+.3f} s, or the machine slept; this step's time "
                f"is the monotonic clock's"
            )

    def _rates_of(self, step: TimedStep, notes: list[str]) -> StepRates:
        """Rates for the step's own cost; for the run's cost if that is unavailable."""
        try:
            cost = step.cost or self._cost
            if callable(cost):
                cost = cost()
            if cost is not self._rates.cost:
                self._rates = StepRates(cost)
        except Exception as error:  # the cost may be a user's function
            if self._is_first("cost"):
                notes.append(f"the cost of the step is not known: {_text(error)}")
            return StepRates(self._cost)
        return self._rates

    def _count(self, step: TimedStep, kind: str, rates: StepRates) -> None:
        self._kinds[kind] += 1
        if step.spans:
            self.add_spans(step.spans)
        is_time = 0 <= step.seconds < math.inf
        seconds = step.seconds if is_time else 0.0
        if kind == "compile":
            compiling = min(seconds, _compile_seconds(step))
            self._seconds_by_use["compile"] += compiling
            seconds -= compiling
        self._seconds_by_use["train"] += seconds
        if kind == "step" and is_time:
            self._run.add(seconds, rates)
            self._window.add(seconds, rates)

    def _ends_window(self, record: StepRecord, is_last: bool) -> bool:
        """Whether the rolling window ends with this record; it shows a last step to all sinks."""
        if self._log_period == 1:
            return len(self._window) >= DEFAULT_WINDOW
        is_due = record.step % self._log_period == 0 or (is_last and not record.is_logged)
        return is_due and len(self._window) > 0

    def _fetch(
        self,
        metrics: Mapping[Any, Any],
        folder: str,
        scalars: dict[str, float],
        notes: list[str],
    ) -> None:
        """Adds the numbers in `metrics` to `scalars`; anything else is noted once in `notes`."""
        try:
            names = _full_names(folder, *metrics)
            numbers = quick_numbers(metrics.values())
            if numbers is not None and "" not in names:
                scalars.update(zip(names, numbers, strict=True))
                return
            for name, (key, value) in zip(names, metrics.items(), strict=True):
                if isinstance(value, Mapping) and name:
                    inner = folder if key in ("scalar", "scalars") else name
                    self._fetch(value, inner, scalars, notes)
                elif name:
                    self._add(name, value, scalars, notes)
        except Exception as error:  # the mapping itself may be of any library
            self._leave_out(f"{folder}/…", error, notes)

    def _add(self, name: str, value: Any, scalars: dict[str, float], notes: list[str]) -> None:
        try:
            scalars.update(numbers_of(name, value))
        except Exception as error:  # the value may come from any library
            self._leave_out(name, error, notes)

    def _leave_out(self, name: str, error: Exception, notes: list[str]) -> None:
        if self._is_first(name):
            notes.append(f"metric {name!r} is left out: {_text(error)}")

    def _memory(self) -> dict[str, float]:
        stats = self._memory_device.memory_stats() or {}
        wanted = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
        return {f"memory/{name}": stats[name] for name in wanted if name in stats}


@functools.lru_cache(maxsize=100)  # usually those of the last step
def _full_names(folder: str, *keys: Any) -> tuple[str, ...]:
    """The names of metrics in records; empty for those that are waited for but not shown.

    A name with a slash, like MaxText's, is already full; one with a leading underscore is not
    shown.
    """
    texts = (escaped(key if isinstance(key, str) else str(key)) for key in keys)
    return tuple(
        "" if text[:1] == "_" else text if "/" in text else f"{folder}/{text}" for text in texts
    )


def _compile_seconds(step: TimedStep) -> float:
    return sum(event.own_seconds for event in step.compile_events)


def _text(error: Exception) -> str:
    return escaped(str(error) or type(error).__name__)


def _device_with_memory_stats() -> Any:
    device = jax.local_devices()[0]
    return device if device.memory_stats() else None
