"""A line per step: a short one for people, MaxText's for parsers; and an optional progress bar."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from mfu_jax.errors import UserError, nearest
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import Sink, register_sink
from mfu_jax.util.formatting import Paper, counted, loss_text, percent, readable
from mfu_jax.util.optional_deps import TRAIN, require

LINES = ("auto", "maxtext", "short")


@register_sink("console")
class ConsoleSink(Sink):
    """Prints one line per step to standard output.

    Args:
        stream: where lines go; standard output by default.
        total_steps: number of steps of the run, for the progress bar.
        progress: show a bar on standard error, in a terminal in place of the lines of ordinary
            steps; None: if that is a terminal and `rich` is installed. Off by default, because a
            loop may print or have a bar of its own.
        line: ``maxtext``: MaxText's line with MFU and HFU at its end; ``short``: at most 100
            columns, MFU third; ``auto``: short in a terminal, else MaxText's.

    Raises:
        UserError: ``progress=True`` without `rich`; or an unknown `line`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        total_steps: int | None = None,
        progress: bool | None = False,
        line: str = "auto",
    ) -> None:
        if line not in LINES:
            raise UserError(
                f"console_line={line!r}; expected {', '.join(LINES)}",
                hint=nearest(line, LINES),
            )
        paper = self._paper = Paper.of(stream or sys.stdout)
        self._stream = stream
        self._bar = _progress_bar(total_steps, progress)
        on_terminal = getattr(sys.stderr, "isatty", bool)()  # nobody sees a bar in a file
        self._visible_bar = self._bar if paper.is_terminal and on_terminal else None
        self._is_short = line == "short" or (line == "auto" and paper.is_terminal)
        self._wrap = paper.wrap if self._is_short else str

    def write_many(self, records: Sequence[StepRecord]) -> None:
        if self._bar is not None:
            self._bar.update(records[-1])
        if self._visible_bar is not None:
            records = [record for record in records if _is_news(record)]
        if lines := [line for record in records for line in self._lines(record)]:
            self._print("\n".join(lines))

    def write_text(self, tag: str, text: str) -> None:
        self._print("\n".join(map(self._wrap, text.splitlines())))

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        # All of the config is in the run's log.
        super().write_setup(values, {tag: t for tag, t in texts.items() if tag != "config"})

    def write_summary(self, summary: Summary) -> None:
        self._print(summary.render(self._paper.columns))

    def flush(self) -> None:
        (self._stream or sys.stdout).flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self.flush()

    def _lines(self, record: StepRecord) -> Iterator[str]:
        yield format_short(record, self._paper) if self._is_short else format_step(record)
        if self._is_short and (evals := _spans_and_evals(*record.scalars)[1]):
            results = ", ".join(f"{name[5:]} {record.scalars[name]:.4g}" for name in evals)
            yield self._wrap(f"  eval: {results.replace('total_weights', 'target tokens')}")
        if "rolling/steps" in record.scalars:
            yield self._wrap(format_window(record.scalars))
        for note in record.notes:
            yield self._wrap(f"note, step {record.step}: {note}")

    def _print(self, text: str) -> None:
        if self._visible_bar is not None and self._stream is None and sys.stdout.isatty():
            self._visible_bar.print_above(text)
            return
        stream = self._stream or sys.stdout
        stream.write(f"{_encodable(text, stream)}\n")
        stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """Replaces unencodable characters: without Unicode, a terminal shows ? instead of ×."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


_PLAIN = Paper()


def _is_news(record: StepRecord) -> bool:
    """Whether its line is worth more than the progress bar's next state."""
    has_results = any(name.startswith(("eval/", "rolling/")) for name in record.scalars)
    return bool(record.kind != "step" or record.notes or record.flags or has_results)


def format_short(record: StepRecord, paper: Paper = _PLAIN) -> str:
    """The line of one step for people; what does not fit is left out, flags never.

    >>> format_short(StepRecord(step=7, unix_seconds=0.0, kind="warmup", scalars={
    ...     "perf/step_time_seconds": 0.123, "perf/per_device_tflops_per_sec": 0.021,
    ...     "perf/per_device_tokens_per_sec": 8123.4, "learning/loss": 4.211,
    ...     "perf/mfu": 0.412, "perf/hfu": 0.549}))
    'step     7     0.123 s  MFU  41.2%  loss 4.211  HFU  54.9%  8,123 tokens/s/device  [warmup]'
    """
    scalars = record.scalars
    seconds = scalars.get("perf/step_time_seconds")
    mfu = f"MFU {percent(scalars.get('perf/mfu')):>6}"
    text = f"step {record.step:>5}  {'n/a' if seconds is None else readable(seconds):>8} s  {mfu}"
    labels = [f"[{record.kind}]"] if record.kind != "step" else []
    labels += [f"[! {flag}]" for flag in record.flags]
    room = paper.columns - sum(len(label) + 2 for label in labels)
    for part in _optional(scalars):
        if len(text) + 2 + len(part) <= room:
            text += f"  {part}"
    if record.kind != "step":
        return paper.paint("  ".join([text, *labels]), "dim")
    text = text.replace(mfu, paper.paint(mfu, "bold"))
    return "  ".join([text, *(paper.paint(label, "red") for label in labels)])


def _optional(scalars: Mapping[str, float]) -> Iterator[str]:
    """Numbers of a short line, the most important first."""
    if "learning/loss" in scalars:
        yield f"loss {loss_text(scalars['learning/loss'])}"
    if "perf/hfu" in scalars:
        yield f"HFU {percent(scalars['perf/hfu']):>6}"
    for name in _spans_and_evals(*scalars)[0]:
        if scalars[name] >= 0.001:
            label = name.removeprefix("goodput/").removesuffix("_seconds")
            yield f"{label} {readable(scalars[name])} s"
    if "perf/per_device_tokens_per_sec" in scalars:
        yield f"{scalars['perf/per_device_tokens_per_sec']:,.0f} tokens/s/device"
    if "perf/per_device_tflops_per_sec" in scalars:
        yield f"{readable(scalars['perf/per_device_tflops_per_sec'])} TFLOP/s/device"


def _progress_bar(total_steps: int | None, wanted: bool | None) -> _ProgressBar | None:
    if wanted is None and sys.stderr.isatty():
        with contextlib.suppress(UserError):  # without rich: lines only
            return _ProgressBar(total_steps)
    return _ProgressBar(total_steps) if wanted else None


class _ProgressBar:
    """A `rich` bar on standard error, redrawn by updates, so it needs no thread.

    `sys.stdout` and `sys.stderr` are not redirected: rich would parse the user's text as markup,
    wrap it, and take 0.4 ms per print.
    """

    def __init__(self, total_steps: int | None) -> None:
        progress = require("rich.progress", "the progress bar", install=TRAIN)
        console = require("rich.console", "the progress bar", install=TRAIN)
        self._console = console.Console(stderr=True)
        self._progress = progress.Progress(
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._total = "" if total_steps is None else f"/{total_steps}"
        self._task = self._progress.add_task("compiling…", total=total_steps)
        self._drawn_at = 0.0
        self._progress.start()

    def update(self, record: StepRecord) -> None:
        scalars = record.scalars
        parts = [f"{record.step + 1}{self._total}"]
        if "perf/step_time_seconds" in scalars:
            parts.append(f"{readable(scalars['perf/step_time_seconds'])} s")
        parts.append(f"MFU {percent(scalars.get('perf/mfu'))}")
        if "learning/loss" in scalars:
            parts.append(f"loss {loss_text(scalars['learning/loss'])}")
        self._progress.update(self._task, completed=record.step + 1, description=" · ".join(parts))
        if time.monotonic() - self._drawn_at > 0.2:  # nobody reads faster
            self._drawn_at = time.monotonic()
            self._progress.refresh()

    def print_above(self, text: str) -> None:
        """Prints our own lines as they are; the bar moves down."""
        self._console.out(_encodable(text, self._console.file), highlight=False)

    def close(self) -> None:
        self._progress.stop()


def format_window(scalars: Mapping[str, float]) -> str:
    """The line of a full rolling window."""
    seconds = ", ".join(
        f"{name} {readable(scalars[f'rolling/step_time_seconds_{name}'])} s"
        for name in ("median", "p90", "p99")
    )
    rate = scalars.get("rolling/per_device_tflops_per_sec")
    return (
        f"last {counted(int(scalars['rolling/steps']), 'measured step')}: {seconds}; means: "
        f"TFLOP/s/device: {'n/a' if rate is None else readable(rate)}, "
        f"MFU: {percent(scalars.get('rolling/mfu'))}, HFU: {percent(scalars.get('rolling/hfu'))}"
    )


_NUMBERS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", "perf/step_time_seconds", readable),
    ("TFLOP/s/device", "perf/per_device_tflops_per_sec", readable),
    ("Tokens/s/device", "perf/per_device_tokens_per_sec", "{:.1f}".format),
    ("total_weights", "learning/total_weights", "{:.0f}".format),
    ("loss", "learning/loss", loss_text),
)
"""Label of each number at the start of a line, its metric, and how it is written."""


@functools.lru_cache(maxsize=32)  # usually the names of the last step
def _spans_and_evals(*names: str) -> tuple[list[str], list[str]]:
    """From a record's scalars: times outside the step, and the results of an eval."""
    spans = [name for name in names if name.startswith("goodput/") and name.endswith("_seconds")]
    return spans, [name for name in names if name.startswith("eval/")]


def format_step(record: StepRecord) -> str:
    """The line of one step.

    >>> format_step(StepRecord(step=7, unix_seconds=0.0, scalars={
    ...     "perf/step_time_seconds": 0.123, "perf/per_device_tflops_per_sec": 0.021,
    ...     "perf/per_device_tokens_per_sec": 8123.4, "learning/total_weights": 2048.0,
    ...     "learning/loss": 4.211, "perf/mfu": 0.412, "perf/hfu": 0.549}))[:75]
    'completed step: 7, seconds: 0.123, TFLOP/s/device: 0.0210, Tokens/s/device:'
    """
    scalars = record.scalars
    parts = [f"completed step: {record.step}"]
    for label, name, text in _NUMBERS:
        if name in scalars:
            parts.append(f"{label}: {text(scalars[name])}")
    parts.append(f"MFU: {percent(scalars.get('perf/mfu'))}")
    parts.append(f"HFU: {percent(scalars.get('perf/hfu'))}")
    spans, evals = _spans_and_evals(*scalars)
    parts += [
        f"{name.removeprefix('goodput/')}: {readable(scalars[name])}"
        for name in spans
        if scalars[name] >= 0.001
    ]
    parts += [f"{name}: {scalars[name]:.4g}" for name in evals]
    if record.kind != "step":
        parts.append(f"[{record.kind}]")
    parts += [f"[! {flag}]" for flag in record.flags]
    return ", ".join(parts)
