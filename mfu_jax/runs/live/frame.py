"""One frame of a run: headline, last steps, curves, where the time went, hosts, alarms."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import StepStatistics, Summary, fall_of
from mfu_jax.runs.live.following import MetricsTail
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.runs.report.processes import processes_of
from mfu_jax.runs.report.setup import Setup
from mfu_jax.runs.report.verdict import run_verdict
from mfu_jax.util.formatting import counted, loss_text, percent, readable
from mfu_jax.util.optional_deps import TRAIN, require
from mfu_jax.verdict import Verdict

_BARS = "▁▂▃▄▅▆▇█"
_LAST_STEPS = 8
_LAST_ALARMS, _MOST_USES = 5, 6
_BESIDE_CURVE, _BESIDE_STEPS = 32, 24  # columns of a curve's label and ends; lines of all else
_FALLEN = 0.7  # MFU of the last steps, relative to those before
# A run without new records for this many step times, and at least so many seconds, looks stuck.
_LATE_STEPS, _LATE_SECONDS = 20.0, 60.0
_STATES = {
    "ended": ("ended", "dim"),
    "hung": ("HANGS, last step {}", "bold red"),
    "paused": ("in a pause, last step {}", "cyan"),
    "late": ("last step {}", "bold red"),
}
"""A state that is worth a word → its words and its style."""
_COLORS = {"train": "green", "compile": "magenta", "data": "yellow", "eval": "cyan"}


def frame(follower: MetricsTail, now: float, columns: int = 80, lines: int = 32) -> Any:
    """The terminal's content, as a renderable of `rich`.

    Args:
        follower: the run.
        now: wall clock, in seconds since 1970.
        columns: width of the terminal.
        lines: its height.

    Raises:
        UserError: `rich` is not installed.
    """
    found, steps = snapshot(follower, now), list(follower.steps)
    parts = [_headline(follower.path, found)]
    if steps:
        answer, _, step = _plain(found["verdict"]["sentence"]).rpartition("; next: ")
        parts += [_rich("text").Text(f"{answer};\nnext: {step}", style="bold")]
        width = max(8, columns - _BESIDE_CURVE)
        last = max(_LAST_STEPS, lines - _BESIDE_STEPS)
        split = found["seconds_by_use"]
        parts += [_table(steps[-last:]), *_curves(steps, width), *_split(split, width)]
        parts += [_hosts(found["hosts"])]
    parts += [_alarms(follower)]
    return _rich("console").Group(*filter(None, parts))


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


def _headline(path: Path, found: Mapping[str, Any]) -> Any:
    text = _rich("text").Text()
    text.append(_plain(path.parent.name or str(path)), style="bold")
    if found["step"] is None:
        text.append(f": no step yet; waiting for {_plain(str(path))}", style="dim")
        return text
    of, age = found["steps"], found["seconds_since_last_step"]
    text.append(f": step {found['step']}{f' of {of}' if of else ''}, ")
    words, style = _STATES.get(found["state"], ("{}", "green"))
    ago = found["state"] if age is None else words.format(f"{_age(max(0.0, age))} ago")
    text.append(ago, style=style)
    if found["restarts"]:
        text.append(f", restarts seen: {found['restarts']}", style="yellow")
    means = found["verdict"]  # of the same numbers as in its sentence, and in a report
    parts = [f"{n.upper()} {percent(means[n])}" for n in ("mfu", "hfu") if means[n] is not None]
    if means["step_time_seconds"] is not None:
        parts.append(f"{readable(means['step_time_seconds'])} s a step")
    if found["seconds_left"]:
        parts.append(f"{_age(found['seconds_left'])} to go")
    if parts:
        text.append(f"\nmean of {counted(found['median']['steps'], 'step')}: {', '.join(parts)}")
    if chip := ", peak ".join(filter(None, (found["devices"], found["peak"]))):
        text.append(f"\n{_plain(chip)}", style="dim")
    if found["fall"]:
        text.append(f"\n{found['fall']}", style="bold red")
    return text


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
    state, left = _state(follower.heartbeat(), steps, now), None
    if total and seconds is not None and state != "ended":
        left = max(0, total - 1 - last.step) * seconds
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
        "seconds_by_use": time_split(steps),
        "hosts": dict(follower.hosts),
        "fall": fall or None,
        "alarms": [
            *([{"step": last.step, "text": fall}] if fall else []),
            *({"step": number, "text": note} for number, note in follower.notes),
        ],
        "verdict": _verdict(follower, steps).to_json(),
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


def _verdict(follower: MetricsTail, steps: Sequence[StepRecord]) -> Verdict:
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
        wall=time_split(steps),
        profile=follower.profile,
    )


def _state(heartbeat: Mapping[str, Any], steps: Sequence[StepRecord], now: float) -> str:
    """What the heartbeat says, or ``late`` for a run whose last step is long ago."""
    beat = str(heartbeat.get("state") or "running")
    last = steps[-1].unix_seconds
    if beat in _STATES or math.isnan(last):
        return beat
    times = _finite(steps, STEP_SECONDS)
    limit = max(_LATE_SECONDS, _LATE_STEPS * statistics.median(times)) if times else _LATE_SECONDS
    return "late" if now - last > limit else beat


def _table(steps: Sequence[StepRecord]) -> Any:
    table = _rich("table").Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    columns = ("step", "seconds", "TFLOP/s", "tokens/s", "MFU", "HFU", "loss", "")
    for name in columns:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for step in steps:
        scalars = step.scalars
        table.add_row(
            str(step.step),
            _shown(scalars.get(STEP_SECONDS), readable),
            _shown(scalars.get("perf/per_device_tflops_per_sec"), readable),
            _shown(scalars.get("perf/per_device_tokens_per_sec"), lambda x: f"{x:.0f}"),
            _shown(scalars.get("perf/mfu"), percent),
            _shown(scalars.get("perf/hfu"), percent),
            _shown(scalars.get("learning/loss"), loss_text),
            "" if step.kind == "step" else _plain(step.kind)[:8],
        )
    return table


def _curves(steps: Sequence[StepRecord], columns: int) -> list[Any]:
    """A line for each curve that has values: MFU, step time, loss."""
    measured = [step for step in steps if step.kind == "step"]
    lines = []
    for label, name, text_of in (
        ("MFU", "perf/mfu", percent),
        ("seconds", STEP_SECONDS, readable),
        ("loss", "learning/loss", loss_text),
    ):
        values = [step.scalars.get(name, math.nan) for step in measured]
        known = [value for value in values if math.isfinite(value)]
        if known:
            line = _rich("text").Text(f"{label:<8}")
            line.append(f"{sparkline(values, columns):<{columns}}", style="green")
            line.append(f" {text_of(min(known))} to {text_of(max(known))}", style="dim")
            lines.append(line)
    return lines


def _split(split: Mapping[str, float], width: int) -> list[Any]:
    total = math.fsum(split.values())
    if total <= 0:
        return []
    bar, legend = _rich("text").Text("time    "), _rich("text").Text("        ")
    for i, (use, seconds) in enumerate(sorted(split.items(), key=lambda item: -item[1])):
        color = _COLORS.get(use.partition("_")[0], "blue")
        bar.append("█" * round(width * seconds / total), style=color)
        if i < _MOST_USES:
            legend.append(", " if i else "")
            legend.append(f"{_plain(use)} {percent(seconds / total)}", style=color)
    return [bar, legend]


def _hosts(view: Mapping[str, Any]) -> Any:
    """The job's processes, if there are several, and which are slow or missing."""
    found = processes_of(view)
    if found is None:
        return None
    style = "yellow" if found.findings else "green"
    lines = [f"hosts   {found.summary}", *(f"  {_plain(line)}" for line in found.findings)]
    return _rich("text").Text("\n".join(lines), style=style)


def _alarms(follower: MetricsTail) -> Any:
    if not follower.notes:
        return None
    parts = [_rich("text").Text("alarms")]
    for number, note in list(follower.notes)[-_LAST_ALARMS:]:
        text = _rich("text").Text(f"step {number}: ", style="dim")
        parts.append(_rich("padding").Padding(text.append(_plain(note), "yellow"), (0, 0, 0, 2)))
    return _rich("console").Group(*parts)


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


def _rich(module: str) -> Any:
    return require(f"rich.{module}", "mfu-jax watch", install=TRAIN)
