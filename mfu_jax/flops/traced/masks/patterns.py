"""Recognises causal and windowed masks in a jaxpr by how they are computed.

A mask is computed from positions (`iota`, or a constant 0, 1, 2, …) that are broadcast, compared
and combined. Each such value has a `Pattern`; other values have none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mfu_jax.flops.traced.integers.known_values import ConstantTable, Known
from mfu_jax.flops.traced.masks.pairs import Band, Chunks

_NO_BOUNDS = Band()

DimMap = Callable[[int], int | None]

PatternKind = Literal[
    "positions", "distance", "quotient", "remainder", "sign", "at_zero", "inexact", "table",
    "computed", "keeps", "drops", "zeros", "negative",
]  # fmt: skip
Fill = Literal["zeros", "negative"]


@dataclass(frozen=True)
class Pattern:
    """An array whose elements are a known function of their position.

    Attributes:
        kind: ``positions``: element = Σ sign·(index along dim) + offset, over `terms`.
            ``distance``: the absolute value of such a sum of two indices.
            ``quotient``: a position, not negative, divided by `size` and rounded down; and
            ``remainder``: what is left. ``inexact``: true where that is not 0; ``sign``: of the
            position; ``at_zero``: true where that is 0.
            ``table``: the element of `table` at a position. ``computed``: from positions, in
            another way.
            ``keeps``: true (or 1) where band.low ≤ index along dim a − along dim b ≤ band.high, for
            `terms` ((a, 1), (b, −1)); everywhere if there are no terms.
            ``drops``: true (or 1) where that does not hold.
            ``zeros``: 0 where such a mask drops a pair, unknown elsewhere.
            ``negative``: very negative where such a mask drops a pair, unknown elsewhere.
        terms: (dim, sign) pairs in order of dim.
        partial: whether the mask keeps only an unknown subset of the pairs in the band.
        beyond: (dim, size) pairs: nothing is dropped from this index along dim on.
        size: by which a position is divided.
        table: the elements of a short list of integers.
    """

    kind: PatternKind
    terms: tuple[tuple[int, int], ...] = ()
    offset: float = 0
    band: Band = _NO_BOUNDS
    partial: bool = False
    beyond: tuple[tuple[int, int], ...] = ()
    size: int = 0
    table: tuple[int, ...] = ()

    def moved(self, where: Callable[[int], int | None]) -> Pattern | None:
        """The pattern with every dim mapped by `where`; None if a dim it uses disappears."""
        terms, beyond = (
            sorted((to, fact) for dim, fact in facts if (to := where(dim)) is not None)
            for facts in (self.terms, self.beyond)
        )
        if len(terms) < len(self.terms) or len(beyond) < len(self.beyond):
            return None
        moved = dataclasses.replace(self, terms=tuple(terms), beyond=tuple(beyond))
        return _with_first_positive(moved)

    @property
    def is_mask(self) -> bool:
        """Whether it is a boolean mask."""
        return self.kind in ("keeps", "drops")


# A score to which this is added has zero weight after the softmax.
_VERY_NEGATIVE = -1e4
_LONGEST_TABLE = 256

EVERYWHERE = Pattern("keeps")
_COMPUTED = Pattern("computed")
UNKNOWN = Pattern("keeps", partial=True)
"""A mask that depends on data."""


def _with_first_positive(pattern: Pattern) -> Pattern:
    """A mask with a positive sign on its first dim, for comparison; positions are unchanged."""
    if pattern.kind in ("positions", "distance") or not pattern.terms or pattern.terms[0][1] > 0:
        return pattern
    terms = tuple((dim, -sign) for dim, sign in pattern.terms)
    return dataclasses.replace(pattern, terms=terms, band=pattern.band.mirrored())


def _inverted(pattern: Pattern | None) -> Pattern | None:
    """The negated mask; it keeps the same pairs."""
    if pattern is None or not pattern.is_mask:
        return None
    return dataclasses.replace(pattern, kind="drops" if pattern.kind == "keeps" else "keeps")


def _as(kind: Literal["keeps", "drops"], pattern: Pattern | None) -> Pattern | None:
    """The mask as another kind, which is possible only for a band with one bound."""
    if pattern is None or not pattern.is_mask or pattern.kind == kind:
        return pattern if pattern is not None and pattern.is_mask else None
    low, high, chunks = pattern.band
    if pattern.partial or chunks or (low is None) == (high is None):
        return None
    band = Band(None, low - 1) if low is not None else Band((high or 0) + 1, None)
    return dataclasses.replace(pattern, kind=kind, band=band)


def kept_where(mask: Pattern | None, value: bool) -> Pattern | None:
    """A mask that keeps the pairs where `mask` has this value (or more pairs)."""
    return _as("keeps", mask if value else _inverted(mask))


def of_constant(value: Known) -> Pattern | None:
    """The pattern of a constant: a number, a line of integers, or an array that is a mask."""
    if value is True:
        return EVERYWHERE
    if isinstance(value, bool | int | float):
        return Pattern("positions", (), value)
    if not isinstance(value, ConstantTable):
        return None
    values = value.values
    long_dims = [d for d, size in enumerate(values.shape) if size > 1]
    if values.dtype.kind in "iu" and len(long_dims) == 1:
        return _line(values.reshape(-1), long_dims[0])
    if values.ndim < 2 or not values.size:
        return None
    if values.dtype == bool:
        return _triangle(values) or _inverted(_triangle(~values)) or _bound(values)
    if values.dtype.kind == "f" and np.all((values == 0) | (values <= _VERY_NEGATIVE)):
        return _as_fill("negative", _triangle(values == 0) or _bound(values == 0) or UNKNOWN)
    return None


def _line(line: np.ndarray, dim: int) -> Pattern | None:
    """Integers 0, 1, 2, …, each several times or from another number on; or a few other ones."""
    terms, places = ((dim, 1),), np.arange(line.size)
    if np.array_equal(line, int(line[0]) + places):
        return Pattern("positions", terms, int(line[0]))
    size = int(np.argmax(line != line[0]))  # of the first chunk
    if size and np.array_equal(line, places // size):
        return Pattern("quotient", terms, size=size)
    if line.size <= _LONGEST_TABLE:
        return Pattern("table", terms, table=tuple(line.tolist()))
    return None


def _triangle(values: np.ndarray) -> Pattern | None:
    """The band that an array keeps exactly, in chunks or not."""
    if values.all():
        return EVERYWHERE
    bound = _bound(values)
    first = values.reshape(-1, *values.shape[-2:])[0]
    if bound is None or not (values == first).all():
        return None
    chunks = Chunks(int(max(first[0].sum(), first[:, 0].sum(), 1)))
    i, j = np.nonzero(first)
    is_chunked = np.array_equal(i // chunks.size, j // chunks.size)
    bands = [bound.band, bound.band._replace(chunks=chunks)] if is_chunked else [bound.band]
    for band in bands:
        if band.pairs(*first.shape) == len(i):
            return dataclasses.replace(bound, band=band, partial=False)
    return None


def _bound(values: np.ndarray) -> Pattern | None:
    """The smallest band with the pairs that an array keeps; None without any."""
    matrix = values.reshape(-1, *values.shape[-2:]).any(0)
    queries, keys = matrix.shape
    if not matrix.any():
        return None
    i, j = np.nonzero(matrix)
    low, high = int(np.min(i - j)), int(np.max(i - j))
    band = Band(low if low > 1 - keys else None, high if high < queries - 1 else None)
    a, b = values.ndim - 2, values.ndim - 1
    return Pattern("keeps", ((a, 1), (b, -1)), band=band, partial=True)


def follow(eqn: Any, patterns: Sequence[Pattern | None], index: int = 0) -> Pattern | None:
    """The pattern of an equation's result with this index, or None.

    What is computed from a mask in a way that is not followed is an unknown mask, and so is what
    positions are compared with.
    """
    if (found := _follow(eqn, patterns, index)) is not None:
        return found
    is_bool, is_moved = eqn.outvars[0].aval.dtype == bool, eqn.primitive.name in {*MOVES, *CUTS}
    found = unfollowed(*patterns) if is_bool or is_moved else None
    if found is None and any(_is_of_places(p) or (p and _is_unsure(p)) for p in patterns):
        known = (_is_of_places(p) or _number(p) is not None or (p and p.is_mask) for p in patterns)
        found = _COMPUTED if is_bool or all(known) else None
    return UNKNOWN if found and is_bool else found


def _is_of_places(pattern: Pattern | None) -> bool:
    """Whether it depends on where its elements are, and on no data."""
    if pattern is None or pattern.is_mask or pattern.kind in _LEFT:
        return False
    return bool(pattern.terms) or pattern == _COMPUTED


def unfollowed(*patterns: Pattern | None) -> Pattern | None:
    """The pattern of elements of these arrays, it is unknown of which."""
    for pattern in patterns:
        if pattern and _is_unsure(pattern):
            return UNKNOWN
        for kind in _LEFT:
            if _is(pattern, kind):
                return _as_fill(kind, UNKNOWN)
    return None


def _is_unsure(pattern: Pattern) -> bool:
    """Whether it is a mask that may drop pairs."""
    return pattern.is_mask and pattern != EVERYWHERE


def _follow(eqn: Any, patterns: Sequence[Pattern | None], index: int) -> Pattern | None:
    name = eqn.primitive.name
    if name in MOVES:
        return patterns[0] and _moved(eqn, patterns[0], index)
    return _RULES[name](eqn, *patterns) if name in _RULES else None


def _broadcast(eqn: Any) -> DimMap:
    shape = eqn.invars[0].aval.shape
    dims = eqn.params["broadcast_dimensions"]
    sizes = eqn.outvars[0].aval.shape
    # A dimension of size 1 that is broadcast has no positions along the result's dimension.
    return lambda d: dims[d] if shape[d] == sizes[dims[d]] else None


def _reshape(eqn: Any) -> DimMap:
    """Dimensions that keep their size and stride, whatever is split or joined beside them."""
    before, after = (
        {(size, math.prod(shape[d + 1 :])): d for d, size in enumerate(shape) if size != 1}
        for shape in (eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    )
    return {d: after.get(key) for key, d in before.items()}.get


def _squeeze(eqn: Any) -> DimMap:
    gone = eqn.params["dimensions"]
    return lambda d: None if d in gone else d - sum(g < d for g in gone)


def _transpose(eqn: Any) -> DimMap:
    return list(eqn.params["permutation"]).index


def _slice(eqn: Any) -> DimMap:
    bounds = slice_bounds(eqn, 0)
    return lambda d: d if bounds[d][2] == 1 else None


def slice_bounds(eqn: Any, index: int) -> list[tuple[int, int, int]]:
    """Start, end and stride of a slice, or of a part of a split, along each dimension."""
    params, sizes = eqn.params, eqn.invars[0].aval.shape
    if eqn.primitive.name == "slice":
        strides = params["strides"] or [1] * len(sizes)
        return list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    bounds = [(0, size, 1) for size in sizes]
    start = sum(params["sizes"][:index])
    bounds[params["axis"]] = (start, start + params["sizes"][index], 1)
    return bounds


def _padded(eqn: Any) -> DimMap:
    config = eqn.params["padding_config"]
    return lambda d: d if config[d][0] == config[d][2] == 0 else None


def _unmoved(eqn: Any) -> DimMap:
    return lambda d: d


# Where the dimensions of the first operand lie in the result.
MOVES: dict[str, Callable[[Any], DimMap]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _slice,
    "split": _slice,
    "concatenate": _unmoved,
    "pad": _padded,
    **dict.fromkeys(
        ["copy", "copy_p", "layout_constraint", "name", "pbroadcast", "pvary", "reduce_precision",
         "reduced_vary_cast_p", "reshard", "sharding_constraint", "stop_gradient",
         "vary_unreduced_cast_p"],
        _unmoved,
    ),
}  # fmt: skip


# Primitives whose results have elements of their operands at other places, or only some of them.
CUTS = frozenset(
    "dynamic_slice dynamic_update_slice gather rev scatter scatter-add stack tile unstack".split()
)


def _moved(eqn: Any, pattern: Pattern, index: int) -> Pattern | None:
    moved = pattern.moved(MOVES[eqn.primitive.name](eqn))
    shape = eqn.outvars[index].aval.shape
    if moved and eqn.primitive.name in ("concatenate", "pad"):
        sizes = enumerate(eqn.invars[0].aval.shape)
        grown = {d: size for d, size in sizes if size < shape[d]} | dict(moved.beyond)
        beyond = tuple(sorted(grown.items()))
        return dataclasses.replace(moved, beyond=beyond) if pattern.kind in _LEFT else None
    if moved is None or eqn.primitive.name not in ("slice", "split"):
        return moved
    starts = [start for start, _, _ in slice_bounds(eqn, index)]
    left = ((d, size - starts[d]) for d, size in moved.beyond)
    moved = dataclasses.replace(moved, beyond=tuple((d, n) for d, n in left if n < shape[d]))
    if pattern.is_mask or pattern.kind in _LEFT:
        firsts = {sign: starts[dim] for dim, sign in pattern.terms}
        band = pattern.band.sliced(firsts[1], firsts[-1]) if firsts else pattern.band
        return dataclasses.replace(moved, band=band)
    offset = moved.offset + sum(sign * starts[dim] for dim, sign in pattern.terms)
    if pattern.kind == "table":
        is_number = all(shape[dim] == 1 for dim, _ in pattern.terms)
        return of_constant(pattern.table[int(offset)]) if is_number else _at(moved, offset)
    if pattern.kind == "positions":  # the index along a dimension of size 1 is 0
        terms = tuple((dim, sign) for dim, sign in moved.terms if shape[dim] != 1)
        moved = dataclasses.replace(moved, terms=terms)
    return _at(moved, offset)


def _at(pattern: Pattern, offset: float) -> Pattern:
    return dataclasses.replace(pattern, offset=offset)


def _sum(a: Pattern | None, b: Pattern | None, sign: int) -> Pattern | None:
    if a is None or b is None or not a.kind == b.kind == "positions":
        return None
    signs = dict(a.terms)
    for dim, other in b.terms:
        signs[dim] = signs.get(dim, 0) + sign * other
    terms = tuple(sorted((dim, s) for dim, s in signs.items() if s))
    return Pattern("positions", terms, a.offset + sign * b.offset)


def _divided(kind: PatternKind, eqn: Any, a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """A position divided by a number."""
    size = _number(b) if eqn.outvars[0].aval.dtype.kind in "iu" else None
    if a is None or size is None or size < 1 or size != int(size) or not _is_place(a):
        return None
    return dataclasses.replace(a, kind=kind, size=int(size))


def _sign(pattern: Pattern | None) -> Pattern | None:
    number = _number(pattern)
    if number is not None:
        return of_constant((number > 0) - (number < 0))
    return dataclasses.replace(pattern, kind="sign") if pattern and _is_place(pattern) else None


def _is_place(pattern: Pattern) -> bool:
    """Whether it is a whole position along one dimension that is never negative."""
    signs, offset = [sign for _, sign in pattern.terms], pattern.offset
    return pattern.kind == "positions" and signs == [1] and offset >= 0 and offset == int(offset)


def _compare_division(name: str, a: Pattern, b: Pattern) -> Pattern | None:
    """Whether two positions are in one chunk; and the tests of a division that rounds down."""
    number = _number(b)
    if a.kind == "sign" and name == "ne" and number == 1:
        return dataclasses.replace(a, kind="at_zero")
    if a.kind == "remainder" and name == "ne" and number == 0:
        return dataclasses.replace(a, kind="inexact")
    is_pair = a.kind == b.kind == "quotient" and a.size == b.size and a.terms != b.terms
    if not is_pair or name not in ("eq", "ne"):
        return None
    ((dim, _),), ((other, _),) = a.terms, b.terms
    chunks = Chunks(a.size, int(a.offset), int(b.offset))
    band = Band(chunks=chunks) if dim < other else Band(chunks=chunks).mirrored()
    terms = (min(dim, other), 1), (max(dim, other), -1)
    return Pattern("keeps" if name == "eq" else "drops", terms, band=band)


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
    if a.kind in ("sign", "remainder", "quotient"):
        return _compare_division(name, a, b)
    if a.kind == "distance" and number is not None:
        if name in ("gt", "ge"):
            return _inverted(_compare("le" if name == "gt" else "lt", a, b))
        place, least = dataclasses.replace(a, kind="positions"), of_constant(-number)
        sides = _compare(name, place, b), _compare(_COMPARISONS[name], place, least)
        return meet(*sides) if name in ("lt", "le") else None
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
    if a and b and {a.kind, b.kind} == {"at_zero", "inexact"}:
        is_same = (a.terms, a.offset) == (b.terms, b.offset)
        return of_constant(False) if is_same else None  # 0 is divided without a remainder
    masks = [mask for mask in (_as("keeps", a), _as("keeps", b)) if mask]
    both = meet(masks[0], masks[-1]) if masks else None
    if len(masks) == 2:
        return both
    return at_most(both) if both and both.terms else None


def meet(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The pairs kept by two masks that keep something; None keeps everything."""
    if a is None or b is None:
        return a or b
    partial = a.partial or b.partial
    if not a.terms or not b.terms:
        return dataclasses.replace(a if a.terms else b, partial=partial)
    if (a.terms, a.beyond) != (b.terms, b.beyond):
        return at_most(a)
    partial = partial or not a.band.meets(b.band)
    return dataclasses.replace(a, band=a.band & b.band, partial=partial)


def union(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The pairs kept by at least one of two masks that keep something, or more pairs.

    None keeps everything.
    """
    if a is None or b is None or a.kind != b.kind or not (a.terms or a.partial):
        return None
    if (a.terms, a.beyond) != (b.terms, b.beyond):
        return dataclasses.replace(UNKNOWN, kind=a.kind) if b.terms or b.partial else None
    band = a.band | b.band
    is_exact = any(mask.band == band and not mask.partial for mask in (a, b))
    touch = a.band.touches(b.band) and not (a.partial or b.partial)
    terms = () if band == _NO_BOUNDS else a.terms
    return dataclasses.replace(a, terms=terms, band=band, partial=not (is_exact or touch))


def choice(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The pairs kept by one of two masks that keep something, it is unknown by which one."""
    return a if a == b else at_most(union(a, b) or EVERYWHERE)


def one_of(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The pattern of a value that is one of two."""
    if a == b:
        return a
    if a and b and a.is_mask and b.is_mask:
        kept = _as("keeps", a), _as("keeps", b)
        return choice(*kept) if all(kept) else UNKNOWN
    for kind, left in _LEFT.items():
        if _is(a, kind) or _is(b, kind):
            regions = [left(value) for value in (a, b) if not _is_fill(kind, value)]
            same = regions[0] if len(regions) == 1 else None
            return _as_fill(kind, at_most(same) if same else choice(*regions))
    return UNKNOWN if any(p and _is_unsure(p) for p in (a, b)) else None


def at_most(mask: Pattern) -> Pattern:
    """The mask, which may keep fewer pairs."""
    return dataclasses.replace(mask, partial=True)


def _either(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The disjunction of two masks: it drops what both drop, or keeps what either keeps."""
    for mask, other in ((a, b), (b, a)):
        if mask and mask.is_mask and _number(other) == 0:
            return mask
    dropped = _both(_inverted(a), _inverted(b))
    if dropped and not dropped.partial:
        return _inverted(dropped)
    are_masks = a is not None and b is not None and a.is_mask and b.is_mask
    known = union(_as("keeps", a), _as("keeps", b)) or _inverted(dropped)
    return known or (UNKNOWN if are_masks and EVERYWHERE not in (a, b) else None)


def _product(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The product of two masks of zeros and ones, or of a mask and a very negative number."""
    if a and b and a.is_mask and b.is_mask:
        return _both(a, b)
    for mask, other in ((a, b), (b, a)):
        number = _number(other)
        if number is not None and number <= _VERY_NEGATIVE:
            return _as_fill("negative", kept_where(mask, False) or UNKNOWN)
    if zeros := _as_fill("zeros", meet(nonzero(a), nonzero(b))):
        return zeros
    for fill, other in ((a, b), (b, a)):
        number = _number(other)
        if _is(fill, "negative") and (number is None or number > 0):
            return fill
    return None


def _maximum(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """A rectifier: 0 of what is 0 or very negative. Or a bound that is very negative, too."""
    for fill, other in ((a, b), (b, a)):
        if _is_fill("zeros", other) and _is(fill, "zeros", "negative"):
            return _as_fill("zeros", fill)
        if _is_fill("negative", other) and _is(fill, "negative"):
            return fill
    return None


def _is(pattern: Pattern | None, *kinds: PatternKind) -> bool:
    return pattern is not None and pattern.kind in kinds


def _as_fill(kind: Fill, region: Pattern | None = None) -> Pattern | None:
    """The value that is filled outside the pairs kept; None if all are."""
    if region is None or not (region.terms or region.partial):
        return None
    return dataclasses.replace(region, kind=kind)


def _region(pattern: Pattern | None, *kinds: PatternKind) -> Pattern | None:
    """As a mask, the pairs that a fill of one of these kinds leaves; None for all."""
    if pattern is None or pattern.kind not in kinds:
        return None
    return dataclasses.replace(pattern, kind="keeps")


def nonzero(pattern: Pattern | None) -> Pattern | None:
    """As a mask, the pairs outside which a value is 0; None for all."""
    if pattern is not None and pattern.is_mask:
        return kept_where(pattern, True) or UNKNOWN
    return _region(pattern, "zeros")


def not_negative(pattern: Pattern | None) -> Pattern | None:
    """As a mask, the pairs outside which a value is very negative; None for all."""
    return _region(pattern, "negative")


def _added(a: Pattern | None, b: Pattern | None, sign: int) -> Pattern | None:
    """A sum with a very negative operand, or of values that are 0 at the same pairs."""
    if negative := meet(not_negative(a), not_negative(b) if sign > 0 else None):
        return _as_fill("negative", negative)
    return _as_fill("zeros", union(nonzero(a), nonzero(b)))


def chosen_where(mask: Pattern | None, value: bool, other: Pattern | None) -> Pattern | None:
    """Where a select with this predicate chooses the operand for `value`; None for everywhere.

    An unknown predicate is a mask only if the other operand is very negative.
    """
    is_mask = _is_fill("negative", other) or (mask is not None and _is_unsure(mask))
    return kept_where(mask, value) or (UNKNOWN if is_mask else None)


def _filled(
    mask: Pattern | None, if_false: Pattern | None, if_true: Pattern | None
) -> Pattern | None:
    """A select where one value is 0 or very negative, or both are outside some pairs."""
    is_known = mask is not None and mask.is_mask
    for kind, left in _LEFT.items():
        if not any(_is_fill(kind, value) or left(value) for value in (if_false, if_true)):
            continue
        regions = [
            meet(chosen_where(mask, chosen, other), left(value))
            for chosen, value, other in (
                (False, if_false, if_true),
                (True, if_true, if_false),
            )
            if not _is_fill(kind, value)
        ]
        if len(regions) == 2:
            regions = [union(*regions) if is_known else choice(*regions)]
        if filled := _as_fill(kind, *regions):
            return filled
    return None


_LEFT: dict[Fill, Callable[[Pattern | None], Pattern | None]] = {
    "negative": not_negative,
    "zeros": nonzero,
}


def _is_fill(kind: Fill, pattern: Pattern | None) -> bool:
    number = _number(pattern)
    if number is None:
        return False
    return number == 0 if kind == "zeros" else number <= _VERY_NEGATIVE


def _select(
    eqn: Any, mask: Pattern | None, if_false: Pattern | None, if_true: Pattern | None
) -> Pattern | None:
    """A select between masks."""
    if _number(mask) == 0:
        return if_false
    if mask is None or not mask.is_mask:
        return one_of(if_false, if_true)
    is_bool = eqn.outvars[0].aval.dtype == bool
    for chosen, value, other in ((mask, if_true, if_false), (_inverted(mask), if_false, if_true)):
        is_one = _number(value) == 1
        if _number(other) == 0 and (is_bool or is_one or (value and value.is_mask)):
            return chosen if is_one else _both(chosen, value)
        if is_bool and is_one:
            return _either(chosen, other)
    return None


def _number(pattern: Pattern | None) -> float | None:
    """The value of a constant array."""
    if pattern == EVERYWHERE:
        return 1
    is_constant = pattern is not None and pattern.kind == "positions" and not pattern.terms
    return pattern.offset if pattern is not None and is_constant else None


def _converted(eqn: Any, pattern: Pattern | None) -> Pattern | None:
    is_lost = _is(pattern, "negative") and eqn.outvars[0].aval.dtype == bool
    return None if is_lost else pattern


def _zero_at_zero(eqn: Any, pattern: Pattern | None) -> Pattern | None:
    is_kept = _is(pattern, "zeros") and eqn.params.get("y", 1) > 0
    return pattern if is_kept else None


def _exponential(eqn: Any, pattern: Pattern | None) -> Pattern | None:
    """0 of a very negative number."""
    return _as_fill("zeros", pattern) if _is(pattern, "negative") else None


def _plus(sign: int, eqn: Any, a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if sign < 0 and _number(a) == 1 and b and b.is_mask:
        return _inverted(b)  # 1 − mask
    return _sum(a, b, sign) or _added(a, b, sign)


# The patterns of results, from the equation and its operands' patterns.
_RULES: dict[str, Callable[..., Pattern | None]] = {
    "iota": lambda eqn, *_: Pattern("positions", ((int(eqn.params["dimension"]), 1),)),
    "convert_element_type": _converted,
    **dict.fromkeys(("exp", "exp2", "logistic"), _exponential),
    **dict.fromkeys(("integer_pow", "neg", "real", "sqrt", "square", "tanh"), _zero_at_zero),
    "abs": lambda eqn, a: _zero_at_zero(eqn, a) or _absolute(a),
    "sign": lambda eqn, a: _zero_at_zero(eqn, a) or _sign(a),
    "max": lambda eqn, a, b: _maximum(a, b),
    "clamp": lambda eqn, least, a, most: _maximum(a, least),
    "min": lambda eqn, *both: _as_fill("negative", meet(*map(not_negative, both))),
    **dict.fromkeys(("add", "add_any"), functools.partial(_plus, 1)),
    "sub": functools.partial(_plus, -1),
    "div": lambda eqn, a, b: a if _is(a, "zeros", "negative") else _divided("quotient", eqn, a, b),
    "rem": functools.partial(_divided, "remainder"),
    **dict.fromkeys(_COMPARISONS, lambda eqn, a, b: _compare(eqn.primitive.name, a, b)),
    "and": lambda eqn, a, b: _both(a, b),
    "or": lambda eqn, a, b: _either(a, b),
    "mul": lambda eqn, a, b: _product(a, b),
    "not": lambda eqn, a: _inverted(a) if eqn.outvars[0].aval.dtype == bool else None,
    "select_n": lambda eqn, *given: (
        _select(eqn, *given) or _filled(*given) if len(given) == 3 else None
    ),
}
