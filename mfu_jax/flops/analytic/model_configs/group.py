"""What the groups of a `ModelConfig` share: each value is converted and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar, dataclass_transform

from mfu_jax.errors import UserError
from mfu_jax.flops.exact import integral
from mfu_jax.util.values import field_types, shown, typed

# A larger size means a damaged file, and would give counts that no float can hold.
_LARGEST = 2**50

GroupType = TypeVar("GroupType")

# Field metadata: set only by a translation; 0 is not a valid value.
_TRANSLATED = {"translated": True}
POSITIVE = {"positive": True}


def hugging_face(default: Any) -> Any:
    """A field that MaxText has no name for; only the translation of a ``config.json`` sets it."""
    return dataclasses.field(default=default, metadata=_TRANSLATED)


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def field_group(cls: type[GroupType]) -> type[GroupType]:
    """A frozen, keyword-only dataclass with the methods of `FieldGroup`.

    Python compiles the methods of each dataclass separately. Sixteen groups with their own
    ``__eq__``, ``__hash__`` and ``__repr__`` took a tenth of the start-up of ``mfu-jax flops``.
    """
    return dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)


@field_group
class FieldGroup:
    """The fields of one concern, under MaxText's names where it has them.

    Sizes that an architecture lacks are 0. MaxText writes -1 for some, which is read as 0.
    """

    def __post_init__(self) -> None:
        cls: type = type(self)
        for field in own_fields(self):
            given = getattr(self, field.name)
            if given is field.default:
                continue
            value = _checked(field.name, given, field_types(cls)[field.name])
            if field.metadata == POSITIVE and value <= 0:
                raise UserError(f"{field.name}={shown(given)}: expected a positive number")
            object.__setattr__(self, field.name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        """Shows only what differs from the defaults: most models lack most fields."""
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != _default(field)
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def require_at_most(self, small: str, value: int, large: str, limit: int) -> None:
        """Raises a `UserError` if the field `small` exceeds the field `large`."""
        if value > limit:
            raise UserError(
                f"{small}={value} contradicts {large}={limit}; expected at most as many"
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    made = group_of(field)
    return made() if made else field.default


def own_fields(group: FieldGroup | type[FieldGroup]) -> Iterator[dataclasses.Field[Any]]:
    """A group's fields, except those that hold a group."""
    return (field for field in dataclasses.fields(group) if not group_of(field))


def in_maxtext(field: dataclasses.Field[Any]) -> bool:
    """Whether MaxText has the field; other fields come from a ``config.json``."""
    return field.metadata != _TRANSLATED


def group_of(field: dataclasses.Field[Any]) -> type[FieldGroup] | None:
    """The group that a field holds, or None."""
    made = field.default_factory
    return made if isinstance(made, type) and issubclass(made, FieldGroup) else None


def _checked(name: str, value: Any, kind: Any) -> Any:
    """`value` in the field's type; numbers must be finite, not negative, and not too large."""
    value = typed(name, value, kind)
    if isinstance(value, tuple) and kind == int | tuple[int, ...] and len(value) != 2:
        raise UserError(f"{name}={shown(value)}: expected one number or two, height and width")
    if isinstance(value, tuple) and any(isinstance(size, int) and size < 0 for size in value):
        raise UserError(f"{name}={shown(value)}: expected no negative number")
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        return value
    number = 0 if value == -1 else integral(value)
    if not 0 <= number <= _LARGEST:
        raise UserError(f"{name}={shown(value)}: expected a number from 0 to {_LARGEST}")
    return number
