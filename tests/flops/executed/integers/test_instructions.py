"""The arithmetic of integer instructions, against what XLA's CPU backend computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mfu_jax.flops.executed.hlo.module import HloModule
from mfu_jax.flops.executed.hlo.parsing import parse_hlo
from mfu_jax.flops.executed.hlo.text import parse_shape
from mfu_jax.flops.executed.integers.instructions import compile_instruction
from mfu_jax.flops.executed.integers.values import (
    MAX_ELEMENTS,
    IntegerTable,
    Value,
    constant_value,
    is_small_integer,
    make_value,
)

DTYPES = {"s8": "int8", "u8": "uint8", "s16": "int16", "s32": "int32", "u32": "uint32"}
BINARY: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "subtract": lax.sub,
    "multiply": lax.mul,
    "divide": lax.div,
    "remainder": lax.rem,
    "minimum": lax.min,
    "maximum": lax.max,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shift-left": lax.shift_left,
    "shift-right-arithmetic": lax.shift_right_arithmetic,
    "shift-right-logical": lax.shift_right_logical,
}
UNARY: dict[str, Callable[..., Any]] = {
    "negate": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "count-leading-zeros": lax.clz,
}


def edges(dtype: str) -> list[int]:
    """Values at which arithmetic overflows or changes its sign."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return sorted({low, low + 1, max(low, -3), max(low, -1), 0, 1, 2, 7, 31, 40, high - 1, high})


def module_of(*lines: str, more: str = "") -> HloModule:
    """A program of one computation; its last line is the root."""
    return parse_hlo(
        "HloModule m\n" + more + "ENTRY %main () -> s32[] {\n" + "\n".join(lines) + "\n}"
    )


def evaluated(values: list[Value], *lines: str, more: str = "") -> Value:
    """The value of the root, whose operands have the given values."""
    module = module_of(*lines, more=more)
    root = module.entry.root
    compute = compile_instruction(module, module.entry, root, root.opcode, root.shape)
    assert compute is not None
    return compute(values)


def elements(value: Value) -> list[int] | None:
    if isinstance(value, IntegerTable):
        return list(value.elements)
    return None if value is None else [value]


def of_parameters(opcode: str, result: str, *shapes: str, attributes: str = "") -> list[str]:
    """An instruction on parameters."""
    names = [f"%p{i}" for i in range(len(shapes))]
    lines = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(shapes)]
    return [*lines, f"  ROOT %r = {result} {opcode}({', '.join(names)}){attributes}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opcode", BINARY)
def test_binary_instructions_as_xla_computes_them(opcode: str, dtype: str) -> None:
    pairs = list(itertools.product(edges(DTYPES[dtype]), repeat=2))
    if opcode in ("divide", "remainder"):  # HLO does not define division by zero
        pairs = [pair for pair in pairs if pair[1]]
    a, b = (np.array(side, DTYPES[dtype]) for side in zip(*pairs, strict=True))
    array = f"{dtype}[{len(pairs)}]"
    given = [make_value([int(v) for v in side]) for side in (a, b)]
    found = evaluated(given, *of_parameters(opcode, array, array, array))
    assert elements(found) == jax.jit(BINARY[opcode])(a, b).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opcode", UNARY)
def test_unary_instructions_as_xla_computes_them(opcode: str, dtype: str) -> None:
    if opcode == "abs" and dtype.startswith("u"):
        pytest.skip("HLO has no absolute value of unsigned integers")
    a = np.array(edges(DTYPES[dtype]), DTYPES[dtype])
    array = f"{dtype}[{a.size}]"
    found = evaluated([make_value(a.tolist())], *of_parameters(opcode, array, array))
    assert elements(found) == jax.jit(UNARY[opcode])(a).tolist()


@pytest.mark.parametrize("new", [*DTYPES, "pred"])
@pytest.mark.parametrize("old", DTYPES)
def test_conversions_as_xla_computes_them(old: str, new: str) -> None:
    a = np.array(edges(DTYPES[old]), DTYPES[old])
    lines = of_parameters("convert", f"{new}[{a.size}]", f"{old}[{a.size}]")
    expected = jnp.asarray(a).astype(DTYPES.get(new, "bool"))
    assert elements(evaluated([make_value(a.tolist())], *lines)) == expected.tolist()


def test_division_by_zero_is_not_known() -> None:
    for opcode in ("divide", "remainder"):
        assert evaluated([5, 0], *of_parameters(opcode, "s32[]", "s32[]", "s32[]")) is None


A = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
LAYOUTS: dict[str, tuple[str, str, Any]] = {
    "transpose": ("s32[4,2,3]", ", dimensions={2,0,1}", A.transpose(2, 0, 1)),
    "reverse": ("s32[2,3,4]", ", dimensions={0,2}", A[::-1, :, ::-1]),
    "slice": ("s32[1,2,2]", ", slice={[1:2], [0:2], [0:4:3]}", A[1:2, 0:2, 0:4:3]),
    "broadcast": ("s32[2,2,3,4]", ", dimensions={1,2,3}", np.broadcast_to(A, (2, 2, 3, 4))),
}


@pytest.mark.parametrize("opcode", LAYOUTS)
def test_instructions_that_lay_out_elements(opcode: str) -> None:
    result, attributes, expected = LAYOUTS[opcode]
    lines = of_parameters(opcode, result, "s32[2,3,4]", attributes=attributes)
    assert (
        elements(evaluated([IntegerTable(A.ravel().tolist())], *lines)) == expected.ravel().tolist()
    )


@pytest.mark.parametrize("starts", [(0, 1, 2), (-5, 9, 1), (1, 1, 1)])
def test_slices_at_an_index_stay_inside(starts: tuple[int, int, int]) -> None:
    indices = ["s32[]"] * 3
    sizes = ", dynamic_slice_sizes={1,2,2}"
    lines = of_parameters("dynamic-slice", "s32[1,2,2]", "s32[2,3,4]", *indices, attributes=sizes)
    found = evaluated([IntegerTable(A.ravel().tolist()), *starts], *lines)
    assert elements(found) == lax.dynamic_slice(A, starts, (1, 2, 2)).ravel().tolist()
    lines = of_parameters(
        "dynamic-update-slice", "s32[2,3,4]", "s32[2,3,4]", "s32[1,2,2]", *indices
    )
    found = evaluated(
        [IntegerTable(A.ravel().tolist()), IntegerTable([90, 91, 92, 93]), *starts], *lines
    )
    update = np.array([90, 91, 92, 93], np.int32).reshape(1, 2, 2)
    assert elements(found) == lax.dynamic_update_slice(A, update, starts).ravel().tolist()


def test_joined_and_counted_elements() -> None:
    lines = of_parameters(
        "concatenate", "s32[2,3]", "s32[2,1]", "s32[2,2]", attributes=", dimensions={1}"
    )
    found = evaluated([IntegerTable([1, 2]), IntegerTable([3, 4, 5, 6])], *lines)
    assert elements(found) == [1, 3, 4, 2, 5, 6]
    assert elements(evaluated([], "  ROOT %i = s32[2,3] iota(), iota_dimension=1")) == [0, 1, 2] * 2


def test_padded_elements() -> None:
    configuration, attribute = ((1, 0, 0), (0, -1, 0), (-1, 2, 1)), ", padding=1_0x0_-1x-1_2_1"
    lines = of_parameters("pad", "s32[3,2,8]", "s32[2,3,4]", "s32[]", attributes=attribute)
    found = evaluated([IntegerTable(A.ravel().tolist()), 9], *lines)
    assert elements(found) == lax.pad(A, np.int32(9), configuration).ravel().tolist()


def test_a_bitcast_to_fewer_elements_has_the_first_ones() -> None:
    lines = of_parameters("bitcast", "s32[3]", "s32[5]")
    assert elements(evaluated([IntegerTable([4, 5, 6, 7, 8])], *lines)) == [4, 5, 6]


def test_a_reduction() -> None:
    reducer = (
        "%any (a: s32[], b: s32[]) -> s32[] {\n  %a = s32[] parameter(0)\n"
        "  %b = s32[] parameter(1)\n  ROOT %r = s32[] maximum(%a, %b)\n}\n\n"
    )
    attributes = ", dimensions={0,2}, to_apply=%any"
    lines = of_parameters("reduce", "s32[3]", "s32[2,3,4]", "s32[]", attributes=attributes)
    found = evaluated([IntegerTable(A.ravel().tolist()), 17], *lines, more=reducer)
    assert elements(found) == np.maximum(A.max((0, 2)), 17).tolist()


def test_what_decides_alone_needs_no_other_operand() -> None:
    for opcode, given, expected in (
        ("and", [0, None], 0),
        ("or", [None, 1], 1),
        ("multiply", [None, 0], 0),
        ("and", [1, None], None),
        ("or", [0, None], None),
    ):
        dtype = "s32[]" if opcode == "multiply" else "pred[]"
        assert evaluated(list(given), *of_parameters(opcode, dtype, dtype, dtype)) == expected
    lines = of_parameters("select", "s32[]", "pred[]", "s32[]", "s32[]")
    assert evaluated([1, 7, None], *lines) == 7
    assert evaluated([None, 7, 7], *lines) is None


def test_values_are_small_arrays_of_integers() -> None:
    assert is_small_integer(parse_shape("pred[8]{0:T(128)}"))
    assert not is_small_integer(parse_shape("f32[]"))
    assert not is_small_integer(parse_shape(f"s32[{MAX_ELEMENTS + 1}]"))
    assert constant_value("{...}", parse_shape("s32[100]")) is None
    assert constant_value("{1, 2}", parse_shape("s32[3]")) is None
    assert constant_value("300", parse_shape("u8[]")) == 300 - 256
