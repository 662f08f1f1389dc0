"""MaxText's keys: what a training YAML and a model file say together becomes a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.inputs.config_files import with_defaults
from mfu_jax.flops.analytic.model_configs.model import (
    MAXTEXT_FIELDS,
    REQUIRED,
    ModelConfig,
    field_type,
)
from mfu_jax.util.values import shown, typed
from mfu_jax.util.yaml_files import model_file, model_names, read_mapping

_MAXTEXT_DEFAULTS = read_mapping(Path(__file__).with_name("maxtext_defaults.yml"))

# The scale exponent that each size follows in global_parameter_scale: the first doubling goes to
# heads and MLP, the second to the width, the third to the layers, and so on.
_SCALED = {
    "base_emb_dim": "width",
    "base_num_query_heads": "heads",
    "base_num_kv_heads": "heads",
    "base_mlp_dim": "heads",
    "base_moe_mlp_dim": "heads",
    "base_num_decoder_layers": "layers",
}


def config_from_keys(
    values: dict[str, Any], inherited: dict[str, Any], overrides: dict[str, Any]
) -> ModelConfig:
    """The config that MaxText would build.

    Args:
        values: the keys of a model file or a training YAML.
        inherited: what its ``base_config`` adds.
        overrides: keys that override both.

    Raises:
        UserError: keys contradict each other, are missing or unknown.
    """
    values |= {key: overrides[key] for key in ("override_model_config",) if key in overrides}
    values = with_defaults(_with_named_model(values), inherited)
    if "global_parameter_scale" in overrides and not any(key in values for key in _SCALED):
        values = _as_base(values)
    for key in overrides:
        values.pop(_other_spelling(key), None)
    return _resolved({**values, **overrides}, overrides)


def _as_base(values: dict[str, Any]) -> dict[str, Any]:
    """Resolved sizes under their ``base_*`` names, which a scale multiplies."""
    return {f"base_{k}" if f"base_{k}" in _SCALED else k: v for k, v in values.items()}


def _with_named_model(values: dict[str, Any]) -> dict[str, Any]:
    """Merges in the bundled model that a training YAML names, under MaxText's override rule.

    A key set by both the YAML and the model file must agree, unless ``override_model_config``.
    """
    name = values.get("model_name")
    name = name.replace("-Instruct", "") if isinstance(name, str) else ""
    if "num_decoder_layers" in values or name not in model_names():
        return values
    model = read_mapping(model_file(name))
    if "decoder_block" in values and "vocab_size" in values:
        return values  # an independent model file that happens to have a bundled name
    own = dict(values)
    for key, value in values.items():
        resolved = key.removeprefix("base_")
        if resolved in model and model[resolved] != value:
            if not values.get("override_model_config"):
                raise UserError(
                    f"{key}={shown(value)} contradicts model_name {name!r}, which has "
                    f"{shown(model[resolved])}",
                    hint="set override_model_config: true to let it win",
                )
            del model[resolved]
    return {**(_as_base(model) if "global_parameter_scale" in own else model), **own}


def _other_spelling(key: str) -> str:
    """The other spelling of a size: ``emb_dim`` for ``base_emb_dim``, and vice versa."""
    return key.removeprefix("base_") if key.startswith("base_") else f"base_{key}"


def _resolved(values: dict[str, Any], overrides: dict[str, Any]) -> ModelConfig:
    """Resolved names are used unchanged; ``base_*`` names scaled by ``global_parameter_scale``."""
    resolved = {k: v for k, v in values.items() if not k.startswith("base_")}
    base = {k: v for k, v in values.items() if k in _SCALED}
    if base:
        exponents = _scale_exponents(values.get("global_parameter_scale", 1))
        for key, kind in _SCALED.items():
            if key not in base:
                continue
            field, value = key.removeprefix("base_"), typed(key, base[key], int)
            scaled = value << exponents[kind] if value > 0 else value
            if resolved.setdefault(field, scaled) != scaled:
                raise UserError(
                    f"{key} gives {field}={scaled}, but the file also says "
                    f"{field}={shown(resolved[field])}",
                    hint="leave one of the two out",
                )
        resolved = {**_MAXTEXT_DEFAULTS, **resolved}
    if missing := [field for field in REQUIRED if field not in resolved]:
        names = [f"base_{f}" if f"base_{f}" in _SCALED else f for f in missing]
        raise UserError(
            f"the config has no {', '.join(names)}; expected MaxText's fields (base_emb_dim, "
            "vocab_size, …)",
            hint="give it as key=value",
        )
    _refuse_misspelt(values, [field for field in MAXTEXT_FIELDS if field not in resolved])
    for key in overrides:
        _refuse_unknown(key)
    return ModelConfig.from_mapping({f: resolved[f] for f in MAXTEXT_FIELDS if f in resolved})


# Minimum similarity of a key to an absent field to count as a misspelling of it.
_MISSPELT = 0.9


def _refuse_misspelt(values: Mapping[str, Any], absent: list[str]) -> None:
    """Most keys of a config are ignored; one that almost names an absent field is a typo."""
    for key in values:
        if key in MAXTEXT_FIELDS or key in _EXTRA_KEYS:
            continue
        if hint := nearest(key.removeprefix("base_"), absent, similarity=_MISSPELT):
            raise UserError(f"unknown key {key!r}", hint=hint)


_EXTRA_KEYS = frozenset({*_SCALED, "global_parameter_scale", "override_model_config"})


def override_keys() -> list[str]:
    """Every key that may follow a model's name on the command line."""
    return [*MAXTEXT_FIELDS, *sorted(_EXTRA_KEYS)]


def parse_override(key: str, text: str) -> Any:
    """``key=text`` from a command line, converted to the field's type.

    Raises:
        UserError: with the nearest key, or the expected type.
    """
    _refuse_unknown(key)
    if key in _EXTRA_KEYS:
        return typed(key, text, bool if key == "override_model_config" else int)
    return typed(key, text, field_type(key))


def _refuse_unknown(key: str) -> None:
    if key not in MAXTEXT_FIELDS and key not in _EXTRA_KEYS:
        raise UserError(
            f"unknown key {key!r}",
            hint=nearest(key, override_keys()),
        )


def _scale_exponents(scale: Any) -> dict[str, int]:
    """Powers of two for each kind of size: doublings go to heads, width, layers, heads, ….

    >>> _scale_exponents(4)
    {'width': 1, 'heads': 1, 'layers': 0}
    """
    whole = isinstance(scale, int) and not isinstance(scale, bool)
    if not whole or scale < 1 or scale & (scale - 1) or scale > 2**30:
        raise UserError(
            f"global_parameter_scale={shown(scale)}: expected a power of two (1, 2, 4, …)"
        )
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    return {"width": cycles + (rest > 1), "heads": cycles + (rest > 0), "layers": cycles}
