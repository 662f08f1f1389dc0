"""What the interpreter of a jaxpr knows about a value without its data."""

from __future__ import annotations

import enum
from collections.abc import Iterable
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
    """A product of two activations, whose elements may be query-key pairs under a mask."""

    number: int
    size: int


class AbstractValue(NamedTuple):
    """What is known about a value from how it was computed.

    Attributes:
        origin: what it was computed from.
        known: its value, if known while tracing (see `known_values`) and it decides how often
            something runs.
        pattern: its elements as a function of their position (see `masks.patterns`).
        scores: the scores that its elements correspond to one to one.
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

    def stacked(self, times: int, dims: int) -> AbstractValue:
        """`times` such values stacked (`dims` = 1), or of one slice of a stack (−1)."""
        pattern = self.pattern and self.pattern.moved(
            lambda dim: dim + dims if dim + dims >= 0 else None
        )
        scores = (
            Score(score.number, score.size * times if dims > 0 else score.size // times)
            for score in self.scores
        )
        return self._replace(known=None, pattern=pattern, scores=frozenset(scores))


INPUT = AbstractValue(Origin.INPUT)
Values = list[AbstractValue]


def of_constant(value: Known, origin: Origin = Origin.CONSTANT) -> AbstractValue:
    """A literal, or a constant array in the traced function."""
    return AbstractValue(origin, known=value, pattern=mask_patterns.of_constant(value))


def join(values: Iterable[AbstractValue], size: int | None = None) -> AbstractValue:
    """What is known about a value of `size` elements computed from these values."""
    values = tuple(values)
    return AbstractValue(
        origin=max((value.origin for value in values), default=Origin.CONSTANT),
        scores=frozenset(s for value in values for s in value.scores if s.size == size),
    )


def either(a: AbstractValue, b: AbstractValue) -> AbstractValue:
    """What is known about a value that is one of two."""
    if a == b:
        return a
    return join((a, b))
