"""The types of models that need no code: the rows of ``model_types.yml``.

A row names fields of a config; a decoder, those that differ from `common.decoder`. A value in
braces is computed: its first key is a function of `_COMPUTED`, which takes the others as arguments.
``with`` lists functions of `rules` and of the files that it shares with other types, each of
several values; ``older_names`` are those of older files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mfu_jax.flops.analytic.huggingface import common, latent, mixtures, recurrent, rules
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.util.yaml_files import read_mapping

_TABLE = read_mapping(Path(__file__).with_name("model_types.yml"))
_BASES: dict[str, Callable[..., ModelConfig]] = {
    "decoder": common.decoder,
    "encoder": common.encoder,
    "config": lambda _, **values: ModelConfig.from_mapping(values),
}
ROWS: list[dict[str, Any]] = [
    *({"base": "decoder", **row} for row in _TABLE["decoders"]),
    *({"base": "encoder", **row} for row in _TABLE["encoders"]),
]
ENCODERS = frozenset(name for row in _TABLE["encoders"] for name in row["types"])
_HOLDERS = (rules, common, latent, mixtures, recurrent)
_OF_THE_ROW = ("types", "base", "with", "older_names")  # its other keys are fields


def _translated(row: Mapping[str, Any], c: Fields) -> ModelConfig:
    """The config of a row's type."""
    for name, older in row.get("older_names", {}).items():
        if c.has(older):
            c = c.with_values(**{name: c.size(older)})
    values = {name: _value(c, value) for name, value in row.items() if name not in _OF_THE_ROW}
    for group in row.get("with", ()):
        name, arguments = (group, {}) if isinstance(group, str) else next(iter(group.items()))
        values |= _named(name)(c, **arguments)
    return _BASES[row["base"]](c, **values)


def _value(c: Fields, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return _COMPUTED[next(iter(value))](c, **value)


def _named(name: str) -> Callable[..., Any]:
    """The function of this name that a row may call."""
    found: Callable[..., Any] = next(vars(at)[name] for at in _HOLDERS if name in vars(at))
    return found


def _size(c: Fields, size: str, *, or_size: str = "", or_widths: int = 0, plus: int = 0) -> int:
    """The size in this field, or else in another, or a multiple of the model's width."""
    default = c.size(or_size) if or_size else _widths(c, or_widths) if or_widths else None
    return c.size(size, default) + plus


def _widths(c: Fields, widths: int | str) -> int:
    """A multiple of the model's width: a number, or a field."""
    width = c.size("hidden_size")
    return width * (c.size(widths) if isinstance(widths, str) else widths)


def _flag(
    c: Fields, flag: str, *, default: bool = False, then: Any = True, otherwise: Any = False
) -> Any:
    """One of two values, by a flag."""
    return then if c.flag(flag, default=default) else otherwise


def _every(
    c: Fields,
    every: int | str,
    *,
    default: int | None = None,
    others: str = SLIDING,
    renamed: Mapping[str, str] | None = None,
) -> list[str]:
    """As listed, or else full attention in every n-th layer, a number or a field."""
    interval = c.size(every, default) if isinstance(every, str) else every
    return common.layer_types(c, common.every(interval, FULL, others), **(renamed or {}))


def _first_of(c: Fields, first_of: int | str, *, default: int | None = None) -> list[str]:
    """The same from the first layer on."""
    interval = c.size(first_of, default) if isinstance(first_of, str) else first_of
    return common.layer_types(c, common.first_of(interval, FULL, SLIDING))


def _listed(c: Fields, listed: str, *, renamed: Mapping[str, str] | None = None) -> list[str]:
    """As listed, or else all layers of one kind."""
    return common.layer_types(c, lambda _: listed, **(renamed or {}))


def _heads_of(
    c: Fields, heads_of: Mapping[str, list[str]], *, prefixes: Mapping[str, str]
) -> list[str]:
    """The heads of the class named in ``architectures``; of the first one if it names none."""
    heads = {f"{prefixes[c.model_type]}{name}": found for name, found in heads_of.items()}
    name = next(iter(c.list_of(str, "architectures") or heads))
    if name not in heads:
        c.fail("architectures", f"expected one of {', '.join(heads)}")
    return heads[name]


_COMPUTED: dict[str, Callable[..., Any]] = {
    "size": _size,
    "widths": _widths,
    "flag": _flag,
    "is_true": lambda c, is_true: c.get(is_true) is True,
    "every": _every,
    "first_of": _first_of,
    "listed": _listed,
    "each": lambda c, each: (each,) * c.size("num_hidden_layers"),  # whatever the file lists
    "heads_of": _heads_of,
    "rule": lambda c, rule: _named(rule)(c),
}

for _row in ROWS:
    common.TRANSLATIONS.update(dict.fromkeys(_row["types"], functools.partial(_translated, _row)))
