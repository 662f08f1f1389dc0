"""Reads a custom call's ``backend_config`` that is not JSON.

In MLIR's notation it is ``{grid_x = 8 : i32, ir = "…"}``; else it is a string of arbitrary bytes.
"""

from __future__ import annotations

import re

_ESCAPED = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")
_DIGITS = "0123456789abcdefABCDEF"
_BYTES = {b"\\": b"\\"} | {(a + b).encode(): bytes.fromhex(a + b) for a in _DIGITS for b in _DIGITS}

_C_ESCAPED = re.compile(rb"\\([0-3][0-7]{2}|.)")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def mlir_string(tail: str, key: str) -> bytes | None:
    """The bytes of a string attribute; None if there is none of this name.

    Args:
        tail: the text after the operands of the custom call.
        key: the attribute's name.

    >>> mlir_string(r'backend_config={grid_x = 8 : i32, ir = "ML\\EFR\\5C\\22"}', "ir")
    b'ML\\xefR\\\\"'
    """
    config = tail.partition("backend_config={")[2]
    # Within a string, a quotation mark is written as \22.
    match = re.search(rf'[{{ ]?\b{key} = "([^"]*)"', config)
    if not match:
        return None
    return unescaped(match[1].encode(errors="surrogateescape"))


def unescaped(text: bytes) -> bytes:
    """The bytes of MLIR's notation: ``\\`` and two hexadecimal digits, or a second ``\\``."""
    if b"\\" not in text:
        return text
    # As Python's own notation, which is read five times as fast as with a regular expression.
    try:
        as_python = text.replace(b"\\\\", b"\\5C").replace(b"\\", b"\\x")
        return as_python.decode("unicode_escape").encode("latin-1")
    except UnicodeError:  # a backslash before something else
        return _ESCAPED.sub(lambda match: _BYTES[match[1]], text)


def mlir_integer(tail: str, key: str) -> int | None:
    """An integer attribute; None if there is none of this name."""
    match = re.search(rf"\b{key} = (-?\d+) : i", tail.partition("backend_config={")[2])
    return int(match[1]) if match else None


def opaque_string(tail: str) -> bytes | None:
    """The bytes of a ``backend_config`` that is a string with C's escapes; None if it is not.

    >>> opaque_string(r'backend_config="x\\234\\n\\""')
    b'x\\x9c\\n"'
    """
    match = re.search(r'backend_config="((?:[^"\\]|\\.)*)"', tail)
    return _C_ESCAPED.sub(_c_unescaped, match[1].encode()) if match else None


def _c_unescaped(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    return bytes([int(escape, 8)]) if escape.isdigit() else _LETTERS.get(escape, escape)
