"""Converts a model's name, file, mapping or object to a `ModelConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mfu_jax.flops.analytic.inputs.config_files import model_name_of, read_source
from mfu_jax.flops.analytic.inputs.maxtext_keys import config_from_keys
from mfu_jax.flops.analytic.model_configs.model import MAXTEXT_FIELDS, ModelConfig


def as_model_config(config: Any) -> ModelConfig:
    """Converts any description of a model to a `ModelConfig`.

    Args:
        config: a `ModelConfig`, a bundled name, file or mapping (see
            `overrides.load_model_config`), a transformers configuration object, or an object with
            MaxText's field names. Fields that are not about the architecture or the step are
            ignored.

    Raises:
        UserError: a field is missing, has the wrong type, or is out of range.
    """
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, Mapping | str | PurePath):
        return overridden(config, {})
    if callable(to_dict := _attribute(config, "to_dict")) and _attribute(config, "model_type"):
        return as_model_config(to_dict())  # a transformers configuration object
    values = {
        name: value for name in MAXTEXT_FIELDS if (value := _attribute(config, name)) is not None
    }
    return ModelConfig.from_mapping(values, f"a {type(config).__name__}")


def _attribute(config: Any, name: str) -> Any:
    """The attribute, or None; older MaxText configs raise a mapping's errors instead."""
    try:
        return getattr(config, name, None)
    except (KeyError, ValueError):
        return None


def overridden(source: Any, overrides: dict[str, Any]) -> ModelConfig:
    """The config named by `source`, with `overrides`; see `overrides.load_model_config`."""
    inherited: dict[str, Any] = {}
    if isinstance(source, str | Path):
        values, inherited = read_source(str(source))
        values.setdefault("model_name", model_name_of(str(source)))
    elif isinstance(source, Mapping):
        values = dict(source)
    else:
        config = as_model_config(source)
        return config.replace(**overrides) if overrides else config
    if "model_type" in values or "architectures" in values:
        return _from_hugging_face(values, overrides, is_file=isinstance(source, str | Path))
    return config_from_keys(values, inherited, overrides)


def _from_hugging_face(
    values: dict[str, Any], overrides: dict[str, Any], *, is_file: bool
) -> ModelConfig:
    # A dozen modules that a bundled model never needs: 5 ms of a 70 ms answer.
    from mfu_jax.flops.analytic.huggingface import translated

    name = values.pop("model_name", "")
    config, left_out = translated(values)
    if is_file and left_out:  # it may be truncated; a mapping is as its author wrote it
        sizes = ", ".join(f"{field}={size}" for field, size in left_out.items())
        given = ", where no argument gives them" if overrides else ""
        warnings.warn(
            f"{name}: the config.json leaves sizes out, which are {values['model_type']}'s "
            f"defaults{given}: {sizes}",
            stacklevel=4,
        )
    return config.replace(**{"model_name": config.model_name or name, **overrides})
