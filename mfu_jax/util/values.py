"""Converts command-line text, a YAML or JSON value or a Python object to a declared type.

The one converter for settings, the trainer's config, model configs and commands. A type is what
`typing.get_type_hints` gives for a field: ``bool``, ``int``, ``float``, ``str``, a ``Literal``,
``int | Fraction`` for exact numbers, ``tuple[str, ...]``, ``tuple[int, ...]``, or a union of these;
with ``| None`` (``null`` or nothing) for a value that may be left out.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from mfu_jax.errors import UserError, nearest

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_LARGEST_DENOMINATOR = 2**20  # 1.1 means 11/10, not the nearest binary fraction
_LONGEST_SHOWN = 80

# Nested aliases of a YAML file can stand for billions of items.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _LONGEST_SHOWN


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field of a dataclass → its type."""
    return typing.get_type_hints(cls)


def given_kind(kind: Any) -> Any:
    """The type of a value that is given: ``float`` of ``float | None``; other types unchanged."""
    kinds = typing.get_args(kind)
    return kinds[0] if kinds[1:] == (types.NoneType,) else kind


def typed(name: str, value: Any, kind: Any, *, hint: str = "") -> Any:
    """`value` as `kind`.

    Args:
        name: the key, for the error message.
        value: text, or a value from YAML, JSON or a Python caller.
        kind: the declared type.
        hint: the usual cause and the fix.

    Raises:
        UserError: it cannot be converted; the message shows the value and what was expected.

    >>> typed("steps", "1e3", int), typed("scan_layers", "no", bool)
    (1000, False)
    >>> typed("mlp_activations", "[silu, linear]", tuple[str, ...])
    ('silu', 'linear')
    """
    try:
        return convert(value, kind)
    except ValueError as error:
        near = nearest(str(value), _choices(kind)) if isinstance(value, str) else ""
        raise UserError(f"{name}={shown(value)}: expected {error}", hint=near + hint) from None


def number_of(
    values: Mapping[str, str],
    key: str,
    kind: Any,
    default: Any = None,
    *,
    is_positive: bool = False,
    hint: str = "",
) -> Any:
    """A finite number of a command, 0 or more; `default` if the key is not given.

    Args:
        values: key → text.
        key: of the number.
        kind: its type.
        default: as is.
        is_positive: whether it must be above 0.
        hint: the usual cause of a wrong one, and the fix.

    Raises:
        UserError: it is none, or out of range.
    """
    if key not in values:
        return default
    number = typed(key, values[key], kind, hint=hint)
    if not 0 <= number < math.inf or (is_positive and number == 0):
        expected = "a number above 0" if is_positive else "0 or more"
        raise UserError(f"{key}={values[key]}: expected {expected}", hint=hint)
    return number


def fraction_of(key: str, text: str, *, is_positive: bool = False, hint: str = "") -> float:
    """A fraction from ``1%`` or ``0.01``; 1 is ``100%``, since a bare 1 is mostly 1%.

    Args:
        key: of the number.
        text: what is given for it.
        is_positive: whether it must be above 0.
        hint: the way out.

    Raises:
        UserError: it is none.

    >>> fraction_of("mfu", "41%"), fraction_of("mfu", "0.41")
    (0.41, 0.41)
    """
    is_percent = text.rstrip().endswith("%")
    number = float(typed(key, text.rstrip(" %"), float, hint="pass 1% or 0.01"))
    fraction = number / 100 if is_percent else number
    is_within = 0 <= fraction <= 1 and (is_percent or fraction < 1)
    if not is_within or (is_positive and fraction == 0):
        if not is_percent and 1 <= number < 100:
            hint = f"usually a percentage without its sign; pass {text}%"
        least = "above 0" if is_positive else "0 or more"
        raise UserError(f"{key}={text}: expected {least} and at most 100%", hint=hint)
    return fraction


def convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`.

    Raises:
        ValueError: it cannot be converted; the message says in words what was expected.

    >>> convert("0.5", int | Fraction), convert(2.0, int | Fraction)
    (Fraction(1, 2), 2)
    """
    try:
        return _convert(value, kind)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(_expected(kind)) from None


def shown(value: Any) -> str:
    """`value` for an error message: one short line, however large or deeply nested it is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        text = f"a {type(value).__name__} of too many digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _convert(value: Any, kind: Any) -> Any:
    if isinstance(value, enum.Enum):  # MaxText's config objects contain enums
        value = value.value
    origin = typing.get_origin(kind)
    if origin is Literal:
        return kind.__args__[kind.__args__.index(value)]
    if origin is tuple:
        return tuple(_convert(item, kind.__args__[0]) for item in _items(value))
    if origin in (types.UnionType, typing.Union):
        return _one_of(value, kind.__args__)
    return _PLAIN[kind](value)


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise TypeError
    return value


def _one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    """`value` as the first of `kinds` that accepts it; as a list only if it looks like one."""
    for kind in kinds:
        try:
            return _convert(value, kind)
        except (TypeError, ValueError, OverflowError):
            continue
    raise ValueError


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower())
    if not _is_bool(value) and (isinstance(value, float) or value not in (0, 1)):
        raise TypeError
    return bool(value)


def _is_bool(value: Any) -> bool:
    """Also true for NumPy's bools, without importing NumPy."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"


def _int(value: Any) -> int:
    number = _number(value)
    whole = int(number)
    if whole != number:
        raise ValueError
    return whole


def _float(value: Any) -> float:
    return float(_number(value))


def _fraction(value: Any) -> Fraction:
    return Fraction(_number(value)).limit_denominator(_LARGEST_DENOMINATOR)


def _number(value: Any) -> Any:
    if _is_bool(value):
        raise TypeError
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        return float(value)


def _str(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_date = hasattr(value, "isoformat")  # YAML reads 2026-01-01 as a date
    if _is_bool(value) or not (isinstance(value, str | int | float) or is_date):
        raise TypeError
    return str(value)


def _none(value: Any) -> None:
    if value not in (None, "", "null"):
        raise TypeError


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    types.NoneType: _none,
    bool: _bool,
    int: _int,
    float: _float,
    Fraction: _fraction,
    str: _str,
}

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    int | Fraction: "a finite number",
    tuple[str, ...]: "a list of words, for example [a, b]",
    tuple[int, ...]: "a list of whole numbers, for example [1, 2]",
    int | tuple[int, ...]: "a whole number, or a list of them",
}


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _expected(kind: Any) -> str:
    kind = given_kind(kind)
    if choices := _choices(kind):
        return "one of " + ", ".join(choice or '""' for choice in choices)
    return _NAMES[kind]
