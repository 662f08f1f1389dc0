"""Recognises causal and windowed masks in a jaxpr by how they are computed.

A mask is computed from positions (`iota`, or a constant 0, 1, 2, …) that are broadcast, compared
and combined. Each such value has a `Pattern`; other values have none.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mfu_jax.flops.traced.integers.known_values import ConstantTable, Known
from mfu_jax.flops.traced.masks.pairs import Band

_NO_BOUNDS = Band()

PatternKind = Literal["positions", "distance", "keeps", "drops", "bias"]


@dataclass(frozen=True)
class Pattern:
    """An array whose elements are a known function of their position.

    Attributes:
        kind: ``positions``: element = Σ sign·(index along dim) + offset, over `terms`.
            ``distance``: the absolute value of such a sum of two indices.
            ``keeps``: true (or 1) where band.low ≤ index along dim a − along dim b ≤ band.high, for
            `terms` ((a, 1), (b, −1)); everywhere if there are no terms.
            ``drops``: true (or 1) where that does not hold.
            ``bias``: 0 where such a mask keeps a pair, very negative elsewhere.
        terms: (dim, sign) pairs in order of dim.
        partial: whether the mask keeps only an unknown subset of the pairs in the band.
    """

    kind: PatternKind
    terms: tuple[tuple[int, int], ...] = ()
    offset: float = 0
    band: Band = _NO_BOUNDS
    partial: bool = False

    def moved(self, where: Callable[[int], int | None]) -> Pattern | None:
        """The pattern with every dim mapped by `where`; None if a dim it uses disappears."""
        moved = [(where(dim), sign) for dim, sign in self.terms]
        if any(dim is None for dim, _ in moved):
            return None
        terms = tuple(sorted((dim, sign) for dim, sign in moved if dim is not None))
        return _with_first_positive(dataclasses.replace(self, terms=terms))

    @property
    def is_mask(self) -> bool:
        """Whether it is a boolean mask."""
        return self.kind in ("keeps", "drops")


# A score to which this is added has zero weight after the softmax.
_VERY_NEGATIVE = -1e4

EVERYWHERE = Pattern("keeps")
UNKNOWN_BIAS = Pattern("bias", partial=True)
"""0 or very negative, depending on data."""


def _with_first_positive(pattern: Pattern) -> Pattern:
    """A mask with a positive sign on its first dim, for comparison; positions are unchanged."""
    if pattern.kind in ("positions", "distance") or not pattern.terms or pattern.terms[0][1] > 0:
        return pattern
    low, high = pattern.band
    return dataclasses.replace(
        pattern,
        terms=tuple((dim, -sign) for dim, sign in pattern.terms),
        band=Band(None if high is None else -high, None if low is None else -low),
    )


def _inverted(pattern: Pattern | None) -> Pattern | None:
    """The negated mask; it keeps the same pairs."""
    if pattern is None or not pattern.is_mask:
        return None
    return dataclasses.replace(pattern, kind="drops" if pattern.kind == "keeps" else "keeps")


def _as(kind: Literal["keeps", "drops"], pattern: Pattern | None) -> Pattern | None:
    """The mask as another kind, which is possible only for a band with one bound."""
    if pattern is None or not pattern.is_mask or pattern.kind == kind:
        return pattern if pattern is not None and pattern.is_mask else None
    low, high = pattern.band
    if pattern.partial or (low is None) == (high is None):
        return None
    band = Band(None, low - 1) if low is not None else Band((high or 0) + 1, None)
    return dataclasses.replace(pattern, kind=kind, band=band)


def kept_where(mask: Pattern | None, value: bool) -> Pattern | None:
    """A mask that keeps the pairs where `mask` has this value (or more pairs)."""
    return _as("keeps", mask if value else _inverted(mask))


def of_constant(value: Known) -> Pattern | None:
    """The pattern of a constant: one number, positions 0, 1, 2, …, or a triangular array."""
    if value is True:
        return EVERYWHERE
    if isinstance(value, bool | int | float):
        return Pattern("positions", (), value)
    if not isinstance(value, ConstantTable):
        return None
    values = value.values
    long_dims = [d for d, size in enumerate(values.shape) if size > 1]
    if values.dtype.kind in "iu" and len(long_dims) == 1:
        line = values.reshape(-1)
        is_line = np.array_equal(line, int(line[0]) + np.arange(line.size))
        return Pattern("positions", ((long_dims[0], 1),), int(line[0])) if is_line else None
    if values.ndim < 2 or not values.size:
        return None
    if values.dtype == bool:
        return _triangle(values) or _inverted(_triangle(~values))
    if values.dtype.kind == "f" and np.all((values == 0) | (values <= _VERY_NEGATIVE)):
        triangle = _triangle(values == 0)
        return triangle and dataclasses.replace(triangle, kind="bias")
    return None


def _triangle(values: np.ndarray) -> Pattern | None:
    matrix = values.reshape(-1, *values.shape[-2:])
    queries, keys = matrix.shape[1:]
    if values.all():
        return EVERYWHERE
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
    """The pattern of an equation's result, or None."""
    name = eqn.primitive.name
    if name == "iota":
        return Pattern("positions", ((int(eqn.params["dimension"]), 1),))
    if name in _MOVES:
        return patterns[0] and _MOVES[name](eqn, patterns[0])
    if name == "convert_element_type":
        return patterns[0]
    if name == "sub" and _number(patterns[0]) == 1 and patterns[1] and patterns[1].is_mask:
        return _inverted(patterns[1])  # 1 − mask
    if name in ("add", "sub"):
        return _sum(patterns[0], patterns[1], 1 if name == "add" else -1)
    if name == "abs":
        return _absolute(patterns[0])
    if name in _COMPARISONS:
        return _compare(name, patterns[0], patterns[1])
    if name == "and":
        return _both(patterns[0], patterns[1])
    if name == "or":
        return _either(patterns[0], patterns[1])
    if name == "mul":
        return _product(patterns[0], patterns[1])
    if name == "not" and eqn.outvars[0].aval.dtype == bool:
        return _inverted(patterns[0])
    if name == "select_n" and len(patterns) == 3:
        return _select(eqn, patterns[0], patterns[1], patterns[2])
    return None


def _broadcast(eqn: Any, pattern: Pattern) -> Pattern | None:
    shape = eqn.invars[0].aval.shape
    dims = eqn.params["broadcast_dimensions"]
    sizes = eqn.outvars[0].aval.shape
    # A dimension of size 1 that is broadcast has no positions along the result's dimension.
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
    if pattern.kind in ("positions", "distance"):
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


def _absolute(pattern: Pattern | None) -> Pattern | None:
    if pattern is None or not _is_difference(pattern):
        return None
    return dataclasses.replace(pattern, kind="distance")


def _is_difference(pattern: Pattern) -> bool:
    return pattern.kind == "positions" and sorted(s for _, s in pattern.terms) == [-1, 1]


# Each comparison and its equivalent with swapped sides.
_COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne", "eq": "eq"}


def _compare(name: str, a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is None or b is None:
        return None
    if _number(a) is not None:
        name, a, b = _COMPARISONS[name], b, a
    number = _number(b)
    if number is not None and (other := _number(a)) is not None:
        return of_constant(bool(getattr(operator, name)(other, number)))
    if a.is_mask:
        return _compare_mask(name, a, number)
    if a.kind == "distance" and number is not None:
        nearest, farthest = number - a.offset, -number - a.offset  # for |d + offset| vs number
        if name in ("le", "gt"):
            band = Band(math.ceil(farthest), math.floor(nearest))
        elif name in ("lt", "ge"):
            band = Band(math.floor(farthest) + 1, math.ceil(nearest) - 1)
        else:
            return None
        inside = _with_first_positive(Pattern("keeps", a.terms, band=band))
        return inside if name in ("lt", "le") else _inverted(inside)
    difference = _sum(a, b, -1)
    if difference is None or not _is_difference(difference):
        return None
    bound = -difference.offset  # compared with i − j
    if name in ("eq", "ne") and bound != int(bound):
        return None
    band = {
        "lt": Band(None, math.ceil(bound) - 1),
        "le": Band(None, math.floor(bound)),
        "gt": Band(math.floor(bound) + 1, None),
        "ge": Band(math.ceil(bound), None),
    }.get(name, Band(int(bound), int(bound)))
    mask = _with_first_positive(Pattern("keeps", difference.terms, band=band))
    return _inverted(mask) if name == "ne" else mask


def _compare_mask(name: str, mask: Pattern, number: float | None) -> Pattern | None:
    """A mask of zeros and ones, compared with a number."""
    if number is None:
        return None
    compare = getattr(operator, name)
    of_zero, of_one = compare(0, number), compare(1, number)
    if of_zero == of_one:
        return None
    return mask if of_one else _inverted(mask)


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The conjunction of two masks; an unknown one can only exclude more pairs."""
    masks = [mask for mask in (_as("keeps", a), _as("keeps", b)) if mask]
    bounded = [mask for mask in masks if mask.terms]
    if not bounded:
        return EVERYWHERE if len(masks) == 2 else None
    if len(bounded) == 2 and bounded[0].terms == bounded[1].terms:
        partial = bounded[0].partial or bounded[1].partial
        band = bounded[0].band & bounded[1].band
        return dataclasses.replace(bounded[0], band=band, partial=partial)
    one_is_all = len(masks) == 2 and len(bounded) == 1
    return bounded[0] if one_is_all else dataclasses.replace(bounded[0], partial=True)


def _either(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The disjunction of two masks: it drops the pairs that both drop."""
    for mask, other in ((a, b), (b, a)):
        if mask and mask.is_mask and _number(other) == 0:
            return mask
    return _inverted(_both(_inverted(a), _inverted(b)))


def _product(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The product of two masks of zeros and ones, or of a mask and a very negative number."""
    if a is None or b is None:
        return UNKNOWN_BIAS if is_very_negative(a or b) else None
    if a.is_mask and b.is_mask:
        return _both(a, b)
    mask, factor = (a, b) if a.is_mask else (b, a)
    return _as_bias(kept_where(mask, False)) if is_very_negative(factor) else None


def _as_bias(mask: Pattern | None) -> Pattern:
    return dataclasses.replace(mask, kind="bias") if mask else UNKNOWN_BIAS


def is_very_negative(pattern: Pattern | None) -> bool:
    """Whether it is a constant that gives a score no weight."""
    number = _number(pattern)
    return number is not None and number <= _VERY_NEGATIVE


def _select(
    eqn: Any, mask: Pattern | None, if_false: Pattern | None, if_true: Pattern | None
) -> Pattern | None:
    """A select by a mask: between masks, or between 0 and a very negative number."""
    zero, one = _number(if_false), _number(if_true)
    is_bias = (zero == 0 and is_very_negative(if_true)) or (one == 0 and is_very_negative(if_false))
    if mask is None or not mask.is_mask:
        return UNKNOWN_BIAS if is_bias else None
    is_bool = eqn.outvars[0].aval.dtype == bool
    if zero == 0 and (is_bool or (if_true and if_true.is_mask) or one == 1):
        return mask if one == 1 else _both(mask, if_true)
    if one == 0 and (is_bool or (if_false and if_false.is_mask) or zero == 1):
        return _inverted(mask) if zero == 1 else _both(_inverted(mask), if_false)
    if is_bool and one == 1:
        return _either(mask, if_false)
    if is_bool and zero == 1:
        return _either(_inverted(mask), if_true)
    return _as_bias(kept_where(mask, one == 0)) if is_bias else None


def _number(pattern: Pattern | None) -> float | None:
    """The value of a constant array."""
    if pattern == EVERYWHERE:
        return 1
    is_constant = pattern is not None and pattern.kind == "positions" and not pattern.terms
    return pattern.offset if pattern is not None and is_constant else None
