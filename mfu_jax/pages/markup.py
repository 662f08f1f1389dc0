"""HTML elements. Text becomes markup only here, so it is escaped only here."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_EMPTY = frozenset({"meta", "input"})  # void elements: no end tag


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


def tag(name: str, /, *content: str | None, **attributes: str | float | None) -> Markup:
    """An element.

    Args:
        name: such as ``td``.
        *content: text, which is escaped, or `Markup`; None is left out.
        **attributes: such as ``class_``; ``data_value`` becomes ``data-value``; None is left out.

    >>> tag("td", "<x> & \\"y\\"", class_="name", data_value=0.5)
    '<td class="name" data-value="0.5">&lt;x&gt; &amp; &quot;y&quot;</td>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{given}>")
    inner = "".join(
        part if isinstance(part, Markup) else _escaped(part) for part in content if part
    )
    return Markup(f"<{name}{given}>{inner}</{name}>")


def joined(parts: list[Markup]) -> Markup:
    """Elements one after the other."""
    return Markup("".join(parts))


def key(kinds: Iterable[tuple[str, str]]) -> Markup:
    """The legend of colors: pairs of a style-sheet class and its label."""
    parts = [tag("span", tag("i", class_=kind), words) for kind, words in kinds]
    return tag("p", *parts, class_="key")


def raw(name: str, text: str) -> Markup:
    """A ``style`` or ``script`` with our own text, which HTML does not escape."""
    if "</" in text:
        raise ValueError(f"<{name}> cannot hold '</'")
    return Markup(f"<{name}>{text}</{name}>")


def number(value: float, digits: int = 2) -> str:
    """Formats a coordinate briefly, since a page has thousands.

    >>> number(12.0), number(0.126), number(float("nan"))
    ('12', '0.13', '0')
    """
    if not math.isfinite(value):
        return "0"
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else repr(value)


def _escaped(text: str) -> str:
    return html.escape(_CONTROL.sub("\ufffd", text), quote=True)
