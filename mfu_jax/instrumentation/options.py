"""From what a user passes to `instrument` or sets by flags to the parts that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import Sink, make_sink
from mfu_jax.settings import Settings

# What a logger is made with, and so cannot be set beside a given one.
_OF_LOGGER = ("start_step", "warmup_steps", "log_period", "abort_on_nan_loss", "abort_on_inf_loss")
_OF_SINKS = ("metrics_file", "tensorboard_dir")
_OF_LOOP = ("profile_steps",)


def make_sinks(settings: Settings) -> list[Sink]:
    """Console, and JSONL and TensorBoard where the settings name a place; process 0 alone.

    Raises:
        UserError: an output folder cannot be written.
    """
    if jax.process_index() != 0:
        return []
    resume = {"resume_from_step": settings.start_step}
    sinks = [make_sink("console")]
    if settings.metrics_file:
        sinks.append(make_sink("jsonl", settings.metrics_file, **resume))
    if settings.tensorboard_dir:
        sinks.append(make_sink("tensorboard", settings.tensorboard_dir, **resume))
    return sinks


def logger_options(settings: Settings) -> dict[str, Any]:
    """The arguments of `MetricLogger` that are settings."""
    return {key: getattr(settings, key) for key in _OF_LOGGER}


def resolve(
    settings: Settings | None, options: Mapping[str, Any], flops_source: Any
) -> tuple[Settings, Any]:
    """The settings with `options` over them, and the config if `flops_source` is one."""
    values = {} if settings is None else vars(settings)
    config = None
    if isinstance(flops_source, str):
        options = {**options, "flops_source": flops_source}
    elif isinstance(flops_source, int | float):
        options = {
            **options,
            "flops_source": "value",
            "model_flops_per_device": flops_source,
        }
    elif flops_source is not None:
        config, options = flops_source, {**options, "flops_source": "analytic"}
    return Settings.of({**values, **options}), config


def refuse_logger_settings(settings: Settings, sinks: Sequence[Sink] | None) -> None:
    """Raises a `UserError` where options of a logger are given beside a logger."""
    defaults = Settings()
    keys = (*_OF_SINKS, *_OF_LOGGER, *_OF_LOOP)
    changed = [k for k in keys if getattr(settings, k) != getattr(defaults, k)]
    if sinks is not None:
        changed.append("sinks")
    if changed:
        raise UserError(
            f"{', '.join(changed)} and logger=… were both given; expected one of the two; usually "
            f"the option belongs to the logger that is shared; pass it to MetricLogger(…)"
        )
