"""The interface of a sink, and the registry."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mfu_jax.errors import UserError, nearest
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary


def is_permanent(error: BaseException) -> bool:
    """Whether the error lies in the record, not the environment, so that a retry cannot help.

    `RecordError` is a `ValueError`; so is `UserError`, but that concerns the output.
    """
    is_mistake = isinstance(error, ValueError | TypeError | OverflowError)
    return is_mistake and not isinstance(error, UserError)


class Sink:
    """A destination of records. All methods but the constructor run on the sink's own thread.

    A sink may raise: the logger reports that once, keeps the records, and retries later; after a
    `RecordError` it drops the record. A problem present from the start (an unwritable folder) is a
    `UserError` from the constructor. `close` may be called while another method hangs.

    Attributes:
        keeps_every_step: it also receives the steps between log periods.
        periods_per_write: it receives records only every this many ``write_period_seconds``,
            because nobody looks more often; a killed process loses that much of its output.
        warnings: what a human should know about how it was opened; logged once.
        missing: steps before this run that the output lacks; reported unless its log has them.
        write_many: a method that writes several records, or raises having written none; None: the
            logger calls `write` for each.
        place: the file or folder that it writes, or its address, if that is one.
        metrics_file: the file of the run's records, if it writes that: the run's log is beside it.
    """

    keeps_every_step = False
    periods_per_write = 1
    warnings: Sequence[str] = ()
    missing: range = range(0)
    write_many: Callable[[Sequence[StepRecord]], None] | None = None
    place: os.PathLike[str] | str | None = None
    metrics_file: os.PathLike[str] | str | None = None

    def write(self, record: StepRecord) -> None:
        """Writes one step, by default with `write_many`; if it raises, it gets it again later."""
        if self.write_many is None:
            raise NotImplementedError
        self.write_many([record])

    def write_text(self, tag: str, text: str) -> None:
        """Writes a text, such as the ledger, under a tag such as ``setup/ledger``."""

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Writes the set-up, known before the first step; by default as texts."""
        if values:
            self.write_text("setup/values", format_values(values))
        for tag, text in texts.items():
            self.write_text(f"setup/{tag}", text)

    def write_summary(self, summary: Summary) -> None:
        """Writes the totals of the whole run, after the last step; by default as a text."""
        self.write_text("summary", summary.render())

    def write_alarm(self, text: str) -> None:
        """Called at once when somebody should look, as at a hang; by default nothing."""

    def write_failure(self, reason: str) -> None:
        """Called before `close` if the loop ended with an exception; `reason` is its text."""

    def flush(self) -> None:
        """Flushes everything so far to disk, where a crash of this process cannot lose it."""

    def close(self) -> None:
        """Writes what remains and releases files and terminals."""


_SinkType = TypeVar("_SinkType", bound=type[Sink])
SINKS: dict[str, type[Sink]] = {}
"""The classes registered so far: ours from when they are first asked for, and users'."""
OURS = {
    name: f"mfu_jax.logger.sinks.{module}"
    for module, names in {
        "console": ("console",),
        "csv": ("csv",),
        "jsonl": ("jsonl",),
        "services": ("wandb", "mlflow", "prometheus"),
        "tensorboard": ("tensorboard",),
        "webhook": ("webhook",),
    }.items()
    for name in names
}
"""Name of each sink of this package → its module, imported when the sink is asked for."""


def register_sink(name: str) -> Callable[[_SinkType], _SinkType]:
    """Class decorator that registers a sink for `make_sink(name, …)`."""

    def register(sink: _SinkType) -> _SinkType:
        SINKS[name] = sink
        return sink

    return register


def find_sink(name: str) -> type[Sink] | None:
    """The class registered under `name`; None if there is none."""
    if name not in SINKS and name in OURS:
        importlib.import_module(OURS[name])
    return SINKS.get(name)


def make_sink(name: str, *args: Any, **options: Any) -> Sink:
    """Makes the sink registered under `name` with its constructor's arguments.

    Raises:
        UserError: no such sink.
    """
    sink = find_sink(name)
    if sink is None:
        known = sorted({*SINKS, *OURS})
        raise UserError(
            f"unknown sink {name!r}; the sinks are {', '.join(known)}; more can be added with "
            "mfu_jax.sinks.register_sink",
            hint=nearest(name, known),
        )
    return sink(*args, **options)


def format_values(values: Mapping[str, Any]) -> str:
    """One ``key: value`` per line."""
    return "\n".join(f"{key}: {value}" for key, value in values.items())
