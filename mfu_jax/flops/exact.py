"""Exact arithmetic: numbers that are whole, or halves where half a pair is left."""

from __future__ import annotations

from fractions import Fraction

Number = int | Fraction


def integral(value: Number) -> Number:
    """`value` as an int where it is one.

    >>> integral(Fraction(6, 2)), integral(Fraction(1, 2))
    (3, Fraction(1, 2))
    """
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value
