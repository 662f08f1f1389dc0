"""The form of an error for users: what is wrong on one line, then a line with a hint."""

from __future__ import annotations


def is_told(message: str, *, hint: bool | None = None) -> bool:
    """Whether a message is one line, and at most one more with a hint.

    Args:
        message: an error's text, or what a command wrote to stderr.
        hint: whether the hint must be there; None: it may.
    """
    what, *rest = message.removesuffix("\n").split("\n")
    told = bool(what) and len(rest) <= 1 and all(line.startswith("hint: ") for line in rest)
    return told and hint in (None, bool(rest))
