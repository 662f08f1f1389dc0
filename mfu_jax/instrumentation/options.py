"""The options of `instrument`, resolved into settings and checked against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.instrumentation.counts import analytic_model
from mfu_jax.instrumentation.outputs import Select
from mfu_jax.instrumentation.packed_documents import PackedDocuments
from mfu_jax.logger.assembly import checked_sinks, warn_of_unwritten
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.settings import TRACED_CONVENTIONS, Settings

_OUTPUTS = ("metrics_file", "tensorboard_dir", "prometheus_textfile", "webhook_url")
_SHARED = ("convention", "hardware", "peak_tflops_per_device")
# Settings that belong to a logger and its loop, so they cannot be combined with a given logger.
OF_LOGGER = (
    "run_dir",
    *_OUTPUTS,
    "console_line",
    "fsync_seconds",
    *(field.name for field in dataclasses.fields(LoggerConfig)),
    "profile_steps",
)


class StepOptions(NamedTuple):
    """What the user chose; see `mfu_jax.instrument`."""

    settings: Settings
    config: Any = None
    metrics: Select | None = None
    documents: PackedDocuments | None = None
    sinks: Sequence[Sink] | None = None
    trip_counts: Mapping[str, int] | None = None
    lengths: Lengths = NO_LENGTHS


def resolve(
    settings: Settings | None,
    options: Mapping[str, Any],
    flops_source: Any,
    logger: MetricLogger | DisabledLogger | None = None,
) -> tuple[Settings, Any]:
    """The settings with `options` applied, and the config, if any, after a trial count.

    Raises:
        UserError: an option is unknown or wrong, or the config cannot be counted.
    """
    config = None
    if isinstance(flops_source, str):
        options = {**options, "flops_source": flops_source}
    elif isinstance(flops_source, int | float):
        options = {**options, "flops_source": "value", "model_flops_per_device": flops_source}
    elif flops_source is not None:
        config, options = flops_source, {**options, "flops_source": "analytic"}
    if settings is None:
        values = _shared(logger, options)
    else:
        values = settings.outside_run_dir() if "run_dir" in options else vars(settings)
    resolved = Settings.of({**values, **options})
    return resolved, checked_config(resolved, config)


def _shared(
    logger: MetricLogger | DisabledLogger | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The peak and the convention of a logger's first function, as far as they are this one's."""
    config = logger.config if isinstance(logger, MetricLogger) else None
    values = {name: getattr(config, name) for name in _SHARED if hasattr(config, name)}
    if options.get("hardware"):  # the table has its peak
        values.pop("peak_tflops_per_device", None)
    is_traced = options.get("flops_source", "traced") == "traced"
    if is_traced and values.get("convention") not in TRACED_CONVENTIONS:
        values.pop("convention", None)
    return values


def check_kinds(*, metrics: Any, segment_ids: Any, logger: Any, sinks: Any, settings: Any) -> None:
    """Raises a `UserError` if an option that must be an object is of the wrong kind."""
    kinds: tuple[tuple[str, Any, Any, str], ...] = (
        ("metrics", metrics, Callable, "a function from the step's output to its scalars"),
        ("segment_ids", segment_ids, Callable, "a function of the step's arguments"),
        ("logger", logger, MetricLogger | DisabledLogger, "a MetricLogger"),
        ("settings", settings, Settings, "a Settings, such as mfu_jax.flags.settings() makes"),
    )
    for name, value, kind, expected in kinds:
        if value is not None and not isinstance(value, kind):
            raise UserError(
                f"{name}={value!r}: expected {expected}",
                hint="usually another object of that name, or its result; see "
                "help(mfu_jax.instrument)",
            )
    if sinks is not None:
        checked_sinks(sinks)


def checked_config(settings: Settings, config: Any) -> Any:
    """The config of ``flops_source=analytic``; None for the other sources.

    Args:
        settings: name the config if it is not given.
        config: as accepted by `mfu_jax.calculate_tflops_per_device`.

    Raises:
        UserError: it cannot be read or counted.
    """
    if settings.flops_source != "analytic" or not settings.enable_mfu:
        return None
    config = settings.parsed_model_config() if config is None else config
    analytic_model(config, convention=settings.convention)
    return config


def checked_trip_counts(trip_counts: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """Returns `trip_counts` if `executed_flops` accepts it.

    Raises:
        UserError: it is not a mapping from names to non-negative integers.
    """
    if trip_counts is None:
        return None
    is_mapping = isinstance(trip_counts, Mapping)
    if not is_mapping or not all(
        isinstance(name, str) and type(times) is int and times >= 0
        for name, times in trip_counts.items()
    ):
        raise UserError(
            f"trip_counts={trip_counts!r}: expected a mapping from the name of a loop to its "
            "iterations",
            hint="usually a number for all loops; pass the names that the ledger's notes show, "
            "as in trip_counts={'jit(step)/while': 10}",
        )
    return trip_counts


def warn_of_outputs(settings: Settings, sinks: Sequence[Sink] | None) -> None:
    """Says which outputs of the settings are not written, because sinks are given."""
    if sinks is not None:
        warn_of_unwritten({name: getattr(settings, name) for name in _OUTPUTS}, sinks)


def refuse_logger_settings(
    settings: Settings, sinks: Sequence[Sink] | None, logger: MetricLogger | DisabledLogger
) -> None:
    """Raises a `UserError` if options belong to, or contradict, the given logger."""
    defaults = Settings()
    changed = [k for k in OF_LOGGER if getattr(settings, k) != getattr(defaults, k)]
    if sinks is not None:
        changed.append("sinks")
    if changed:
        raise UserError(
            f"{', '.join(changed)} and logger=… were both given; expected one of the two",
            hint="usually the option belongs to the shared logger; give it to one function and "
            "its logger to the others: a = instrument(f, run_dir=…); b = instrument(g, "
            "logger=a.logger); or pass it to MetricLogger(…), and files as "
            "sinks=[make_sink('console'), make_sink('jsonl', path)]",
        )
    if logger.calls_per_step > 1 < settings.steps_per_call:
        raise UserError(
            f"steps_per_call={settings.steps_per_call} and a logger with "
            f"calls_per_step={logger.calls_per_step}: expected at most one above 1",
            hint="usually one logger for two loops; give this step a logger of its own, or "
            "leave the other out",
        )
