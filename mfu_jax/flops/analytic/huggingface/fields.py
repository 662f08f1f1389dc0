"""Reads the fields of a ``config.json``: typed, with the model type's own defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mfu_jax.errors import UserError
from mfu_jax.util.yaml_files import read_mapping

DEFAULTS_FILE = Path(__file__).with_name("defaults.yml")

# A larger size means a damaged file.
_LARGEST_SIZE = 2**40
# Layers are listed one by one.
_MOST_LAYERS = 100_000


@functools.cache
def _all_defaults() -> dict[str, Any]:
    return read_mapping(DEFAULTS_FILE)


def wrappers(kind: str) -> list[str]:
    """The model types around a text model that this list names."""
    return list(_all_defaults()[kind])


class Fields:
    """The fields of one config, or of a config nested in it (``text_config``).

    An absent field has its model type's default in transformers. As in transformers, ``null`` is
    not the same as absent.

    Args:
        values: the mapping in the file.
        model_type: the model type whose defaults apply.
        path: the mapping's place in the file, for messages (``text_config.``).
        left_out: where to put the sizes that are read but not in the file, with their defaults.

    Attributes:
        left_out: as given; shared with the configs made of this one.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        model_type: str,
        path: str = "",
        left_out: dict[str, int] | None = None,
    ) -> None:
        self.left_out = {} if left_out is None else left_out
        self.model_type = model_type
        self._values = values
        self._path = path
        defaults = dict(_all_defaults()[model_type])
        self._other_names: dict[str, str] = defaults.pop("other_names", {})
        self._defaults = defaults

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value of a field, else its default in transformers, else `default`."""
        for source in (self._values, self._defaults):
            for key in self._names(name):
                if key in source:
                    return source[key]
        return default

    def _names(self, name: str) -> tuple[str, ...]:
        other = self._other_names
        return (name, other.get(name, name), *(k for k, v in other.items() if v == name))

    def knows(self, name: str) -> bool:
        """Whether the model type has the field; transformers ignores other fields."""
        return name in self._defaults

    def named(self, *names: str) -> str:
        """The first of these names that the model type knows; an empty text if it knows none."""
        return next(filter(self.knows, names), "")

    def has(self, name: str) -> bool:
        """Whether the file itself gives the field a value."""
        return self._values.get(name) is not None

    def with_values(self, /, **values: Any) -> Fields:
        """The same config with some fields set."""
        return Fields({**self._values, **values}, self.model_type, self._path, self.left_out)

    def size(self, name: str, default: int | None = None, *, zero: bool = False) -> int:
        """An integer of at least 1 (at least 0 with `zero`); `default` if null or absent.

        Raises:
            UserError: it is absent without a default, or anything else.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, "expected a whole number")
        least, most = (0 if zero else 1), _LARGEST_SIZE
        if name.endswith(("layers", "n_layer")):
            most = _MOST_LAYERS
        if not least <= value <= most:
            self.fail(name, f"expected a whole number from {least} to {most}")
        if self._values.keys().isdisjoint(self._names(name)):
            self.left_out[f"{self._path}{name}"] = value
        return value

    def optional_size(self, name: str) -> int:
        """A size; 0 if null or absent."""
        return self.size(name, 0, zero=True)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; `default` if null or absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "expected true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Text; `default` if null or absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, "expected text")
        return value

    def list_of(self, kind: type, name: str) -> list[Any] | None:
        """A list of `kind`; None if null or absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(
            not isinstance(item, kind) or (kind is int and isinstance(item, bool)) for item in value
        ):
            self.fail(name, f"expected a list of {kind.__name__}")
        return list(value)

    def nested(self, name: str, model_type: str | None = None) -> Fields:
        """A nested config; if absent or null, all its defaults."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.fail(name, "expected an object")
        kind = model_type or str(value.get("model_type"))
        if kind not in _all_defaults():
            raise UserError(
                f"{self._path}{name}.model_type={kind!r} is not known",
                hint="count_model_flops(fn, *args) counts any JAX function",
            )
        return Fields(value, kind, f"{self._path}{name}.", self.left_out)

    def quotient(self, name: str, divisor: str, *, floor: bool = False) -> int:
        """``name / divisor``, which must be a whole number.

        Args:
            floor: whether the model type's own code rounds down.

        Raises:
            UserError: the quotient is not a whole number.
        """
        value, by = self.size(name), self.size(divisor)
        if (value % by and not floor) or value < by:
            self.fail(name, f"expected a multiple of {divisor}={by}, or head_dim given")
        return value // by

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raises a `UserError` that names the field."""
        value = repr(self.get(name))
        shown = value if len(value) <= 60 else f"{value[:57]}…"
        raise UserError(
            f"{self._path}{name}={shown}: {expected} (model_type {self.model_type!r})",
            hint="correct it in the config.json",
        )
