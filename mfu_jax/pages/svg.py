"""Marks of a chart."""

from __future__ import annotations

from mfu_jax.pages.markup import Markup, number, tag


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line; `kind` is a style-sheet class."""
    return tag(
        "line", x1=number(x1, 1), y1=number(y1, 1), x2=number(x2, 1), y2=number(y2, 1), class_=kind
    )


def text(x: float, y: float, words: str, anchor: str) -> Markup:
    """Words at a point; `anchor` is ``start``, ``middle`` or ``end``."""
    return tag("text", words, x=number(x, 1), y=number(y, 1), text_anchor=anchor)


def chart(*content: Markup, width: float, height: float, label: str, kind: str) -> Markup:
    """A picture that scrolls on a narrow screen.

    Args:
        *content: its marks.
        width: width of its coordinate system.
        height: height of its coordinate system.
        label: text for screen readers.
        kind: its style-sheet class.
    """
    picture = tag(
        "svg",
        *content,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=label,
        class_=kind,
        tabindex="0",  # the keyboard scrolls it, and moves the guide of a chart
    )
    return tag("div", picture, class_="chart")
