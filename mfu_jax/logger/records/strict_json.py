"""Text and JSON that every file, terminal and parser accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    r"""`text` with line breaks, control characters and lone surrogates escaped.

    >>> printable("loss\n\ud800")
    'loss\\n\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped; line breaks are kept."""
    return text.encode("utf-8", "backslashreplace").decode()


def strict(value: Any) -> Any:
    """`value` without what JSON lacks: NaN and Inf at any depth become text.

    >>> strict({"a": [math.nan, 1.0], 2: -math.inf})
    {'a': ['NaN', 1.0], '2': '-Infinity'}
    """
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {encodable(str(name)): strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return value
