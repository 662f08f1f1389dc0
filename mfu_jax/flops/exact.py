"""Exact arithmetic: ints, and fractions where a formula leaves half a pair."""

from __future__ import annotations

from fractions import Fraction

Number = int | Fraction


def integral(value: Number) -> Number:
    """`value` as an int if it is one.

    >>> integral(Fraction(6, 2)), integral(Fraction(1, 2))
    (3, Fraction(1, 2))
    """
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value
