"""What the interpreter of a jaxpr knows about a value without its data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.patterns import Pattern


class Origin(enum.IntEnum):
    """What a value was computed from; if several apply, the greatest wins."""

    CONSTANT = 0
    INPUT = 1  # parameters and inputs of the model, cast, reshaped, scaled
    ACTIVATION = 2  # the result of some matmul


class Score(NamedTuple):
    """A product of two activations in an array whose elements depend on it one by one.

    Attributes:
        number: identifies the product.
        axes: where each of its dimensions lies in the array; None if that is not known.
        needs: a mask over its dimensions that keeps what the array depends on; None for all.
        is_cut: whether the array lacks some of its elements.
    """

    number: int
    axes: tuple[int | None, ...]
    needs: Pattern | None = None
    is_cut: bool = False

    def moved(self, where: Callable[[int], int | None]) -> Score:
        """The score in an array to which every dimension is mapped by `where`."""
        return self._replace(
            axes=tuple(None if axis is None else where(axis) for axis in self.axes)
        )

    def limited(self, mask: Pattern | None) -> Score:
        """The score in an array that depends only on the pairs that a mask over it keeps."""
        if mask is None:
            return self
        dims = {axis: dim for dim, axis in enumerate(self.axes) if axis is not None}
        if own := mask.moved(dims.get):
            return self._replace(needs=mask_patterns.meet(self.needs, own))
        return self._replace(needs=mask_patterns.at_most(self.needs or mask_patterns.EVERYWHERE))


class AbstractValue(NamedTuple):
    """What is known about a value from how it was computed.

    Attributes:
        origin: what it was computed from.
        known: its value, if known while tracing (see `known_values`) and it decides how often
            something runs.
        pattern: its elements as a function of their position (see `masks.patterns`).
        scores: the scores that its elements depend on one to one.
    """

    origin: Origin = Origin.CONSTANT
    known: Known = None
    pattern: Pattern | None = None
    scores: frozenset[Score] = frozenset()

    def without_value(self) -> AbstractValue:
        """The same value without `known`."""
        return self if self.known is None else self._replace(known=None)

    def with_known(self, known: Known) -> AbstractValue:
        """The same value with this `known`."""
        return self if self.known is known else self._replace(known=known)

    def without_scores(self) -> AbstractValue:
        """The same value, whose elements correspond to no score."""
        return self._replace(scores=frozenset()) if self.scores else self

    def stacked(self, dims: int) -> AbstractValue:
        """A stack of such values (`dims` = 1), or one slice of a stack (−1)."""

        def where(dim: int) -> int | None:
            return dim + dims if dim + dims >= 0 else None

        return self.without_value().moved(where)

    def in_parts(self, whole: Sequence[int], part: Sequence[int]) -> AbstractValue:
        """A part of the value on one device, or the value that such parts are."""
        return self.moved(lambda dim: dim if whole[dim] == part[dim] else None)

    def moved(self, where: Callable[[int], int | None]) -> AbstractValue:
        """The value in an array to which every dimension is mapped by `where`."""
        pattern = self.pattern
        pattern = pattern and (pattern.moved(where) or mask_patterns.unfollowed(pattern))
        return self._replace(
            pattern=pattern, scores=frozenset(score.moved(where) for score in self.scores)
        )


Merge = Callable[[Pattern | None, Pattern | None], Pattern | None]
INPUT = AbstractValue(Origin.INPUT)
Values = list[AbstractValue]


def of_constant(value: Known, origin: Origin = Origin.CONSTANT) -> AbstractValue:
    """A literal, or a constant array in the traced function."""
    return AbstractValue(origin, known=value, pattern=mask_patterns.of_constant(value))


def join(values: Iterable[AbstractValue]) -> AbstractValue:
    """What is known about a value computed from these values."""
    return AbstractValue(max((value.origin for value in values), default=Origin.CONSTANT))


def either(a: AbstractValue, b: AbstractValue) -> AbstractValue:
    """What is known about a value that is one of two."""
    if a == b:
        return a
    pattern = mask_patterns.one_of(a.pattern, b.pattern)
    scores = merged((*a.scores, *b.scores), mask_patterns.choice)
    return join((a, b))._replace(pattern=pattern, scores=scores)


def merged(scores: Iterable[Score], merge: Merge = mask_patterns.union) -> frozenset[Score]:
    """Scores with each product once, None as axes where they differ.

    Args:
        scores: all that an array depends on.
        merge: of two masks, the pairs that are needed.
    """
    found: dict[int, Score] = {}
    for score in scores:
        if before := found.get(score.number):
            pairs = zip(before.axes, score.axes, strict=True)
            axes = tuple(a if a == b else None for a, b in pairs)
            needs, is_cut = merge(before.needs, score.needs), before.is_cut or score.is_cut
            score = Score(score.number, axes, needs, is_cut)
        found[score.number] = score
    return frozenset(found.values())
