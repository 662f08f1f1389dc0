"""The parts from which a `MetricLogger` is made, and what it returns if it fails."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from mfu_jax.errors import UserError, nearest
from mfu_jax.logger.config import FSYNC_SECONDS, IN_RUN_DIR, LoggerConfig, check_text
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.run_log.events import ALARM, HOSTS
from mfu_jax.logger.run_log.monitor import Monitor
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink, make_sink
from mfu_jax.storage.addresses import path_of
from mfu_jax.util.failsafe import Boundary

if TYPE_CHECKING:
    from mfu_jax.logger.watchdog import Watchdog

_log = logging.getLogger("mfu_jax")
_FILES = {"metrics_file": "jsonl", "tensorboard_dir": "tensorboard"}
"""Settings of files → the kinds of their sinks."""


def with_fields(
    cost: StepCost | None, config: LoggerConfig | None, fields: Mapping[str, Any]
) -> tuple[StepCost, LoggerConfig]:
    """`cost` and `config` with the fields given by keyword replaced."""
    given: list[Any] = [cost or StepCost(model_flops_per_device=None), config or LoggerConfig()]
    names = [[field.name for field in dataclasses.fields(value)] for value in given]
    known = [*names[0], *names[1]]
    if unknown := [name for name in fields if name not in known]:
        raise UserError(
            f"MetricLogger has no argument {unknown[0]!r}; expected cost, config, sinks, run_dir, "
            "or a field of StepCost or LoggerConfig",
            hint=f"{nearest(unknown[0], known)}usually a misspelling, or a setting of "
            "instrument(): a = instrument(f, run_dir=…) has a logger to share, b = "
            "instrument(g, logger=a.logger), and sinks=[make_sink('console'), "
            "make_sink('jsonl', path)] writes a file; see help(mfu_jax.MetricLogger)",
        )
    new_cost, new_config = (
        dataclasses.replace(value, **{name: fields[name] for name in own if name in fields})
        for value, own in zip(given, names, strict=True)
    )
    return new_cost, new_config


def sinks_of_process(
    sinks: Sequence[Sink] | None, config: LoggerConfig, places: Mapping[str, str]
) -> Sequence[Sink]:
    """The given sinks, or a console and `places`, in the process that writes; none in others."""
    if jax.process_index() != 0:
        return []
    if sinks is None:
        return [make_sink("console"), *file_sinks(places, config.start_step)]
    warn_of_unwritten(places, checked_sinks(sinks))
    return sinks


def run_places(run_dir: Any) -> dict[str, str]:
    """What a logger writes in a run's folder: setting → place; nothing without a folder.

    Raises:
        UserError: the folder is not text.
    """
    check_text("run_dir", run_dir)
    if not isinstance(run_dir, str | os.PathLike):
        raise UserError(
            f"run_dir={run_dir!r}: expected text", hint="usually another object; pass its path"
        )
    folder = os.fspath(run_dir)
    return {name: f"{folder}/{IN_RUN_DIR[name]}" for name in _FILES if folder}


def file_sinks(
    places: Mapping[str, Any], start_step: int, fsync_seconds: float = FSYNC_SECONDS
) -> list[Sink]:
    """The sinks that write `places`, setting → path; an empty path has none."""
    options = {"resume_from_step": start_step, "fsync_seconds": fsync_seconds}
    return [make_sink(kind, places[k], **options) for k, kind in _FILES.items() if places.get(k)]


def warn_of_unwritten(outputs: Mapping[str, str], sinks: Sequence[Sink]) -> None:
    """Says which outputs, setting → place, are not written, because sinks are given."""
    places = (getattr(sink, "place", None) for sink in sinks)  # a user's may be any object
    written = {_absolute(place) for place in places if isinstance(place, str | os.PathLike)}
    names = [name for name, path in outputs.items() if path and _absolute(path) not in written]
    if names:
        _log.warning(
            "%s: not written, because sinks=… names all sinks\n"
            "hint: add make_sink(…) of each to them",
            ", ".join(
                n if n == "webhook_url" else f"{n}={outputs[n]!r}" for n in names
            ),  # a secret
        )


def _absolute(path: str | os.PathLike[str]) -> str:
    found = path_of(path)
    return str(found.absolute() if isinstance(found, Path) else found).rstrip("/")


def checked_sinks(sinks: Sequence[Sink]) -> Sequence[Sink]:
    """Returns the sinks if they are valid.

    Raises:
        UserError: they are not a list or tuple, or one of them is no sink, or half of one.
    """
    if isinstance(sinks, list | tuple):
        wrong = [sink for sink in sinks if not callable(getattr(sink, "write", None))]
        if not wrong:
            for sink in sinks:
                _check_complete(sink)
            return sinks
    raise UserError(
        f"sinks={sinks!r}: expected a list of sinks",
        hint="usually a name, or a single sink without brackets; pass "
        "sinks=[make_sink('console')], or [] for none",
    )


def _check_complete(sink: Sink) -> None:
    """Refuses an object that only looks like a sink: no step would be logged."""
    lacks = [name for name in vars(Sink) if name[0] != "_" and not hasattr(sink, name)]
    if lacks:
        raise UserError(
            f"the sink {type(sink).__name__} lacks {', '.join(lacks)}; expected a class derived "
            "from mfu_jax.sinks.Sink, which has them"
        )
    if sink.write_many is None and getattr(sink.write, "__func__", None) is Sink.write:
        raise UserError(
            f"the sink {type(sink).__name__} writes nothing; expected a method write(record), or "
            "write_many(records)"
        )


def metrics_file_of(sinks: Sequence[Sink]) -> Any:
    """The metrics file that one of the sinks writes; None if none does."""
    return next(filter(None, (getattr(sink, "metrics_file", None) for sink in sinks)), None)


def open_run_log(metrics_file: Any, **options: Any) -> RunLog:
    """The log of this process beside a metrics file, if there is one; see `RunLog`."""
    index, processes = jax.process_index(), jax.process_count()
    return RunLog(metrics_file or "", index=index, processes=processes, **options)


def monitors_of(
    config: LoggerConfig, boundary: Boundary, monotonic: Callable[[], float], log: RunLog
) -> tuple[list[Monitor], Watchdog]:
    """The monitors that are on, in the order in which they see a record, and the last of them."""
    from mfu_jax.logger.health.hardware import HardwareWatch
    from mfu_jax.logger.health.outliers import DriftWatch, LossSpikeWatch, OutlierWatch
    from mfu_jax.logger.watchdog import Watchdog

    if jax.process_index() != 0:  # only the process that writes metrics has a heartbeat
        config = dataclasses.replace(config, heartbeat_file="")
    watchdog = Watchdog(config, boundary, monotonic=monotonic)
    if isinstance(log.metrics_file, Path):
        watchdog.folder = log.metrics_file.parent
    watchdog.tell = lambda step, text: log.event(ALARM, step=step, text=text)
    monitors: list[Monitor] = [LossSpikeWatch(), OutlierWatch(), DriftWatch()]
    if config.gpu_period_seconds > 0:
        monitors.append(HardwareWatch(config.gpu_period_seconds, boundary))
    if config.host_log_period:
        from mfu_jax.logger.hosts.monitor import HostMonitor

        hosts = HostMonitor(
            config.host_log_period, boundary, lambda found: log.event(HOSTS, **found)
        )
        watchdog.who_is_silent = hosts.who_is_silent
        monitors.append(hosts)
    return [*monitors, watchdog], watchdog


def refused_metrics(metrics: object) -> UserError:
    """The error for metrics that a logger cannot accept."""
    return UserError(
        f"record() was given {type(metrics).__name__} as metrics; expected a mapping from "
        "names to scalars",
        hint="usually the bare loss was passed; pass {'loss': loss}",
    )
