"""What an integer HLO instruction computes, with the exact arithmetic of its dtype.

A value is an int (any array of one element), a `Table` (a small array), or None: not known, because
it depends on data or on an instruction that is not evaluated. Division by zero is not known either:
HLO leaves its result to the hardware.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule, Shape
from mfu_jax.flops.executed.hlo_shapes import COMMENT

MAX_ELEMENTS = 1 << 14  # of a table: the pattern of a model's layers is far smaller
_DTYPE = re.compile(r"(s|u)(2|4|8|16|32|64)")


class Table:
    """A small array of integers in row-major order; compared by identity, which is cheap."""

    __slots__ = ("elements",)

    def __init__(self, elements: Sequence[int]) -> None:
        self.elements = tuple(elements)


Value: TypeAlias = "int | Table | None"
Compute: TypeAlias = Callable[[list[Value]], Value]
Wrap: TypeAlias = Callable[[int], int]


@functools.lru_cache(maxsize=64)
def value_range(dtype: str) -> tuple[int, int] | None:
    """The smallest and largest value of an integer dtype; None for other dtypes.

    >>> value_range("s8"), value_range("f32")
    ((-128, 127), None)
    """
    if dtype == "pred":
        return 0, 1
    match = _DTYPE.fullmatch(dtype)
    if not match:
        return None
    bits = int(match[2])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if match[1] == "s" else (0, (1 << bits) - 1)


@functools.lru_cache(maxsize=64)
def _wrap(dtype: str) -> Wrap:
    """Reduces an integer to the values of a dtype, as overflow does."""
    low, high = value_range(dtype) or (0, 0)
    if dtype == "pred":
        return lambda value: int(value != 0)
    return lambda value: (value - low) % (high - low + 1) + low


def wrapped(dtype: str, value: int) -> int:
    """An integer reduced to the values of a dtype, as overflow does.

    >>> wrapped("s8", 130), wrapped("u8", -1)
    (-126, 255)
    """
    return _wrap(dtype)(value)


def is_small_integer(shape: Shape) -> bool:
    """Whether an array can be a value."""
    return value_range(shape.dtype) is not None and 0 < shape.size <= MAX_ELEMENTS


def make_value(elements: Sequence[int]) -> Value:
    """The value with the given elements."""
    return elements[0] if len(elements) == 1 else Table(elements)


def constant_value(text: str, shape: Shape) -> Value:
    """The value of a ``constant``; None if its text is elided or not of integers.

    >>> constant_value("{ /*i0=0*/ { 1, -2 } }", Shape("s32", (1, 2))).elements
    (1, -2)
    """
    words = re.split(r"[\s{},]+", COMMENT.sub("", text).strip("{} \n"))
    try:
        elements = [_BOOLEANS[w] if w in _BOOLEANS else int(w) for w in words]
    except ValueError:
        return None
    wrap = _wrap(shape.dtype)
    return make_value([wrap(e) for e in elements]) if len(elements) == shape.size else None


_BOOLEANS = {"true": 1, "false": 0}


def compile_instruction(
    module: HloModule,
    computation: HloComputation,
    instruction: HloInstruction,
    opcode: str,
    shape: Shape,
) -> Compute | None:
    """A function from the values of the operands to the instruction's value.

    Args:
        module: the program, for a ``reduce``'s computation.
        computation: the computation that the instruction is in.
        instruction: one whose result is a small integer array.
        opcode: its opcode; of an asynchronous one, that of the work it does.
        shape: of the result.

    Returns:
        The function; None if such an instruction is not evaluated.

    Raises:
        HloParseError: operands or attributes do not fit the instruction.
    """
    operands = computation.operand_shapes(instruction)
    if not all(map(is_small_integer, operands)):
        return None
    try:
        compute = _compile(module, computation, instruction, opcode, shape)
        if compute:  # tried on zeros: no other values of these shapes can make it fail
            tried = compute([make_value([0] * operand.size) for operand in operands])
            if tried is not None and len(_elements(tried)) != shape.size:
                raise ValueError
    except (ValueError, IndexError, TypeError):
        raise instruction.error("operands or attributes that do not fit") from None
    return compute


def _compile(
    module: HloModule,
    computation: HloComputation,
    instruction: HloInstruction,
    opcode: str,
    shape: Shape,
) -> Compute | None:
    if opcode in _ARITHMETIC:
        return _elementwise(_ARITHMETIC[opcode], _wrap(shape.dtype))
    if opcode == "bitcast-convert":
        source = computation.operand(instruction, 0).shape
        is_same_size = _bits(source.dtype) == _bits(shape.dtype)
        return _elementwise(int, _wrap(shape.dtype)) if is_same_size else None
    if opcode in _BITWISE:
        return _elementwise(_BITWISE[opcode](shape.dtype), _wrap(shape.dtype))
    if opcode in _LAZY:
        return _LAZY[opcode](shape)
    if opcode == "compare":
        relation = _RELATIONS.get(instruction.attribute("direction"))
        return relation and _elementwise(relation, int)
    if opcode in _LAYOUTS:
        return _LAYOUTS[opcode](computation, instruction, shape)
    if opcode == "reduce":
        return _reduce(module, computation, instruction, shape)
    return None


# Elementwise instructions


def _elementwise(function: Callable[..., int | None], wrap: Wrap) -> Compute:
    def compute(values: list[Value]) -> Value:
        rows: list[tuple[int, ...]] = []
        for value in values:
            if value is None:
                return None
            if isinstance(value, Table):
                rows.append(value.elements)
        if not rows:
            result = function(*values)
            return None if result is None else wrap(result)
        size = len(rows[0])
        columns = [v.elements if isinstance(v, Table) else (v,) * size for v in values]
        results = [function(*column) for column in zip(*columns, strict=True)]
        known = [wrap(result) for result in results if result is not None]
        return Table(known) if len(known) == size else None

    return compute


def _divide(a: int, b: int) -> int | None:
    """Division towards zero; the hardware decides what division by zero gives."""
    if b == 0:
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int | None:
    """The remainder has the sign of the dividend."""
    quotient = _divide(a, b)
    return None if quotient is None else a - b * quotient


def _power(a: int, b: int) -> int | None:
    """a to the power of b, modulo 2⁶⁴, which every narrower dtype divides."""
    return pow(a, b, 1 << 64) if b >= 0 else None


_ARITHMETIC: dict[str, Callable[..., int | None]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "divide": _divide,
    "remainder": _remainder,
    "power": _power,
    "minimum": min,
    "maximum": max,
    "xor": operator.xor,
    "negate": operator.neg,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "clamp": lambda low, a, high: min(max(low, a), high),
    "convert": lambda a: a,
}
_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _bits(dtype: str) -> int:
    low, high = value_range(dtype) or (0, 1)
    return (high - low).bit_length()


def _shift_left(dtype: str) -> Callable[..., int]:
    bits = _bits(dtype)
    return lambda a, b: a << b if 0 <= b < bits else 0


def _shift_right_arithmetic(dtype: str) -> Callable[..., int]:
    bits = _bits(dtype)
    signed = _wrap(f"s{bits}") if bits > 1 else int
    return lambda a, b: signed(a) >> (b if 0 <= b < bits else bits - 1)


def _shift_right_logical(dtype: str) -> Callable[..., int]:
    bits = _bits(dtype)
    mask = (1 << bits) - 1
    return lambda a, b: (a & mask) >> b if 0 <= b < bits else 0


def _leading_zeros(dtype: str) -> Callable[..., int]:
    bits = _bits(dtype)
    return lambda a: bits - (a & (1 << bits) - 1).bit_length()


def _set_bits(dtype: str) -> Callable[..., int]:
    mask = (1 << _bits(dtype)) - 1
    return lambda a: (a & mask).bit_count()


def _not(dtype: str) -> Callable[..., int]:
    return (lambda a: 1 - a) if dtype == "pred" else (lambda a: ~a)


# Their functions depend on the number of bits.
_BITWISE: dict[str, Callable[[str], Callable[..., int]]] = {
    "shift-left": _shift_left,
    "shift-right-arithmetic": _shift_right_arithmetic,
    "shift-right-logical": _shift_right_logical,
    "count-leading-zeros": _leading_zeros,
    "popcnt": _set_bits,
    "not": _not,
}


# Elementwise instructions that may not need all of their operands


def _absorbing(function: Callable[[int, int], int], absorber: int | None, wrap: Wrap) -> Compute:
    """A function whose result is `absorber` as soon as one operand is."""
    plain = _elementwise(function, wrap)

    def compute(values: list[Value]) -> Value:
        if None in values:
            return absorber if absorber is not None and absorber in values else None
        return plain(values)

    return compute


def _and(shape: Shape) -> Compute:
    return _absorbing(operator.and_, 0 if shape.size == 1 else None, _wrap(shape.dtype))


def _multiply(shape: Shape) -> Compute:
    return _absorbing(operator.mul, 0 if shape.size == 1 else None, _wrap(shape.dtype))


def _or(shape: Shape) -> Compute:
    is_scalar_pred = shape.size == 1 and shape.dtype == "pred"
    return _absorbing(operator.or_, 1 if is_scalar_pred else None, _wrap(shape.dtype))


def _select(shape: Shape) -> Compute:
    plain = _elementwise(lambda chosen, a, b: a if chosen else b, _wrap(shape.dtype))

    def compute(values: list[Value]) -> Value:
        chosen, on_true, on_false = values
        if isinstance(chosen, int):
            return on_true if chosen else on_false
        return plain(values)

    return compute


_LAZY: dict[str, Callable[[Shape], Compute]] = {
    "and": _and,
    "multiply": _multiply,
    "or": _or,
    "select": _select,
}


# Instructions that lay out elements


def _elements(value: Value) -> tuple[int, ...]:
    return value.elements if isinstance(value, Table) else () if value is None else (value,)


def _strides(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))


def _taken(positions: list[int]) -> Compute:
    """Takes the elements at fixed positions of the only operand."""

    def compute(values: list[Value]) -> Value:
        elements = _elements(values[0])
        return make_value([elements[p] for p in positions]) if elements else None

    return compute


def _positions(ranges: Sequence[Sequence[int]], strides: tuple[int, ...]) -> list[int]:
    """Flat positions of the elements at all combinations of indices, in row-major order."""
    return [sum(map(operator.mul, at, strides)) for at in itertools.product(*ranges)]


def _broadcast(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    source = computation.operand(i, 0).shape
    strides = [0] * len(shape.dims)
    for dim, stride in zip(i.integers("dimensions"), _strides(source.dims), strict=True):
        strides[dim] = stride
    return _taken(_positions([range(n) for n in shape.dims], tuple(strides)))


def _transpose(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    strides = _strides(computation.operand(i, 0).shape.dims)
    order = tuple(strides[d] for d in i.integers("dimensions"))
    return _taken(_positions([range(n) for n in shape.dims], order))


def _reverse(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    reversed_dims = i.integers("dimensions")
    ranges = [range(n)[:: -1 if d in reversed_dims else 1] for d, n in enumerate(shape.dims)]
    return _taken(_positions(ranges, _strides(shape.dims)))


def _slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    parts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.attributes.get("slice", ""))
    dims = computation.operand(i, 0).shape.dims
    ranges = [
        range(n)[int(a) : int(b) : int(c or 1)] for n, (a, b, c) in zip(dims, parts, strict=True)
    ]
    return _taken(_positions(ranges, _strides(dims)))


def _iota(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    (dim,) = i.integers("iota_dimension")
    strides = tuple(int(d == dim) for d in range(len(shape.dims)))
    value = make_value(_positions([range(n) for n in shape.dims], strides))
    return lambda values: value


def _starts(values: list[Value], dims: tuple[int, ...], sizes: tuple[int, ...]) -> list[int] | None:
    """Start indices, clamped so that the slice is inside of the array."""
    starts = []
    for value, dim, size in zip(values, dims, sizes, strict=True):
        if not isinstance(value, int):
            return None
        starts.append(min(max(value, 0), dim - size))
    return starts


def _dynamic_slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    dims = computation.operand(i, 0).shape.dims
    strides = _strides(dims)
    positions = _positions([range(n) for n in shape.dims], strides)

    def compute(values: list[Value]) -> Value:
        elements = _elements(values[0])
        starts = _starts(values[1:], dims, shape.dims)
        if not elements or starts is None:
            return None
        first = sum(map(operator.mul, starts, strides))
        return make_value([elements[first + p] for p in positions])

    return compute


def _dynamic_update_slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    sizes = computation.operand(i, 1).shape.dims
    strides = _strides(shape.dims)
    positions = _positions([range(n) for n in sizes], strides)

    def compute(values: list[Value]) -> Value:
        elements, update = list(_elements(values[0])), _elements(values[1])
        starts = _starts(values[2:], shape.dims, sizes)
        if not elements or not update or starts is None:
            return None
        first = sum(map(operator.mul, starts, strides))
        for position, element in zip(positions, update, strict=True):
            elements[first + position] = element
        return make_value(elements)

    return compute


def _concatenate(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    (dim,) = i.integers("dimensions")
    # Elements of each operand that stand side by side in the result.
    runs = [math.prod(s.dims[dim:]) for s in computation.operand_shapes(i)]

    def compute(values: list[Value]) -> Value:
        rows = [_elements(value) for value in values]
        if not all(rows):
            return None
        return make_value(
            [
                element
                for block in range(math.prod(shape.dims[:dim]))
                for row, run in zip(rows, runs, strict=True)
                for element in row[block * run : (block + 1) * run]
            ]
        )

    return compute


_LAYOUTS: dict[str, Callable[[HloComputation, HloInstruction, Shape], Compute | None]] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "iota": _iota,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "concatenate": _concatenate,
}

_REDUCERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
}


def _reduce(
    module: HloModule, computation: HloComputation, i: HloInstruction, shape: Shape
) -> Compute | None:
    """A reduction of one array by one binary instruction."""
    names = i.computations("to_apply")
    if len(i.operands) != 2 or len(names) != 1:
        return None
    reducer, root = module[names[0]], module[names[0]].root
    makers = [reducer[name].opcode for name in root.operands]
    function = _REDUCERS.get(root.opcode)
    if function is None or makers != ["parameter"] * 2 or root.operands[0] == root.operands[1]:
        return None
    dims, gone = computation.operand(i, 0).shape.dims, i.integers("dimensions")
    strides, wrap = _strides(dims), _wrap(shape.dtype)
    kept = _positions(
        [range(n) for d, n in enumerate(dims) if d not in gone],
        tuple(s for d, s in enumerate(strides) if d not in gone),
    )
    summed = _positions([range(dims[d]) for d in gone], tuple(strides[d] for d in gone))

    def compute(values: list[Value]) -> Value:
        elements, start = _elements(values[0]), values[1]
        if not elements or not isinstance(start, int):
            return None
        sums = [functools.reduce(function, [elements[k + s] for s in summed], start) for k in kept]
        return make_value([wrap(value) for value in sums])

    return compute
