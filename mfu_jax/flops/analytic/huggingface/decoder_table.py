"""Decoders that differ from Llama in a few values: the rows of ``decoders.yml``.

A row names what differs from `common.decoder`. A value in braces is computed from the config: its
first key is a function of this file, which takes the others as arguments. ``with`` lists functions
of `decoder_rules` and of the files that it shares with other types, each of several values;
``older_names`` are those of older files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mfu_jax.flops.analytic.huggingface import common, decoder_rules, latent, mixtures, recurrent
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.util.yaml_files import read_mapping

ROWS: list[dict[str, Any]] = read_mapping(Path(__file__).with_name("decoders.yml"))["decoders"]
_HOLDERS = (decoder_rules, common, latent, mixtures, recurrent)
_OF_THE_ROW = ("types", "with", "older_names")  # its other keys are fields


def _translated(row: Mapping[str, Any], c: Fields) -> ModelConfig:
    """The config of a row's type."""
    for name, older in row.get("older_names", {}).items():
        if c.has(older):
            c = c.with_values(**{name: c.size(older)})
    values = {name: _value(c, value) for name, value in row.items() if name not in _OF_THE_ROW}
    for group in row.get("with", ()):
        name, arguments = (group, {}) if isinstance(group, str) else next(iter(group.items()))
        values |= _named(name)(c, **arguments)
    return common.decoder(c, **values)


def _value(c: Fields, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return _COMPUTED[next(iter(value))](c, **value)


def _named(name: str) -> Callable[..., Any]:
    """The function of this name that a row may call."""
    found: Callable[..., Any] = next(vars(at)[name] for at in _HOLDERS if name in vars(at))
    return found


def _size(c: Fields, size: str, *, or_widths: int = 0, plus: int = 0) -> int:
    """The size in this field, or else a multiple of the model's width."""
    return c.size(size, _widths(c, or_widths) if or_widths else None) + plus


def _widths(c: Fields, widths: int | str) -> int:
    """A multiple of the model's width: a number, or a field."""
    width = c.size("hidden_size")
    return width * (c.size(widths) if isinstance(widths, str) else widths)


def _flag(
    c: Fields, flag: str, *, default: bool = False, then: Any = True, otherwise: Any = False
) -> Any:
    """One of two values, by a flag."""
    return then if c.flag(flag, default=default) else otherwise


def _every(c: Fields, every: int | str, *, default: int | None = None) -> list[str]:
    """As listed, or else full attention in every n-th layer and windows in the others."""
    interval = c.size(every, default) if isinstance(every, str) else every
    return common.layer_types(c, common.every(interval, FULL, SLIDING))


_COMPUTED: dict[str, Callable[..., Any]] = {
    "size": _size,
    "widths": _widths,
    "flag": _flag,
    "is_true": lambda c, is_true: c.get(is_true) is True,
    "every": _every,
    "first_of": lambda c, first_of: common.layer_types(c, common.first_of(first_of, FULL, SLIDING)),
    "listed": lambda c, listed: common.layer_types(c, lambda _: listed),  # or else all so
    "each": lambda c, each: (each,) * c.size("num_hidden_layers"),
    "rule": lambda c, rule: _named(rule)(c),
}

for _row in ROWS:
    common.TRANSLATIONS.update(dict.fromkeys(_row["types"], functools.partial(_translated, _row)))
