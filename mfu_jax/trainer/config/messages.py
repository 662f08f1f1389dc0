"""A config's keys in text: as the command line takes them, and in errors."""

from __future__ import annotations

from typing import Any

from mfu_jax.errors import UserError, nearest


def as_argument(value: object) -> str:
    """A value as the command line takes it, so that a logged config can be rerun.

    >>> as_argument(("silu", "linear")), as_argument((0, 4, 128)), as_argument(True)
    ('[silu,linear]', '[0,4,128]', 'true')
    """
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def wrong(config: Any, keys: str, problem: str, hint: str = "") -> UserError:
    """An error about the values of some keys, separated by spaces."""
    given = " ".join(f"{key}={as_argument(getattr(config, key))}" for key in keys.split())
    return UserError(f"{given}: {problem}", hint=hint or "configs/base.yml explains each key")


def check_names(config: Any, key: str, known: tuple[str, ...]) -> None:
    """Raises a `UserError` if a list of names has an unknown one."""
    for name in getattr(config, key):
        if name not in known:
            problem = f"unknown {name!r}; expected some of {', '.join(known)}"
            raise wrong(config, key, problem, nearest(name, known))
