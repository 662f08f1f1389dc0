"""Follows query-key products through a jaxpr, and the masks applied to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfu_jax.flops.traced.abstract_values import AbstractValue, Origin, Score
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.declared import declared_around, declared_mask
from mfu_jax.flops.traced.masks.pairs import Band, KeptPairs, kept_pairs
from mfu_jax.flops.traced.masks.patterns import Pattern

# Possible origins of operands of a score matmul; the cotangent of a plain sum is a constant.
_NO_PARAMETERS = {Origin.CONSTANT, Origin.ACTIVATION}
# Primitives that make or use scores. A factorisation's triangle is not a mask over its work.
_PRODUCTS = {"dot_general", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"}


class ScoreMasks:
    """The matmuls that may be attention scores, by number, and their masks.

    Attributes:
        masks: the pairs kept by a recognised or declared mask.
        unknown: the scores under a mask that depends on data.
    """

    def __init__(self) -> None:
        self.masks: dict[int, KeptPairs] = {}
        self.unknown: set[int] = set()
        self._bands: dict[int, tuple[Band, int, int]] = {}
        self._made = 0

    def of_matmul(
        self, eqn: Any, operands: Sequence[AbstractValue], stack: str
    ) -> tuple[tuple[int, ...], frozenset[Score]]:
        """Numbers of the masked scores that a matmul uses or, if none, of those that it makes."""
        if eqn.primitive.name not in _PRODUCTS:
            return (), frozenset()
        numbers = {s.number for value in operands for s in value.scores}
        used = tuple(sorted(numbers & (self.masks.keys() | self.unknown)))
        if used:
            return used, frozenset()
        origins = {value.origin for value in operands}
        # Queries, keys and values are activations, or arguments of a function that computes only
        # attention. A declared mask applies only to these: projections share its scope.
        is_activations = origins <= _NO_PARAMETERS
        is_arguments = origins == {Origin.INPUT}
        if not (is_activations or is_arguments or is_batched(eqn)):
            return (), frozenset()
        is_attention = is_activations or (is_arguments and is_batched(eqn))
        number = self.new(stack, _pair_sizes(eqn) if is_attention else None)
        return (number,), frozenset({Score(number, eqn.outvars[0].aval.size)})

    def new(self, stack: str, sizes: tuple[int, int] | None, kept: KeptPairs | None = None) -> int:
        """Numbers a new matmul.

        Args:
            stack: the name stack around it.
            sizes: (queries, keys) if it is attention.
            kept: the pairs that it keeps, if no mask is declared for it or around it.
        """
        number = self._made
        self._made += 1
        if sizes is not None:
            if declared := declared_mask(stack):
                self.masks[number] = declared.kept(*sizes)
            elif declared := declared_around():  # masks recognised in the function override it
                self.masks[number] = declared.kept(*sizes)._replace(declared=False)
        if kept is not None:
            self.masks.setdefault(number, kept)
        return number

    def mask(self, number: int, band: Band, queries: int, keys: int) -> None:
        """Removes the pairs that a band drops from a score matmul."""
        if number in self.masks and self.masks[number].declared:
            return
        before, *_ = self._bands.get(number, (Band(),))
        self._bands[number] = (before & band, queries, keys)
        self.masks[number] = kept_pairs(before & band, queries, keys)

    def follow(self, eqn: Any, values: Sequence[AbstractValue], result: AbstractValue) -> None:
        """Records the masks that an elementwise equation applies to the scores in its result."""
        if not result.scores:
            return
        for value, variable in zip(values, eqn.invars, strict=True):
            mask = value.pattern and _kept(eqn, value.pattern, values, result)
            if mask and mask.terms:
                (a, _), (b, _) = mask.terms
                shape = variable.aval.shape
                for score in result.scores:
                    self.mask(score.number, mask.band, shape[a], shape[b])
        numbers = {score.number for score in result.scores}
        if _is_unknown_mask(eqn, values, result):
            self.unknown |= numbers
        if eqn.primitive.name == "mul" and len(result.scores) > 1:
            # In the softmax's gradient, the cotangent of a probability of 0 is not needed.
            if numbers & self.unknown:
                self.unknown |= numbers
            for band in [self._bands[n] for n in numbers if n in self._bands]:
                for number in numbers:
                    self.mask(number, *band)
            known = [self.masks[n] for n in numbers if n in self.masks]
            for number in numbers if known else ():
                self.masks.setdefault(number, known[0])


def _kept(
    eqn: Any, pattern: Pattern, values: Sequence[AbstractValue], result: AbstractValue
) -> Pattern | None:
    """The pairs that remain scores under this operand pattern; None if it removes none."""
    name = eqn.primitive.name
    if name == "add":
        return pattern if pattern.kind == "bias" else None
    if name == "mul":
        return mask_patterns.kept_where(pattern, True)
    if name == "select_n" and len(values) == 3 and pattern is values[0].pattern:
        with_scores = [bool(value.scores & result.scores) for value in values[1:]]
        if with_scores.count(True) != 1:
            return None  # a choice between scores that are all needed
        value = with_scores.index(True) == 1
        other = values[1 if value else 2]
        is_filled = other.origin != Origin.ACTIVATION
        return mask_patterns.kept_where(pattern, value) if is_filled else None
    return None


def _is_unknown_mask(eqn: Any, values: Sequence[AbstractValue], result: AbstractValue) -> bool:
    """Whether it drops pairs from scores by a mask that depends on data."""
    if eqn.primitive.name == "add":
        return any(value.pattern == mask_patterns.UNKNOWN_BIAS for value in values)
    if eqn.primitive.name != "select_n" or len(values) != 3:
        return False
    mask, *cases = values
    filled = [case for case in cases if not case.scores & result.scores]
    is_known = mask.pattern is not None and _kept(eqn, mask.pattern, values, result) is not None
    return len(filled) == 1 and mask_patterns.is_very_negative(filled[0].pattern) and not is_known


def _pair_sizes(eqn: Any) -> tuple[int, int]:
    """Queries and keys of a score matmul: equal free sizes if any, else the largest."""
    if eqn.primitive.name != "dot_general":
        return 1, 1
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    queries = [n for d, n in enumerate(lhs) if d not in (*lhs_contracted, *lhs_batch)]
    keys = [n for d, n in enumerate(rhs) if d not in (*rhs_contracted, *rhs_batch)]
    candidates = [(q, k) for q in queries or [1] for k in keys or [1]]
    return max(candidates, key=lambda pair: (pair[0] == pair[1], pair[0] * pair[1]))


def is_batched(eqn: Any) -> bool:
    """Whether both operands of a ``dot_general`` have a batch dimension."""
    numbers = eqn.params.get("dimension_numbers")
    return eqn.primitive.name == "dot_general" and bool(numbers[1][0])
