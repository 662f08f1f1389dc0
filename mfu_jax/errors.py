"""Errors that the user can fix: shown as one line, without a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input. Its text says what was seen, what was expected, and the way out."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known word most similar to `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
