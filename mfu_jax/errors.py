"""Errors that the user can fix: shown as one line, without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input. Its text says what was seen, what was expected, and what to do."""


def nearest(word: str, known: Iterable[str], *, similarity: float = 0.5) -> str:
    """``; did you mean 'x'?`` for the known word most similar to `word`, or an empty string.

    Args:
        word: what was given.
        known: what could have been meant.
        similarity: ratio from 0 to 1 that a known word must reach.
    """
    import difflib  # only a wrong word needs it

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=similarity)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def first_line(error: BaseException) -> str:
    """An error's text for the inside of a one-line message: its first line, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
