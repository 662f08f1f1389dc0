"""Recognises causal and windowed masks in a jaxpr, from how they are computed.

A mask is made of positions (`iota`, or a constant 0, 1, 2, …), which are broadcast, compared and
combined. Each such value is followed as a `Pattern`; everything else has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mfu_jax.flops.known_values import Known, Table
from mfu_jax.flops.masks import Band

_NO_BOUNDS = Band()


@dataclass(frozen=True)
class Pattern:
    """An array whose elements are known from their position.

    Attributes:
        kind: ``positions``: element = Σ sign·(index along dim) + offset, over `terms`.
            ``keeps``: true (or 1) where band.low ≤ index along dim a − along dim b ≤ band.high, for
            `terms` ((a, 1), (b, −1)); everywhere if there are none.
            ``bias``: 0 where such a mask keeps a pair, very negative elsewhere.
        terms: (dim, sign) pairs in the order of the dims.
    """

    kind: Literal["positions", "keeps", "bias"]
    terms: tuple[tuple[int, int], ...] = ()
    offset: float = 0
    band: Band = _NO_BOUNDS

    def moved(self, where: Callable[[int], int | None]) -> Pattern | None:
        """With every dim put elsewhere; None if one is gone."""
        moved = [(where(dim), sign) for dim, sign in self.terms]
        if any(dim is None for dim, _ in moved):
            return None
        terms = tuple((dim, sign) for dim, sign in moved if dim is not None)
        if self.kind != "positions" and len(terms) == 2 and terms[0][0] > terms[1][0]:
            return _keeps(terms[::-1], self.band, self.kind)
        return dataclasses.replace(self, terms=tuple(sorted(terms)))


# A score plus this is no score any more.
_VERY_NEGATIVE = -1e4

EVERYWHERE = Pattern("keeps")


def _keeps(
    terms: tuple[tuple[int, int], ...], band: Band, kind: Literal["keeps", "bias"] = "keeps"
) -> Pattern:
    """A mask with its first dim counted positively."""
    if terms[0][1] < 0:
        terms = tuple((dim, -sign) for dim, sign in terms)
        low, high = band
        band = Band(None if high is None else -high, None if low is None else -low)
    return Pattern(kind, terms, band=band)


def of_constant(value: Known) -> Pattern | None:
    """The pattern of a constant: one number, positions 0, 1, 2, …, or a triangle as an array."""
    if value is True:
        return EVERYWHERE
    if isinstance(value, bool | int | float):
        return Pattern("positions", (), value)
    if not isinstance(value, Table):
        return None
    values = value.values
    if values.ndim == 1 and values.dtype.kind in "iu" and values.size:
        start = int(values[0])
        is_line = np.array_equal(values, start + np.arange(values.size))
        return Pattern("positions", ((0, 1),), start) if is_line else None
    return _triangle(values) if values.ndim >= 2 and values.dtype == bool else None


def _triangle(values: np.ndarray) -> Pattern | None:
    matrix = values.reshape(-1, *values.shape[-2:])
    queries, keys = matrix.shape[1:]
    if not (matrix == matrix[0]).all() or not matrix[0].any():
        return None
    i, j = np.nonzero(matrix[0])
    low, high = int((i - j).min()), int((i - j).max())
    band = Band(low if low > 1 - keys else None, high if high < queries - 1 else None)
    if band.pairs(queries, keys) != len(i):
        return None
    a, b = values.ndim - 2, values.ndim - 1
    return Pattern("keeps", ((a, 1), (b, -1)), band=band)


def follow(eqn: Any, patterns: Sequence[Pattern | None]) -> Pattern | None:
    """The pattern of an equation's result, if it has one."""
    name = eqn.primitive.name
    if name == "iota":
        return Pattern("positions", ((int(eqn.params["dimension"]), 1),))
    if name in _MOVES:
        return patterns[0] and _MOVES[name](eqn, patterns[0])
    if name == "convert_element_type":
        return patterns[0]
    if name in ("add", "sub"):
        return _sum(patterns[0], patterns[1], 1 if name == "add" else -1)
    if name in _COMPARISONS:
        return _compare(name, patterns[0], patterns[1])
    if name == "and":
        return _both(patterns[0], patterns[1])
    if name == "not" and patterns[0] is not None and patterns[0].kind == "keeps":
        low, high = patterns[0].band
        if low is not None and high is None:
            return dataclasses.replace(patterns[0], band=Band(None, low - 1))
        if high is not None and low is None:
            return dataclasses.replace(patterns[0], band=Band(high + 1, None))
    if name == "select_n" and len(patterns) == 3:
        return _select(eqn, patterns[0], patterns[1], patterns[2])
    return None


def _broadcast(eqn: Any, pattern: Pattern) -> Pattern | None:
    shape = eqn.invars[0].aval.shape
    dims = eqn.params["broadcast_dimensions"]
    sizes = eqn.outvars[0].aval.shape
    # A position along a dimension of size 1 that is stretched is no position along the result's.
    return pattern.moved(lambda d: dims[d] if shape[d] == sizes[dims[d]] else None)


def _reshape(eqn: Any, pattern: Pattern) -> Pattern | None:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    kept_before = [d for d, size in enumerate(before) if size != 1]
    kept_after = [d for d, size in enumerate(after) if size != 1]
    if [before[d] for d in kept_before] != [after[d] for d in kept_after]:
        return pattern if not pattern.terms else None
    new = dict(zip(kept_before, kept_after, strict=True))
    return pattern.moved(new.get)


def _squeeze(eqn: Any, pattern: Pattern) -> Pattern | None:
    gone = eqn.params["dimensions"]
    return pattern.moved(lambda d: None if d in gone else d - sum(g < d for g in gone))


def _transpose(eqn: Any, pattern: Pattern) -> Pattern | None:
    order = list(eqn.params["permutation"])
    return pattern.moved(order.index)


def _slice(eqn: Any, pattern: Pattern) -> Pattern | None:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    if strides is not None and any(stride != 1 for stride in strides):
        return None
    shift = sum(sign * starts[dim] for dim, sign in pattern.terms)
    if pattern.kind == "positions":
        return dataclasses.replace(pattern, offset=pattern.offset + shift)
    low, high = pattern.band
    band = Band(None if low is None else low - shift, None if high is None else high - shift)
    return dataclasses.replace(pattern, band=band)


_MOVES: dict[str, Callable[[Any, Pattern], Pattern | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _slice,
    "copy": lambda eqn, pattern: pattern,
    "stop_gradient": lambda eqn, pattern: pattern,
    "reduce_precision": lambda eqn, pattern: pattern,
    "sharding_constraint": lambda eqn, pattern: pattern,
    "optimization_barrier": lambda eqn, pattern: pattern,
}


def _sum(a: Pattern | None, b: Pattern | None, sign: int) -> Pattern | None:
    if a is None or b is None or not a.kind == b.kind == "positions":
        return None
    signs = dict(a.terms)
    for dim, other in b.terms:
        signs[dim] = signs.get(dim, 0) + sign * other
    terms = tuple(sorted((dim, s) for dim, s in signs.items() if s))
    return Pattern("positions", terms, a.offset + sign * b.offset)


_COMPARISONS = {"lt", "le", "gt", "ge", "ne", "eq"}


def _compare(name: str, a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is not None and a.kind == "keeps":  # mask != 0, mask > 0
        return a if name in ("ne", "gt") and _number(b) == 0 else None
    difference = _sum(a, b, -1)
    if difference is None or sorted(sign for _, sign in difference.terms) != [-1, 1]:
        return None
    offset = int(difference.offset)  # (i − j) + offset is compared with 0
    bands = {
        "lt": Band(None, -offset - 1),
        "le": Band(None, -offset),
        "gt": Band(-offset + 1, None),
        "ge": Band(-offset, None),
        "eq": Band(-offset, -offset),
    }
    return _keeps(difference.terms, bands[name]) if name in bands else None


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """Two masks at once; one that is not known can only keep less than the other alone."""
    masks = [p for p in (a, b) if p is not None and p.kind == "keeps"]
    bounded = [p for p in masks if p.terms]
    if not bounded:
        return EVERYWHERE if len(masks) == 2 else None
    if len(bounded) == 2 and bounded[0].terms == bounded[1].terms:
        return dataclasses.replace(bounded[0], band=bounded[0].band & bounded[1].band)
    return bounded[0]


def _select(
    eqn: Any, mask: Pattern | None, if_false: Pattern | None, if_true: Pattern | None
) -> Pattern | None:
    """A mask where another keeps a pair, else false; or 0 there, else a very negative number."""
    if mask is None or mask.kind != "keeps":
        return None
    otherwise = _number(if_false)
    if eqn.outvars[0].aval.dtype == bool:
        return _both(mask, if_true) if otherwise == 0 else None
    if _number(if_true) == 0 and otherwise is not None and otherwise <= _VERY_NEGATIVE:
        return dataclasses.replace(mask, kind="bias")
    return None


def _number(pattern: Pattern | None) -> float | None:
    """The number that is everywhere in an array."""
    is_constant = pattern is not None and pattern.kind == "positions" and not pattern.terms
    return pattern.offset if pattern is not None and is_constant else None
