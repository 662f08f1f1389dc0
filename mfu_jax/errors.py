"""Errors that the user can fix: shown on one line, without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_MESSAGE = 1500


class UserError(ValueError):
    """Wrong input. The message says what was seen, what was expected, and what to do."""


def nearest(word: str, known: Iterable[str], *, similarity: float = 0.5) -> str:
    """``; did you mean 'x'?`` for the known word most similar to `word`, or an empty string.

    Args:
        word: what was given.
        known: what could have been meant.
        similarity: minimum ratio, from 0 to 1.
    """
    import difflib  # needed only after a typo

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=similarity)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def one_line(message: str) -> str:
    r"""A message for a terminal: one line of at most 1,500 printable characters.

    It may quote user input or a file: escape sequences, bytes that are not UTF-8, megabytes.

    >>> one_line("unknown key '\x1b[31m'\nhere")
    "unknown key '\\x1b[31m' here"
    """
    line = _printable(message)
    half = _LONGEST_MESSAGE // 2 - 2
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:half]} … {line[-half:]}"


def _printable(text: str) -> str:
    text = text.replace("\r", "").replace("\n", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """An error as part of a one-line message: its first line, or its type if it has no text.

    >>> first_line(ValueError("2 mismatches:\\n  wrong type at w\\n  wrong type at b"))
    '2 mismatches: wrong type at w'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    if lines[0].endswith(":"):
        lines[0] = " ".join(lines[:2])
    return lines[0][:300]
