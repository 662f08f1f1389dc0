"""Metric names as a backend allows them, still distinct from each other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from mfu_jax.util.failsafe import Once

_log = logging.getLogger("mfu_jax")

# A loop that invents new names every step must not fill the memory.
_MOST_NAMES = 10_000
_TOO_MANY = (
    "%s: more than %d names of metrics; expected the same ones in every step; usually the step is "
    "part of a name; new ones that differ only in what it does not take are written as one"
)


class UniqueNames:
    """Maps metric names to names that a backend accepts, no two to the same one.

    If another name was already mapped to the same text, a number is added, which is logged once.
    Names beyond the first 10,000 are not remembered: they stay distinct from those, but not from
    each other.

    Args:
        backend: its name, for the log.
        allowed: maps a name to the nearest one that it accepts, ignoring length.
        longest: maximum number of characters that it accepts.
        reserved: names that the backend uses itself.
        is_tree: names are file paths: ``a`` and ``a/b`` cannot both exist.

    >>> names = UniqueNames("Prometheus", lambda name: name.replace("-", "_"))
    >>> names["top_1"], names["top-1"], names["top-1"]
    ('top_1', 'top_1_2', 'top_1_2')
    """

    def __init__(
        self,
        backend: str,
        allowed: Callable[[str], str] = str,
        *,
        longest: int = 250,
        reserved: Iterable[str] = (),
        is_tree: bool = False,
    ) -> None:
        self._backend = backend
        self._allowed = allowed
        self._longest = longest
        self._taken = set(reserved)
        self._is_tree = is_tree
        self._folders: set[str] = set()
        self._mapped: dict[str, str] = {}
        self._last: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._is_first = Once()

    def __getitem__(self, name: str) -> str:
        found = self._mapped.get(name)
        return self._add(name) if found is None else found

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The backend's names of a record's metrics, usually the same as for the last record."""
        key = tuple(names)
        if key != self._last[0]:
            self._last = key, tuple(self[name] for name in key)
        return self._last[1]

    def _add(self, name: str) -> str:
        allowed = self._allowed(name)[: self._longest] or "_"
        if not self._taken.isdisjoint(self._folders_of(allowed)):
            allowed = allowed.replace("/", "_")  # a number at its end would not help
        endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
        names = (allowed[: self._longest - len(ending)] + ending for ending in endings)
        found = next(filter(self._is_free, names))
        if len(self._mapped) >= _MOST_NAMES:
            if self._is_first():
                _log.warning(_TOO_MANY, self._backend, _MOST_NAMES)
            return found
        if found != allowed:
            _log.warning(
                "%s: metric %r is written as %r, because %r is another one's name there",
                self._backend,
                name,
                found,
                allowed,
            )
        self._taken.add(found)
        self._folders.update(self._folders_of(found))
        self._mapped[name] = found
        return found

    def _is_free(self, name: str) -> bool:
        return name not in self._taken and name not in self._folders

    def _folders_of(self, name: str) -> list[str]:
        """``a`` and ``a/b`` for ``a/b/c``."""
        parts = name.split("/") if self._is_tree else []
        return ["/".join(parts[:end]) for end in range(1, len(parts))]
