"""Follows query-key products through a jaxpr, and the masks applied to them.

A product needs the pairs on which anything depends: the union over its consumers. A matmul that
reads masked scores or their probabilities needs the pairs where that operand is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mfu_jax.flops.traced.abstract_values import AbstractValue, Origin, Score, merged
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.declared import declared_pairs, pairs_around
from mfu_jax.flops.traced.masks.pairs import KeptPairs, kept_pairs, unknown_pairs
from mfu_jax.flops.traced.masks.patterns import DimMap, Pattern

# Possible origins of operands of a score matmul; the cotangent of a plain sum is a constant.
_NO_PARAMETERS = {Origin.CONSTANT, Origin.ACTIVATION}
# Primitives that make or use scores. A factorisation's triangle is not a mask over its work.
_PRODUCTS = {"dot_general", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"}
# Primitives of which an element depends only on the operands' elements at the same position.
_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 bitcast_convert_type cbrt ceil clamp convert_element_type cos cosh "
    "div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p "
    "log2 logistic lt max min mul ne neg nextafter not one_minus_square or polynomial pow pvary "
    "real rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor".split()
)


class ScoreMasks:
    """The matmuls that may be attention scores, by number, and their masks.

    Attributes:
        is_recording: whether what is followed now is counted.
        made: number of matmuls that may be scores.
        first_sure: what is followed now may not run, as far as scores before this one know.
    """

    def __init__(self) -> None:
        self.is_recording = True
        self.made = self.first_sure = 0
        self._masks: dict[int, KeptPairs] = {}  # declared, or a kernel's
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._needs: dict[int, Pattern | None] = {}
        self._shared: set[int] = set()
        self._cut: set[int] = set()
        self._whole: set[int] = set()

    @property
    def masks(self) -> dict[int, KeptPairs]:
        """The pairs kept by a recognised or declared mask."""
        found = dict(self._masks)
        for number, needs in self._needs.items():
            kept = _kept(needs, self._shapes[number])
            if kept and (number not in found or found[number].yields_to(kept)):
                found[number] = kept
        for number in self._cut - self._whole:
            found.setdefault(number, unknown_pairs(math.prod(self._shapes[number]), has_mask=False))
        return found

    def of_matmul(
        self, eqn: Any, operands: Sequence[AbstractValue], stack: str
    ) -> tuple[tuple[int, ...], KeptPairs | None, frozenset[Score]]:
        """What a matmul does with scores.

        Returns:
            Numbers of the masked scores that it uses, and the pairs that it needs; or the number of
            those that it makes, and the scores.
        """
        if eqn.primitive.name not in _PRODUCTS:
            return (), None, frozenset()
        used = [
            (tuple(sorted(score.number for score in value.scores)), kept)
            for value, variable in zip(operands, eqn.invars, strict=False)
            if (kept := self._used(value, variable.aval.shape))
        ]
        if used:
            return *min(used, key=lambda each: each[1].exact / each[1].of), frozenset()
        origins = {value.origin for value in operands}
        # Queries, keys and values are activations, or arguments of a function that computes only
        # attention. A declared mask applies only to these: projections share its scope.
        is_activations = origins <= _NO_PARAMETERS
        is_arguments = origins == {Origin.INPUT}
        if not (is_activations or is_arguments or is_batched(eqn)):
            return (), None, frozenset()
        is_attention = is_activations or (is_arguments and is_batched(eqn))
        number = self.new(stack, _pair_sizes(eqn) if is_attention else None)
        self._shapes[number] = shape = eqn.outvars[0].aval.shape
        return (number,), None, frozenset({Score(number, tuple(range(len(shape))))})

    def _used(self, value: AbstractValue, shape: tuple[int, ...]) -> KeptPairs | None:
        """The pairs that a matmul needs of an operand; None without scores or a mask."""
        if not value.scores:
            return None
        kept = _kept(mask_patterns.nonzero(value.pattern), shape)
        for score in value.scores:
            declared = self._masks.get(score.number)
            if declared and not (kept and declared.yields_to(kept)):
                kept = declared
        return kept

    def new(self, stack: str, sizes: tuple[int, int] | None, kept: KeptPairs | None = None) -> int:
        """Numbers a new matmul.

        Args:
            stack: the name stack around it.
            sizes: (queries, keys) if it is attention.
            kept: the pairs that it keeps, if no mask is declared for it or around it.
        """
        number = self.made
        self.made += 1
        if sizes is not None:
            if declared := declared_pairs(stack, *sizes):
                self._masks[number] = declared
            elif around := pairs_around(*sizes):  # masks recognised in the function override it
                self._masks[number] = around._replace(declared=False)
        if kept is not None:
            self._masks.setdefault(number, kept)
        return number

    def mask(self, number: int, kept: KeptPairs) -> None:
        """Records the pairs that a kernel's own mask keeps."""
        if number not in self._masks or self._masks[number].yields_to(kept):
            self._masks[number] = kept

    def share(self, results: Iterable[AbstractValue], operands: Iterable[AbstractValue]) -> None:
        """Records that another call makes the scores in these results under the same numbers."""
        given = {score.number for value in operands for score in value.scores}
        made = {score.number for value in results for score in value.scores}
        self._shared |= made - given

    def use(self, values: Iterable[AbstractValue]) -> None:
        """Records that everything that these values depend on is needed."""
        for score in (s for value in values if self.is_recording for s in value.scores):
            needs = score.needs
            (self._cut if score.is_cut else self._whole).add(score.number)
            if needs and score.is_cut:
                needs = mask_patterns.at_most(needs)
            if score.number < self.first_sure:
                needs = mask_patterns.at_most(needs or mask_patterns.EVERYWHERE)
            if score.number in self._needs and (before := self._needs[score.number]) != needs:
                needs = mask_patterns.union(before, needs)
                if needs and score.number in self._shared:
                    needs = mask_patterns.at_most(needs)
            self._needs[score.number] = needs

    def follow(self, eqn: Any, values: Sequence[AbstractValue], index: int = 0) -> frozenset[Score]:
        """The scores in a result of an equation that does no work; records what it uses."""
        if not any(value.scores for value in values):
            return frozenset()
        name, result = eqn.primitive.name, eqn.outvars[0]
        if name in mask_patterns.MOVES or name in mask_patterns.CUTS:
            return self._moved(eqn, values, index)
        found: list[Score] = []
        for index, (value, variable) in enumerate(zip(values, eqn.invars, strict=True)):
            if name in _ELEMENTWISE and variable.aval.shape == result.aval.shape:
                limit = _limit(name, index, [value.pattern for value in values])
                found += [score.limited(limit) for score in value.scores]
            else:
                self.use([value])
        is_choice = name == "select_n" and values[0].pattern is None
        scores = merged(found, mask_patterns.choice if is_choice else mask_patterns.union)
        if name == "mul":  # in the softmax's gradient, with a cotangent
            known = [self._masks[s.number] for s in scores if s.number in self._masks]
            for score in scores if known else ():
                self._masks.setdefault(score.number, known[0])
        return scores

    def _moved(self, eqn: Any, values: Sequence[AbstractValue], index: int) -> frozenset[Score]:
        """The scores in a result of an equation that moves elements or leaves some out."""
        nowhere: DimMap = lambda d: None  # noqa: E731
        where = mask_patterns.MOVES.get(eqn.primitive.name, lambda eqn: nowhere)(eqn)
        found = [
            score.moved(nowhere if operand else where)._replace(
                is_cut=score.is_cut or self._cuts(eqn, score, index)
            )
            for operand, value in enumerate(values)
            for score in value.scores
        ]
        return merged(found)

    def _cuts(self, eqn: Any, score: Score, index: int) -> bool:
        """Whether an equation leaves elements of its first operand out that depend on a score."""
        name, sizes = eqn.primitive.name, eqn.invars[0].aval.shape
        if name == "pad":
            return any(low < 0 or high < 0 for low, high, _ in eqn.params["padding_config"])
        if name not in ("slice", "split"):
            return name in mask_patterns.CUTS - {"rev", "scatter-add", "stack", "tile"}
        own = dict(zip(score.axes, self._shapes[score.number], strict=True))
        return any(
            start > 0 or end < own.get(d, sizes[d]) or stride != 1
            for d, (start, end, stride) in enumerate(mask_patterns.slice_bounds(eqn, index))
        )


def _limit(name: str, index: int, patterns: Sequence[Pattern | None]) -> Pattern | None:
    """A mask that keeps where a result depends on an operand; None for everywhere."""
    if name == "select_n" and len(patterns) == 3 and index:
        return mask_patterns.chosen_where(patterns[0], index == 2, patterns[3 - index])
    if name == "mul":  # the cotangent of a probability of 0 is not needed
        return mask_patterns.nonzero(patterns[1 - index])
    if name == "div" and index:
        return mask_patterns.nonzero(patterns[0])
    if name in ("add", "add_any") or (name == "sub" and index):
        return mask_patterns.not_negative(patterns[1 - index])
    return None


def _kept(mask: Pattern | None, shape: Sequence[int]) -> KeptPairs | None:
    """The pairs that a mask over an array keeps; None if it keeps all."""
    if mask is None:
        return None
    is_more = any(size < shape[dim] for dim, size in mask.beyond)
    if not mask.terms or is_more:
        return unknown_pairs(math.prod(shape)) if mask.partial or is_more else None
    (a, _), (b, _) = mask.terms
    return kept_pairs(mask.band, shape[a], shape[b], is_bound=mask.partial)


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
