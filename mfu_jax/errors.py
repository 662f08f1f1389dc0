"""Errors that the user can fix: shown on two lines, without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_MESSAGE = 1500


class UserError(ValueError):
    """Wrong input: what was seen and what was expected; as its hint, the usual cause and the fix.

    >>> print(UserError("steps=-1: expected 1 or more", hint="leave it out for all"))
    steps=-1: expected 1 or more
    hint: leave it out for all
    """

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint.strip()

    @property
    def what(self) -> str:
        """What is wrong, without the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.what}\nhint: {self.hint}" if self.hint else self.what


def nearest(word: str, known: Iterable[str], *, similarity: float = 0.5) -> str:
    """``did you mean 'x'? `` for the known word most similar to `word`, or an empty string.

    Args:
        word: what was given.
        known: what could have been meant.
        similarity: minimum ratio, from 0 to 1.
    """
    import difflib  # needed only after a typo

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=similarity)
    return f"did you mean {matches[0]!r}? " if matches else ""


def two_lines(who: str, error: Exception) -> str:
    """An error for a terminal: what is wrong on one line, the hint of a `UserError` on the next."""
    if not isinstance(error, UserError):
        return one_line(f"{who}: {error}")
    hint = f"\nhint: {one_line(error.hint)}" if error.hint else ""
    return one_line(f"{who}: {error.what}") + hint


def one_line(message: str) -> str:
    r"""A message for a terminal: one line of at most 1,500 printable characters.

    It may quote user input or a file: escape sequences, bytes that are not UTF-8, megabytes.

    >>> one_line("unknown key '\x1b[31m'\nhere")
    "unknown key '\\x1b[31m' here"
    """
    line = escaped(message.replace("\r", "").replace("\n", " "))
    half = _LONGEST_MESSAGE // 2 - 2
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:half]} … {line[-half:]}"


def escaped(text: str) -> str:
    r"""`text` with line breaks, control characters and lone surrogates escaped.

    >>> escaped("loss\n\ud800")
    'loss\\n\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """An error as part of a one-line message: its first line, or its type if it has no text.

    The hint of a `UserError` follows after a semicolon.

    >>> first_line(ValueError("2 mismatches:\\n  wrong type at w\\n  wrong type at b"))
    '2 mismatches: wrong type at w'
    """
    if isinstance(error, UserError):
        return "; ".join(part for part in (error.what, error.hint) if part)[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    if lines[0].endswith(":"):
        lines[0] = " ".join(lines[:2])
    return lines[0][:300]
