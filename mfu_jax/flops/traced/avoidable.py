"""Matmuls of a jaxpr that a compiler may avoid.

Two equations have one value if primitive, parameters and operands are equal (common
subexpressions); two products are one if only the order of operands or dimensions differs, or their
dimensions of size 1. What depends on nothing that a loop changes is equal in all of its iterations.
Of rows that a broadcast made alike, one product is needed. A product without a sum, one of whose
operands has no dimension of its own, only scales the other one: it is a multiplication. In what is
not followed (branches, `while` loops, shards, kernels, groups that depend on data), nothing is
avoidable.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from mfu_jax.flops.count import operation
from mfu_jax.flops.scopes import read_scope
from mfu_jax.flops.traced.jaxprs import inner_jaxprs, interpret, is_call, scan_of, stack_below
from mfu_jax.flops.traced.kernels.ragged import RAGGED_DOTS
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.flops.undifferentiated import Purpose
from mfu_jax.util.jax_internals import Literal

_ELEMENTWISE = frozenset(
    "add convert_element_type copy div exp integer_pow log logistic max min mul neg "
    "one_minus_square reduce_precision rsqrt sharding_constraint sub tanh".split()
)
_KEPT_APART = "optimization_barrier"
_NEW = -1  # a dimension that no dimension of another array corresponds to
_UNCHANGED = frozenset({"name", "stop_gradient"})


class _Value(NamedTuple):
    """One value: equal ones have the same number.

    Attributes:
        number: identifies it.
        depth: how many of the enclosing loops change it.
        alike: dimensions along which all of its elements are equal, as a broadcast made them.
    """

    number: int
    depth: int
    alike: frozenset[int] = frozenset()


def avoidable_work(jaxpr: Any, purpose: Callable[[Any], Purpose | None]) -> dict[str, int]:
    """FLOPs of matmuls that a compiler may avoid, keyed as `FlopCount.by_operation`.

    Args:
        jaxpr: the open jaxpr of a whole function.
        purpose: of a matmul that is not differentiated.
    """
    numbering = _Numbering(purpose)
    numbering.walk(jaxpr, [numbering.new() for _ in jaxpr.invars], "")
    return dict(numbering.repeated)


class _Numbering:
    """Numbers the values of a jaxpr in order, and adds up what is computed again."""

    def __init__(self, purpose: Callable[[Any], Purpose | None]) -> None:
        self.purpose = purpose
        self.repeated: Counter[str] = Counter()
        self.lengths: list[int] = []  # of the enclosing loops, the outermost first
        self._values: dict[Hashable, _Value] = {}
        self._products: set[Hashable] = set()
        # Of a rearranged value: what it rearranges, and the dimension there of each of its own.
        self._rearranged: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._numbers = itertools.count()

    def new(self) -> _Value:
        """A value that equals no other one."""
        return _Value(next(self._numbers), len(self.lengths))

    def walk(self, jaxpr: Any, given: Sequence[_Value], stack: str) -> list[_Value]:
        """Numbers a jaxpr's values, given those of its inputs; returns those of its results."""

        def fixed(atom: Any) -> _Value:
            if isinstance(atom, Literal):
                return self._of(("literal", str(atom.aval), str(atom.val)), ())
            return self._of(("constant", atom), ())

        known = dict(zip(jaxpr.invars, given, strict=True))
        return interpret(jaxpr, known, fixed, lambda eqn, on: self._equation(eqn, on, stack))

    def _of(
        self, key: Hashable, operands: Sequence[_Value], alike: frozenset[int] = frozenset()
    ) -> _Value:
        """The value of an expression."""
        if key not in self._values:
            depth = max((operand.depth for operand in operands), default=0)
            self._values[key] = _Value(next(self._numbers), depth, alike)
        return self._values[key]

    def _equation(self, eqn: Any, given: list[_Value], stack: str) -> list[_Value]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, given, stack_below(stack, eqn))
        if is_call(eqn) and name not in RULES:
            ((jaxpr,),) = inner_jaxprs(eqn.params).values()
            if len(jaxpr.invars) == len(given) and len(jaxpr.outvars) == len(eqn.outvars):
                return self.walk(jaxpr, given, stack_below(stack, eqn))
        if name in _UNCHANGED:
            return given
        is_opaque = bool(eqn.effects) or bool(inner_jaxprs(eqn.params))
        if is_opaque or name == _KEPT_APART or name in RAGGED_DOTS:
            return [self.new() for _ in eqn.outvars]
        key = (name, _hashable(eqn.params), tuple(value.number for value in given))
        if name in RULES:
            self._matmul(eqn, key, given, stack)
        alike = _alike(eqn, given)
        if (sources := _sources(eqn)) is not None:
            whole, dims = self._origin(given[0], len(eqn.invars[0].aval.shape))
            value = self._of((key, 0), given, alike)
            own = tuple(_NEW if d == _NEW else dims[d] for d in sources)
            self._rearranged[value.number] = (whole, own)
            return [value]
        return [self._of((key, index), given, alike) for index in range(len(eqn.outvars))]

    def _origin(self, value: _Value, rank: int) -> tuple[int, tuple[int, ...]]:
        return self._rearranged.get(value.number, (value.number, tuple(range(rank))))

    def _product(self, eqn: Any, given: Sequence[_Value]) -> Hashable:
        """A key of a product that is the same for all orders of operands and dimensions."""
        params = dict(eqn.params)
        summed, batch = params.pop("dimension_numbers")
        sides = [self._origin(v, len(o.aval.shape)) for v, o in zip(given, eqn.invars, strict=True)]
        (left, dims), (right, dims_of_right) = sides
        pairs = [
            [(dims[i], dims_of_right[j]) for i, j in zip(*both, strict=True)]
            for both in (summed, batch)
        ]
        swapped = [[(j, i) for i, j in both] for both in pairs]
        forms = [
            (*ends, *(tuple(sorted(both)) for both in found))
            for ends, found in (((left, right), pairs), ((right, left), swapped))
        ]
        return min(forms), _hashable(params)

    def _matmul(self, eqn: Any, key: Hashable, given: Sequence[_Value], stack: str) -> None:
        needed = Fraction(0)
        is_dot = eqn.primitive.name == "dot_general"
        product = self._product(eqn, given) if is_dot else key
        is_new = product not in self._products
        self._products.add(product)
        if is_new and not _only_scales(eqn):
            needed = Fraction(math.prod(self.lengths[: max(value.depth for value in given)]))
            needed /= math.prod(eqn.outvars[0].aval.shape[d] for d in _alike(eqn, given))
        if again := math.prod(self.lengths) - needed:
            stack = stack_below(stack, eqn)
            phase, scope = read_scope(stack, drop_last=False)
            if phase == "forward" and "jvp(" not in stack:
                phase = self.purpose(eqn) or phase
            name = operation(phase, scope, eqn.primitive.name)
            self.repeated[name] += int(again * RULES[eqn.primitive.name](eqn))

    def _scan(self, eqn: Any, given: list[_Value], stack: str) -> list[_Value]:
        scan = scan_of(eqn)
        start = scan.consts + scan.carries
        self.lengths.append(scan.length)
        loop = self.new()
        inputs = [
            *given[: scan.consts],
            *(
                before if after is carried else self.new()
                for before, carried, after in zip(
                    given[scan.consts : start],
                    scan.body.invars[scan.consts : start],
                    scan.body.outvars,
                    strict=False,
                )
            ),
            *(self._of(("slice", loop, whole.number), (loop,)) for whole in given[start:]),
        ]
        self.walk(scan.body, inputs, stack)
        self.lengths.pop()
        return [self.new() for _ in eqn.outvars]


def _sources(eqn: Any) -> Sequence[int] | None:
    """The dimension of the operand that each one of the result is, if all elements stay.

    It is `_NEW` for one of size 1 that is added; others of size 1 may go. None if elements change,
    or if a dimension is divided or joined.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "transpose":
        return params["permutation"]
    if name not in ("broadcast_in_dim", "reshape", "squeeze"):
        return None
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
    large = [d for d, size in enumerate(before) if size > 1]
    if [before[d] for d in large] != [size for size in after if size > 1]:
        return None
    left = iter(large)
    return [next(left) if size > 1 else _NEW for size in after]


def _alike(eqn: Any, given: Sequence[_Value]) -> frozenset[int]:
    """The dimensions along which all elements of an equation's result are equal."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    found: Iterable[int] = ()
    if name == "broadcast_in_dim":
        kept = dict(enumerate(params["broadcast_dimensions"]))
        spread = {
            to
            for of, to in kept.items()
            if shapes[0][of] < params["shape"][to] or of in given[0].alike
        }
        found = spread.union(range(len(params["shape"]))).difference(set(kept.values()) - spread)
    elif name in ("transpose", "reshape"):
        found = (to for to, of in enumerate(_sources(eqn) or ()) if of in given[0].alike)
    elif name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        free = len(batch[0])
        found = [i for i, of in enumerate(zip(*batch, strict=True)) if _both(of, given)]
        for side in (0, 1):
            summed = {*contracted[side], *batch[side]}
            for dimension in sorted(set(range(len(shapes[side]))) - summed):
                found += [free] if dimension in given[side].alike else []
                free += 1
    elif name in _ELEMENTWISE:
        arrays = [value.alike for value, shape in zip(given, shapes, strict=True) if shape]
        found = frozenset.intersection(*arrays) if arrays else ()
    return frozenset(found)


def _both(dimensions: tuple[int, int], given: Sequence[_Value]) -> bool:
    return all(d in value.alike for d, value in zip(dimensions, given, strict=False))


def _only_scales(eqn: Any) -> bool:
    """Whether one operand of a product without a sum has no dimension of its own.

    A dimension of size 1 is none.
    """
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [operand.aval.shape for operand in eqn.invars[:2]]
    has_sum = any(shapes[0][d] != 1 for d in contracted[0])
    own = (
        [n for d, n in enumerate(shape) if n != 1 and d not in (*summed, *alike)]
        for shape, summed, alike in zip(shapes, contracted, batch, strict=True)
    )
    return not has_sum and not all(own)


def _hashable(params: Mapping[str, Any]) -> Hashable:
    """Parameters as a key; what cannot be compared equals only itself."""
    found = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
        except TypeError:
            value = id(value)
        found.append((name, value))
    return tuple(found)
