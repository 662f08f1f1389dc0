"""Bounds and branches that follow an outer index: programs that carry how often a matmul ran."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mfu_jax.flops.executed.counting import executed_flops

SIZE = 8
ONE = 2 * SIZE**3
PATTERN = (0, 1, 2, 0, 0, 1, 2, 2, 1, 0, 0, 0)
X = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)

State = tuple[Any, Any]  # the matrix, and how many matmuls ran


def product(s: State) -> State:
    return jnp.tanh(s[0] @ s[0]), s[1] + 1


def times(bound: Any, s: State, body: Callable[[Any, State], State] | None = None) -> State:
    """Runs a body, or one matmul, for each index below a bound."""
    return lax.fori_loop(0, bound, body or (lambda i, s: product(s)), s)


def scanned(indices: Any, body: Callable[[Any, State], State], s: State) -> State:
    return lax.scan(lambda s, i: (body(i, s), None), s, indices)[0]


def causal(s: State) -> State:
    return scanned(jnp.arange(7), lambda i, s: times(i + 1, s), s)


def triangle_of_triangles(s: State) -> State:
    inner = lambda i, s: times(i, s, lambda j, s: times(j, s))  # noqa: E731
    return times(9, s, inner)


def every_other(s: State) -> State:
    return times(9, s, lambda i, s: lax.cond(i % 2 == 0, lambda s: product(product(s)), product, s))


def by_table(s: State) -> State:
    kinds = [lambda s: product(product(s)), product, lambda s: (jnp.sin(s[0]), s[1])]
    layer = lambda i, s: lax.switch(jnp.array(PATTERN)[i], kinds, s)  # noqa: E731
    return scanned(jnp.arange(len(PATTERN)), layer, s)


def over_a_table(s: State) -> State:
    kinds = [lambda s: product(product(s)), product, lambda s: (jnp.sin(s[0]), s[1])]
    return scanned(jnp.array(PATTERN), lambda p, s: lax.switch(p, kinds, s), s)


def loop_in_branch_in_loop(s: State) -> State:
    def body(i: Any, s: State) -> State:
        return lax.cond(i % 3 == 0, lambda s: times(2 * i, s), product, s)

    return times(10, s, body)


def branch_of_a_grown_bound(s: State) -> State:
    """The inner bound is itself what a loop computed, from the outer index."""

    def body(i: Any, s: State) -> State:
        bound = lax.while_loop(lambda b: b < 3 * i, lambda b: jnp.where(b < 4, b + 1, b + 5), 0)
        bound = lax.cond(bound > 9, lambda b: b - 9, lambda b: b, bound)
        return times(bound, s)

    return times(8, s, body)


def grown(i: int) -> int:
    b = 0
    while b < 3 * i:
        b = b + 1 if b < 4 else b + 5
    return b - 9 if b > 9 else b


PROGRAMS: dict[str, tuple[Callable[[State], State], int]] = {
    "causal": (causal, sum(range(8))),
    "triangle_of_triangles": (
        triangle_of_triangles,
        sum(j for i in range(9) for j in range(i)),
    ),
    "every_other": (every_other, 5 * 2 + 4),
    "by_table": (by_table, 2 * PATTERN.count(0) + PATTERN.count(1)),
    "over_a_table": (over_a_table, 2 * PATTERN.count(0) + PATTERN.count(1)),
    "loop_in_branch_in_loop": (loop_in_branch_in_loop, 2 * (0 + 3 + 6 + 9) + 6),
    "branch_of_a_grown_bound": (branch_of_a_grown_bound, sum(map(grown, range(8)))),
}


@functools.cache
def compiled(name: str) -> Any:
    return jax.jit(lambda x: PROGRAMS[name][0]((x, 0))).lower(X).compile()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_follows_an_outer_index_counts_as_often_as_it_runs(name: str) -> None:
    ran = int(compiled(name)(jnp.ones((SIZE, SIZE)))[1])
    count = executed_flops(compiled(name))
    assert ran == PROGRAMS[name][1]
    assert (count.total, count.unaccounted, count.flags) == (ran * ONE, (), ())


def test_a_backward_pass_runs_the_same_branches() -> None:
    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond(p == 0, lambda x: jnp.tanh(x @ x), jnp.sin, x), None

        return jnp.sum(lax.scan(layer, x, jnp.array(PATTERN))[0])

    count = executed_flops(jax.jit(jax.grad(loss)).lower(X).compile())
    matmuls = PATTERN.count(0)
    assert (count.forward, count.backward) == (matmuls * ONE, 2 * matmuls * ONE)
    assert (count.unaccounted, count.flags) == ((), ())


def test_a_table_that_the_text_elides_is_named_as_a_reason() -> None:
    count = executed_flops(compiled("by_table").as_text())
    assert count.total == 2 * len(PATTERN) * ONE
    (flag,) = count.flags
    assert flag.times == len(PATTERN)
    assert "this text leaves out, constant({...}): count the compiled program" in flag.text
    assert "mfu_jax.dump" in flag.text


def by_data(x: jax.Array, n: jax.Array) -> Any:
    """In even iterations a branch by data; in odd ones a loop over data."""

    def body(i: Any, s: State) -> State:
        even = lambda s: lax.cond(n > i, lambda s: product(product(s)), product, s)  # noqa: E731
        return lax.cond(i % 2 == 0, even, lambda s: times(n, s), s)

    return times(10, (x, 0), body)


def test_only_what_depends_on_data_is_flagged() -> None:
    count = executed_flops(jax.jit(by_data).lower(X, N).compile())
    # Five times the branch of two matmuls, and five loops counted once each.
    assert count.total == (5 * 2 + 5) * ONE
    assert [flag.times for flag in count.flags] == [5]
    assert [(item.name, item.times) for item in count.unaccounted] == [("while", 5)]


def test_a_condition_on_data_that_the_index_decides_is_decided() -> None:
    def run(x: jax.Array, n: jax.Array) -> Any:
        def body(i: Any, s: State) -> State:
            return lax.cond((i >= 4) & (n > 3), lambda s: product(product(s)), product, s)

        return times(10, (x, 0), body)

    count = executed_flops(jax.jit(run).lower(X, N).compile())
    assert count.total == (4 + 6 * 2) * ONE
    assert [flag.times for flag in count.flags] == [6]


def test_work_in_a_branch_that_never_runs_is_not_listed() -> None:
    def run(x: jax.Array) -> Any:
        def body(i: Any, s: State) -> State:
            solve = lambda s: (jax.scipy.linalg.cho_factor(s[0])[0], s[1])  # noqa: E731
            return lax.cond((i * 7) % 11 == 8, solve, product, s)

        return times(9, (x, 0), body)  # 7·9 = 55 + 8: the first time would be i = 9

    count = executed_flops(jax.jit(run).lower(X).compile())
    assert (count.total, count.unaccounted) == (9 * ONE, ())


def test_an_unknown_opcode_is_listed() -> None:
    text = """HloModule m

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  %y = f32[4,4] block-dot(%x, %x)
  ROOT %z = f32[4,4] tanh(%y)
}
"""
    (item,) = executed_flops(text).unaccounted
    assert (item.name, item.where, item.times) == ("block-dot", "y", 1)


BRANCH = """
%NAME (t: (f32[8,16], f32[16,4])) -> f32[8,4] {
  %t = (f32[8,16], f32[16,4]) parameter(0)
  %x = f32[8,16] get-tuple-element(%t), index=0
  %y = f32[16,4] get-tuple-element(%t), index=1
  %a = DTYPE[8,16] convert(%x)
  %b = DTYPE[16,4] convert(%y)
  ROOT %d = f32[8,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, METADATA
}"""
CONDITIONAL = """HloModule m
BRANCHES
ENTRY %main (i: s32[], x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %i = s32[] parameter(0)
  %x = f32[8,16] parameter(1)
  %y = f32[16,4] parameter(2)
  %t = (f32[8,16], f32[16,4]) tuple(%x, %y)
  ROOT %c = f32[8,4] conditional(%i, OPERANDS), branch_computations={NAMES}, metadata={op_name="c"}
}
"""
FORWARD, BACKWARD = (f"jit(f)/{name}/dot_general" for name in ("jvp()", "transpose(jvp())"))


def conditional(*branches: tuple[str, str]) -> str:
    """A program with a conditional between products, each of a dtype and an op_name."""
    names = [f"%branch_{i}" for i in range(len(branches))]
    texts = [
        BRANCH.replace("%NAME", name)
        .replace("DTYPE", dtype)
        .replace("METADATA", f'metadata={{op_name="{op_name}"}}')
        for name, (dtype, op_name) in zip(names, branches, strict=True)
    ]
    text = CONDITIONAL.replace("BRANCHES", "".join(texts))
    return text.replace("OPERANDS", ", ".join(["%t"] * len(names))).replace(
        "NAMES", ", ".join(names)
    )


@pytest.mark.parametrize("order", [("f32", "bf16"), ("bf16", "f32")])
def test_of_two_dtypes_the_wider_is_counted_and_said(order: tuple[str, str]) -> None:
    count = executed_flops(conditional(*((dtype, FORWARD) for dtype in order)))
    flops = 2 * 8 * 16 * 4
    assert +Counter(count.by_dtype) == {"f32": flops}
    (flag,) = count.flags
    assert flag.times == 1
    assert f"({flops:,} {order[0]}, or {flops:,} {order[1]})" in flag.text


def test_of_two_phases_the_first_is_counted_and_said() -> None:
    count = executed_flops(conditional(("f32", FORWARD), ("f32", BACKWARD)))
    assert (count.forward, count.backward) == (2 * 8 * 16 * 4, 0)
    (flag,) = count.flags
    assert "forward" in flag.text
    assert "backward" in flag.text


def test_branches_of_the_same_work_need_no_word() -> None:
    assert executed_flops(conditional(*[("bf16", FORWARD)] * 3)).flags == ()
