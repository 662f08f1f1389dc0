"""The options of `instrument`, resolved into settings and checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import Sink
from mfu_jax.settings import LOGGER_KEYS, Settings

# Settings that belong to a logger and its loop, so they cannot accompany a given one.
_OF_SHARED = ("metrics_file", "tensorboard_dir", *LOGGER_KEYS, "profile_steps")


def resolve(
    settings: Settings | None, options: Mapping[str, Any], flops_source: Any
) -> tuple[Settings, Any]:
    """The settings with `options` applied, and the config if `flops_source` is one."""
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
    """Raises a `UserError` if logger options are given along with a logger."""
    defaults = Settings()
    changed = [k for k in _OF_SHARED if getattr(settings, k) != getattr(defaults, k)]
    if sinks is not None:
        changed.append("sinks")
    if changed:
        raise UserError(
            f"{', '.join(changed)} and logger=… were both given; expected one of the two; usually "
            f"the option belongs to the shared logger; pass it to MetricLogger(…)"
        )
