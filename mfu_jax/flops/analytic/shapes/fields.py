"""Fields of a shape: text to values, values checked."""

from __future__ import annotations

import reprlib
from fractions import Fraction
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.exact import integral


def parse_value(name: str, kind: str, text: str) -> Any:
    """`text` of a command line as a value of type `kind`; what does not fit is left to the checks.

    >>> parse_value("mlp_activations", "tuple[str, ...]", "silu,linear")
    ['silu', 'linear']
    """
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind.startswith("tuple") or "," in text:
        items = [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
        return items if "str" in kind else [_number(item) for item in items]
    return text if kind == "str" else _number(text)


def _number(text: str) -> int | float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


# Nested aliases of a YAML file can stand for billions of items.
_SHORT = reprlib.Repr()


def shown(value: Any) -> str:
    """`value` for an error message: short, however large or nested it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _checked(name: str, kind: str, value: Any) -> Any:
    """`value` in the field's type."""
    if kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{name}={shown(value)}: expected a whole number")
        return max(value, 0) if value == -1 else _not_negative(name, value)
    if kind == "Number":
        if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
            raise UserError(f"{name}={shown(value)}: expected a number")
        try:
            number = integral(Fraction(value).limit_denominator(2**20))
        except (ValueError, OverflowError):
            raise UserError(f"{name}={shown(value)}: expected a finite number") from None
        return 0 if number == -1 else _not_negative(name, number)
    if kind == "bool":
        if not isinstance(value, bool):
            raise UserError(f"{name}={shown(value)}: expected true or false")
        return value
    if kind == "str":
        value = getattr(value, "value", value)  # MaxText's enums
        if not isinstance(value, str):
            raise UserError(f"{name}={shown(value)}: expected text")
        return value
    if kind.startswith("int | tuple") and isinstance(value, int) and not isinstance(value, bool):
        return _not_negative(name, value)
    items = _checked_tuple(name, kind, value)
    if kind.startswith("int | tuple") and len(items) != 2:
        raise UserError(f"{name}={shown(value)}: expected one number or two, height and width")
    return items


def _checked_tuple(name: str, kind: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) and "str" in kind:
        value = [part for part in value.split(",") if part]
    if not isinstance(value, list | tuple):
        raise UserError(f"{name}={shown(value)}: expected a list")
    expected = str if "str" in kind else int
    for item in value:
        if not isinstance(item, expected) or isinstance(item, bool):
            raise UserError(f"{name}={shown(value)}: expected a list of {expected.__name__}")
    return tuple(value)


# No size is beyond this; what is larger is a damaged file, and no float holds what follows from it.
_LARGEST = 2**50


def _not_negative(name: str, value: Any) -> Any:
    if not 0 <= value <= _LARGEST:
        raise UserError(f"{name}={shown(value)}: expected a number from 0 to {_LARGEST}")
    return value
