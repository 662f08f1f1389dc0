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


def is_prime(number: int) -> bool:
    """Miller-Rabin test with bases that decide every number below 3.4e14.

    Jaeschke, On strong pseudoprimes to several bases, Math. Comp. 61 (1993).

    >>> [n for n in range(20) if is_prime(n)], is_prime(2**40 - 87), is_prime(2**40 - 89)
    ([2, 3, 5, 7, 11, 13, 17, 19], True, False)
    """
    if number in _WITNESSES or number < 2 or any(number % p == 0 for p in _WITNESSES):
        return number in _WITNESSES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    return all(
        (power := pow(witness, odd, number)) == 1
        or any(pow(power, 2**i, number) == number - 1 for i in range(twos))
        for witness in _WITNESSES
    )


_WITNESSES = (2, 3, 5, 7, 11, 13, 17)
