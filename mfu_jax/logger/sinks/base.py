"""The interface of a sink, what it is given, and the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mfu_jax.errors import UserError, nearest
from mfu_jax.logger.summary import Summary


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Everything that is known about one step, on the host.

    Attributes:
        step: its number.
        kind: ``step``, or ``compile`` and ``warmup`` for those kept out of every summary.
        unix_seconds: wall clock at its end.
        scalars: metric name -> number; NaN and Inf are as they came.
        flags: short names of what is impossible about it (`mfu_jax.logger.diagnosis`).
        notes: sentences for a human: a diagnosis, a recompile, a clock jump.
        is_logged: it falls on the log period, or must be seen; others go to the sinks that
            keep every step.
    """

    step: int
    kind: str = "step"
    unix_seconds: float
    scalars: Mapping[str, float]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_logged: bool = True


class Sink:
    """Where records go. All methods but the constructor run on the logger's writer thread.

    A sink may raise: the logger says so once, keeps the records, and tries again later. What is
    wrong from the start (an unwritable folder) is a `UserError` of the constructor.

    Attributes:
        keeps_every_step: it is given the steps between two log periods, too.
        warnings: what a human should know about how it was opened; logged once.
    """

    keeps_every_step = False
    warnings: Sequence[str] = ()

    def write(self, record: StepRecord) -> None:
        """Takes one step. Raises whatever went wrong; the same record then comes again."""
        raise NotImplementedError

    def write_text(self, tag: str, text: str) -> None:
        """Takes a text, such as the ledger, under a tag such as ``setup/ledger``."""

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Takes what is known before the first step; by default as texts."""
        if values:
            self.write_text("setup/values", format_values(values))
        for tag, text in texts.items():
            self.write_text(f"setup/{tag}", text)

    def write_summary(self, summary: Summary) -> None:
        """Takes the totals of the whole run, after the last step; by default as a text."""
        self.write_text("summary", summary.render())

    def flush(self) -> None:
        """Brings what was written to where a crash of this process cannot lose it."""

    def close(self) -> None:
        """Writes the rest and lets go of files and terminals."""


_SinkType = TypeVar("_SinkType", bound=type[Sink])
SINKS: dict[str, type[Sink]] = {}


def register_sink(name: str) -> Callable[[_SinkType], _SinkType]:
    """Class decorator: the sink can be made by `make_sink(name, …)`."""

    def register(sink: _SinkType) -> _SinkType:
        SINKS[name] = sink
        return sink

    return register


def make_sink(name: str, *args: Any, **options: Any) -> Sink:
    """Makes the sink registered under `name` with its constructor's arguments.

    Raises:
        UserError: no such sink.
    """
    if name not in SINKS:
        raise UserError(
            f"unknown sink {name!r}{nearest(name, SINKS)}; the sinks are "
            f"{', '.join(sorted(SINKS))}; more can be added with mfu_jax.logger.sinks.register_sink"
        )
    return SINKS[name](*args, **options)


def format_values(values: Mapping[str, Any]) -> str:
    """One ``key: value`` a line."""
    return "\n".join(f"{key}: {value}" for key, value in values.items())
