"""The interface of a sink, the registry, and metric names as a backend allows them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mfu_jax.errors import UserError, nearest
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary
from mfu_jax.util.failsafe import Once

_log = logging.getLogger("mfu_jax")
# A loop that invents new names every step must not fill the memory.
_MOST_NAMES = 10_000
_TOO_MANY = (
    "%s: more than %d names of metrics; expected the same ones in every step; usually the step is "
    "part of a name; new ones that differ only in what it does not take are written as one"
)


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
        missing: steps before this run that the output lacks; reported unless its log has them.
        write_many: a method that writes several records, or raises having written none; None: the
            logger calls `write` for each.
        place: the file or folder that it writes, or its address, if that is one.
        metrics_file: the file of the run's records, if it writes that: the run's log is beside it.
    """

    keeps_every_step = False
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
    **{name: name for name in ("console", "csv", "jsonl", "tensorboard", "webhook")},
    **dict.fromkeys(("wandb", "mlflow", "prometheus"), "services"),
}
"""Name of each sink of this package → its file here, imported when the sink is asked for."""


def register_sink(name: str) -> Callable[[_SinkType], _SinkType]:
    """Class decorator that registers a sink for `make_sink(name, …)`."""

    def register(sink: _SinkType) -> _SinkType:
        SINKS[name] = sink
        return sink

    return register


def find_sink(name: str) -> type[Sink] | None:
    """The class registered under `name`; None if there is none."""
    if name not in SINKS and name in OURS:
        importlib.import_module(f"mfu_jax.logger.sinks.{OURS[name]}")
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


@dataclasses.dataclass(eq=False)
class UniqueNames:
    """Maps metric names to names that a backend accepts, no two to the same one.

    If another name was already mapped to the same text, a number is added, which is logged once.
    Names beyond the first 10,000 are not remembered: they stay distinct from those, but not from
    each other.

    Args:
        backend: its name, for the log.
        allowed: maps a name to the nearest one that it accepts, ignoring length.
        longest: maximum number of characters that it accepts.
        reserved: names that the backend uses itself.
        is_tree: names are file paths: ``a`` and ``a/b`` cannot both exist.

    >>> names = UniqueNames("Prometheus", lambda name: name.replace("-", "_"))
    >>> names["top_1"], names["top-1"], names["top-1"]
    ('top_1', 'top_1_2', 'top_1_2')
    """

    backend: str
    allowed: Callable[[str], str] = str
    _: dataclasses.KW_ONLY
    longest: int = 250
    reserved: Iterable[str] = ()
    is_tree: bool = False

    def __post_init__(self) -> None:
        self._taken = set(self.reserved)
        self._folders: set[str] = set()
        self._mapped: dict[str, str] = {}
        self._is_first = Once()

    def __getitem__(self, name: str) -> str:
        found = self._mapped.get(name)
        return self._add(name) if found is None else found

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The backend's names of a record's metrics."""
        return tuple(self[name] for name in names)

    def _add(self, name: str) -> str:
        allowed = self.allowed(name)[: self.longest] or "_"
        if not self._taken.isdisjoint(self._folders_of(allowed)):
            allowed = allowed.replace("/", "_")  # a number at its end would not help
        endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
        names = (allowed[: self.longest - len(ending)] + ending for ending in endings)
        found = next(filter(self._is_free, names))
        if len(self._mapped) >= _MOST_NAMES:
            if self._is_first():
                _log.warning(_TOO_MANY, self.backend, _MOST_NAMES)
            return found
        if found != allowed:
            _log.warning(
                "%s: metric %r is written as %r, because %r is another one's name there",
                self.backend,
                name,
                found,
                allowed,
            )
        self._taken.add(found)
        self._folders.update(self._folders_of(found))
        self._mapped[name] = found
        return found

    def _is_free(self, name: str) -> bool:
        return name not in self._taken and name not in self._folders

    def _folders_of(self, name: str) -> list[str]:
        """``a`` and ``a/b`` for ``a/b/c``."""
        parts = name.split("/") if self.is_tree else []
        return ["/".join(parts[:end]) for end in range(1, len(parts))]
