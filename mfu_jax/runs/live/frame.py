"""One frame of a run: headline, last steps, curves, where the time went, hosts, alarms."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import StepStatistics, Summary, fall_of
from mfu_jax.runs.live.following import MetricsTail
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.runs.report.processes import processes_of
from mfu_jax.runs.report.setup import Setup
from mfu_jax.runs.report.verdict import run_verdict
from mfu_jax.util.formatting import Paper, counted, loss_text, percent, readable
from mfu_jax.util.formatting import columns as in_columns
from mfu_jax.verdict import Verdict

_ALARM = "bold red"
_BARS = "▁▂▃▄▅▆▇█"
_LAST_STEPS = 8
_LAST_ALARMS, _MOST_USES = 5, 6
_BESIDE_CURVE, _BESIDE_STEPS = 32, 24  # columns of a curve's label and ends; lines of all else
_FALLEN = 0.7  # MFU of the last steps, relative to those before
# A run without new records for this many step times, and at least so many seconds, looks stuck.
_LATE_STEPS, _LATE_SECONDS = 20.0, 60.0
_STATES = {
    "ended": ("ended", "dim"),
    "hung": ("HANGS, last step {}", _ALARM),
    "paused": ("in a pause, last step {}", "cyan"),
    "late": ("last step {}", _ALARM),
}
"""A state that is worth a word → its words and its style."""
_COLORS = {"train": "green", "compile": "magenta", "data": "yellow", "eval": "cyan"}


def frame(follower: MetricsTail, now: float, paper: Paper, lines: int = 32) -> list[str]:
    """The terminal's content, line by line.

    Args:
        follower: the run.
        now: wall clock, in seconds since 1970.
        paper: what it is written on.
        lines: its height.
    """
    found, steps = snapshot(follower, now), list(follower.steps)
    shown = list(_headline(follower.path, found, paper))
    if steps:
        answer, _, step = _plain(found["verdict"]["sentence"]).rpartition("; next: ")
        for part in (f"{answer};", f"next: {step}"):
            wrapped = textwrap.wrap(part, paper.columns, break_on_hyphens=False)
            shown += [paper.paint(line, "bold") for line in wrapped]
        width = max(8, paper.columns - _BESIDE_CURVE)
        last = max(_LAST_STEPS, lines - _BESIDE_STEPS)
        shown += [*_table(steps[-last:], paper), *_curves(steps, width, paper)]
        shown += [*_split(found["seconds_by_use"], width, paper), *_hosts(found["hosts"], paper)]
    return [*shown, *_alarms(follower, paper)]


def sparkline(values: Sequence[float], columns: int) -> str:
    """A curve of block characters; each column is the mean of its share of the values.

    >>> sparkline([1.0, 2.0, 3.0, float("nan")], 4)
    '▁▅█ '
    >>> sparkline([5.0] * 100, 3)
    '▄▄▄'
    """
    columns = min(columns, len(values))
    shares = [
        values[i * len(values) // columns : (i + 1) * len(values) // columns]
        for i in range(columns)
    ]
    means = [_mean(share) for share in shares]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * columns
    low, high = min(known), max(known)
    return "".join(" " if mean is None else _bar(mean, low, high) for mean in means)


def time_split(steps: Iterable[StepRecord]) -> dict[str, float]:
    """Seconds by use over some steps: ``train``, ``compile``, ``data_wait``, ``eval``, ….

    >>> time_split([StepRecord(step=1, unix_seconds=0.0, scalars={
    ...     "perf/step_time_seconds": 2.0, "goodput/eval_seconds": 1.0})])
    {'train': 2.0, 'eval': 1.0}
    """
    split: Counter[str] = Counter()
    for step in steps:
        seconds = step.scalars.get(STEP_SECONDS, 0.0)
        if not 0 <= seconds < math.inf:
            continue
        compiling = min(seconds, step.scalars.get("compile/seconds", 0.0))
        split["train"] += seconds - compiling  # type: ignore[assignment]  # of seconds
        if compiling:
            split["compile"] += compiling  # type: ignore[assignment]
        for name, spent in step.scalars.items():
            if name.startswith("goodput/") and name.endswith("_seconds") and spent > 0:
                use = name.removeprefix("goodput/").removesuffix("_seconds")
                split[use] += spent  # type: ignore[assignment]
    return dict(split)


def _headline(path: Path, found: Mapping[str, Any], paper: Paper) -> Iterator[str]:
    name = paper.paint(_plain(path.parent.name or str(path)), "bold")
    if found["step"] is None:
        waiting = paper.paint(f": no step yet; waiting for {_plain(str(path))}", "dim")
        yield f"{name}{waiting}"
        return
    of, age = found["steps"], found["seconds_since_last_step"]
    words, style = _STATES.get(found["state"], ("{}", "green"))
    ago = found["state"] if age is None else words.format(f"{_age(max(0.0, age))} ago")
    line = f"{name}: step {found['step']}{f' of {of}' if of else ''}, {paper.paint(ago, style)}"
    if found["restarts"]:
        line += paper.paint(f", restarts seen: {found['restarts']}", "yellow")
    yield line
    means = found["verdict"]  # of the same numbers as in its sentence, and in a report
    parts = [f"{n.upper()} {percent(means[n])}" for n in ("mfu", "hfu") if means[n] is not None]
    if means["step_time_seconds"] is not None:
        parts.append(f"{readable(means['step_time_seconds'])} s a step")
    if found["seconds_left"]:
        parts.append(f"{_age(found['seconds_left'])} to go")
    if parts:
        yield f"mean of {counted(found['median']['steps'], 'step')}: {', '.join(parts)}"
    if chip := ", peak ".join(filter(None, (found["devices"], found["peak"]))):
        yield paper.paint(_plain(chip), "dim")
    if found["fall"]:
        yield paper.paint(found["fall"], _ALARM)


def snapshot(follower: MetricsTail, now: float) -> dict[str, Any]:
    """What the frame shows, as plain JSON values; None is what the run's files do not say.

    Args:
        follower: the run.
        now: wall clock, in seconds since 1970.
    """
    steps = list(follower.steps)
    if not steps:
        return {"run": str(follower.path), "state": "waiting", "step": None}
    measured = [step for step in steps if step.kind == "step"]
    mfu, hfu, seconds = (
        statistics.median(values) if (values := _finite(measured, name)) else None
        for name in ("perf/mfu", "perf/hfu", STEP_SECONDS)
    )
    total, (devices, peak), last = _total(follower), _chip(follower.setup), steps[-1]
    age, fall = now - last.unix_seconds, _fall(measured)
    state, left = _state(follower, steps, now), None
    if total and seconds is not None and state != "ended":
        left = max(0, total - 1 - last.step) * seconds
    # What came before the first step, such as compiling, stands in the summary alone.
    uses = (follower.seconds_by_use() if state == "ended" else {}) or time_split(steps)
    return {
        "run": str(follower.path),
        "state": state,
        "step": last.step,
        "steps": total,
        "seconds_since_last_step": None if math.isnan(age) else age,
        "seconds_left": left,
        "restarts": follower.restarts,
        "devices": devices or None,
        "peak": peak or None,
        "median": {"steps": len(measured), "mfu": mfu, "hfu": hfu, "step_time_seconds": seconds},
        "last_step": dict(last.scalars),
        "seconds_by_use": uses,
        "hosts": dict(follower.hosts),
        "fall": fall or None,
        "alarms": [
            *([{"step": last.step, "text": fall}] if fall else []),
            *({"step": number, "text": note} for number, note in follower.notes),
        ],
        "verdict": _verdict(follower, steps, uses).to_json(),
    }


def _total(follower: MetricsTail) -> int | None:
    """The steps of the whole run, if its config says."""
    text = follower.setup.config.get("steps", "")
    return int(text) if text.isdecimal() and int(text) else None


def _chip(setup: Setup) -> tuple[str, str]:
    """The devices and the peak of one; empty where the run did not log it."""
    return str(setup.values.get("devices", "")), (setup.peak or "").partition(" (")[0]


def _fall(measured: Sequence[StepRecord]) -> str:
    """What the last possible steps' MFU fell from; empty if it did not."""
    known = _finite([step for step in measured if not step.flags], "perf/mfu")
    usual, now = fall_of(known, _LAST_STEPS)
    if not now < _FALLEN * usual:
        return ""
    return f"MFU has fallen from {percent(usual)} to {percent(now)} in the last {_LAST_STEPS} steps"


def _verdict(
    follower: MetricsTail, steps: Sequence[StepRecord], uses: Mapping[str, float]
) -> Verdict:
    """The verdict on the last steps; compile and warm-up steps count in the wall clock only."""
    statistics_of = StepStatistics()
    for step in steps:
        seconds = step.scalars.get(STEP_SECONDS, 0.0)
        if step.kind == "step" and 0 < seconds < math.inf:
            statistics_of.add_many({name: [value] for name, value in step.scalars.items()})
    return run_verdict(
        str(follower.path),
        Summary(
            **statistics_of.fields(),
            last_loss=steps[-1].scalars.get("learning/loss"),
            flags=Counter(flag for step in steps for flag in step.flags),
        ),
        follower.setup,
        wall=uses,
        profile=follower.profile,
        is_of_process=True,
        steps=range(steps[-1].step + 1 if follower.has_ended else 0),
    )


def _state(follower: MetricsTail, steps: Sequence[StepRecord], now: float) -> str:
    """What log and heartbeat say, or ``late`` for a run whose last step is long ago."""
    beat = "ended" if follower.has_ended else str(follower.heartbeat().get("state") or "running")
    last = steps[-1].unix_seconds
    if beat in _STATES or math.isnan(last):
        return beat
    times = _finite(steps, STEP_SECONDS)
    limit = max(_LATE_SECONDS, _LATE_STEPS * statistics.median(times)) if times else _LATE_SECONDS
    return "late" if now - last > limit else beat


def _table(steps: Sequence[StepRecord], paper: Paper) -> Iterator[str]:
    rows = [("step", "seconds", "TFLOP/s", "tokens/s", "MFU", "HFU", "loss", "")]
    for step in steps:
        scalars = step.scalars
        rows.append(
            (
                str(step.step),
                _shown(scalars.get(STEP_SECONDS), readable),
                _shown(scalars.get("perf/per_device_tflops_per_sec"), readable),
                _shown(scalars.get("perf/per_device_tokens_per_sec"), lambda x: f"{x:.0f}"),
                _shown(scalars.get("perf/mfu"), percent),
                _shown(scalars.get("perf/hfu"), percent),
                _shown(scalars.get("learning/loss"), loss_text),
                "" if step.kind == "step" else _plain(step.kind)[:8],
            )
        )
    head, *lines = in_columns(rows, ">>>>>>><")
    yield paper.paint(head, "dim")
    yield from lines


def _curves(steps: Sequence[StepRecord], columns: int, paper: Paper) -> Iterator[str]:
    """A line for each curve that has values: MFU, step time, loss."""
    measured = [step for step in steps if step.kind == "step"]
    for label, name, text_of in (
        ("MFU", "perf/mfu", percent),
        ("seconds", STEP_SECONDS, readable),
        ("loss", "learning/loss", loss_text),
    ):
        values = [step.scalars.get(name, math.nan) for step in measured]
        known = [value for value in values if math.isfinite(value)]
        if known:
            curve = paper.paint(f"{sparkline(values, columns):<{columns}}", "green")
            ends = paper.paint(f"{text_of(min(known))} to {text_of(max(known))}", "dim")
            yield f"{label:<8}{curve} {ends}"


def _split(split: Mapping[str, float], width: int, paper: Paper) -> Iterator[str]:
    total = math.fsum(split.values())
    if total <= 0:
        return
    bar, legend = "time    ", []
    for i, (use, seconds) in enumerate(sorted(split.items(), key=lambda item: -item[1])):
        color = _COLORS.get(use.partition("_")[0], "blue")
        bar += paper.paint("█" * round(width * (seconds / total)), color)
        if i < _MOST_USES:
            legend.append(paper.paint(f"{_plain(use)} {percent(seconds / total)}", color))
    yield bar
    yield f"{'':8}{', '.join(legend)}"


def _hosts(view: Mapping[str, Any], paper: Paper) -> Iterator[str]:
    """The job's processes, if there are several, and which are slow or missing."""
    if (found := processes_of(view)) is not None:
        lines = [f"hosts   {found.summary}", *(f"  {_plain(line)}" for line in found.findings)]
        style = "yellow" if found.findings else "green"
        yield from (paper.paint(line, style) for line in lines)


def _alarms(follower: MetricsTail, paper: Paper) -> Iterator[str]:
    if follower.notes:
        yield "alarms"
    for number, note in list(follower.notes)[-_LAST_ALARMS:]:
        for line in textwrap.wrap(f"step {number}: {_plain(note)}", paper.columns - 2):
            yield f"  {paper.paint(line, 'yellow')}"


def _finite(steps: Iterable[StepRecord], name: str) -> list[float]:
    values = (step.scalars.get(name, math.nan) for step in steps)
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _bar(value: float, low: float, high: float) -> str:
    if high <= low:
        return _BARS[3]
    return _BARS[round((len(_BARS) - 1) * (value - low) / (high - low))]


def _shown(value: float | None, text_of: Any) -> str:
    return "" if value is None else text_of(value)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _plain(text: str) -> str:
    """The text on one line, without terminal control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
