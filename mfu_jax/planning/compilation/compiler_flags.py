"""Compiler flags as given by the user."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.errors import UserError


def compiler_flags(flags: str | Sequence[str]) -> tuple[str, ...]:
    """Splits flags into words; compilers silently ignore words that are not flags.

    Args:
        flags: ``--name=value`` words, in one string or as a sequence.

    Raises:
        UserError: a word is not a flag.

    >>> compiler_flags("--xla_a=1 --xla_b=true")
    ('--xla_a=1', '--xla_b=true')
    """
    words = flags.split() if isinstance(flags, str) else tuple(flags)
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"xla_flags has {word!r}; expected flags as --name=value")
    return tuple(words)
