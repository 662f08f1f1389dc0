"""Numbers as a human reads them: enough digits to be non-zero, and no more."""

from __future__ import annotations

import math


def readable(value: float) -> str:
    """Three decimals, or as many as it takes to show three digits of a small number.

    >>> [readable(x) for x in (12.5, 0.1234, 0.00213, 0.0)]
    ['12.500', '0.123', '0.00213', '0.000']
    """
    if value == 0 or not math.isfinite(value) or abs(value) >= 0.1:
        return f"{value:.3f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def percent(fraction: float | None) -> str:
    """A fraction in per cent, ``n/a`` where it is not known.

    >>> [percent(x) for x in (0.4123, 1.5, 0.00031, None)]
    ['41.2%', '150.0%', '0.0310%', 'n/a']
    """
    if fraction is None:
        return "n/a"
    if 0 < abs(fraction) < 0.01:
        return f"{readable(100 * fraction)}%" if abs(fraction) < 0.001 else f"{100 * fraction:.2f}%"
    return f"{100 * fraction:.1f}%"
