"""Integer primitives give what JAX computes on this machine, overflow and x / 0 included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mfu_jax.flops.traced.integers.arithmetic import evaluate
from mfu_jax.flops.traced.integers.evaluation import IntegerEvaluator

EDGES = np.array([-128, -7, -1, 0, 1, 2, 3, 9, 100, 127])
A, B = (g.reshape(-1) for g in np.meshgrid(EDGES, EDGES))

BINARY = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.shift_left,
          lax.shift_right_logical, lax.shift_right_arithmetic, lax.bitwise_and, lax.bitwise_or,
          lax.bitwise_xor, lax.lt, lax.ne]  # fmt: skip
UNARY = [lax.neg, lax.abs, lax.sign, lax.bitwise_not, lax.population_count, lax.clz,
         lambda a: lax.integer_pow(a, 3), lambda a: lax.convert_element_type(a, "uint8"),
         lambda a: lax.convert_element_type(a, "bool"), lambda a: jnp.flip(a).reshape(10, 10).T,
         lambda a: lax.cumsum(a, reverse=True), lambda a: lax.reduce_max(a, axes=(0,)),
         lambda a: lax.dynamic_slice(a, (97,), (5,))]  # fmt: skip


def check(fn, *values):
    closed = jax.make_jaxpr(fn)(*values)
    integers = IntegerEvaluator(dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))
    found = integers.outputs(integers.needs.of(closed.jaxpr, [0]), values)[0]
    expected = np.asarray(jax.jit(fn)(*values))
    assert found is not None, closed
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, str(closed))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_two_operands(dtype):
    for fn in BINARY:
        check(fn, A.astype(dtype), B.astype(dtype))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_one_operand(dtype):
    for fn in UNARY:
        check(fn, A.astype(dtype))


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lax.pow, (0.25, -1)),
        (lax.pow, (2, np.inf)),  # has no end by squaring
        (lax.div, (np.inf, 2)),
        (lambda a: lax.integer_pow(a, -2), (0.5,)),
        (lambda a: lax.convert_element_type(a, "int32"), (np.inf,)),
        (lambda a: lax.convert_element_type(a, "int32"), (3e9,)),
    ],
)
def test_floats_without_an_exact_result_are_unknown(fn, values):
    values = [np.float32(value) for value in values]
    (eqn,) = jax.make_jaxpr(fn)(*values).eqns
    assert evaluate(eqn, values) is None


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_elements_of_a_table(mode):
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    indices = np.array([3, 0, 2] if mode == "promise_in_bounds" else [9, 0, 2], np.int32)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def rows(table, indices):
        return lax.gather(table, indices[:, None], numbers, (1, 6), mode=mode)

    check(rows, table, indices)
