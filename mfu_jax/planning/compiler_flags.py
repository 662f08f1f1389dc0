"""Flags of a compiler, as a person gives them."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.errors import UserError


def compiler_flags(flags: str | Sequence[str]) -> tuple[str, ...]:
    """The flags one by one; compilers ignore words that are no flags.

    Args:
        flags: ``--name=value``, each a word of one text, or of a sequence.

    Raises:
        UserError: a word is no flag.

    >>> compiler_flags("--xla_a=1 --xla_b=true")
    ('--xla_a=1', '--xla_b=true')
    """
    words = flags.split() if isinstance(flags, str) else tuple(flags)
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"xla_flags has {word!r}; expected flags as --name=value")
    return tuple(words)
