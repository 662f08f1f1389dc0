"""Trip counts: loops compiled for this machine that carry how often their body ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mfu_jax.flops.executed.control_flow import evaluation, loops
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount

SIZE = 8
ONE = 2 * SIZE**3
X = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)

Step = Callable[[Any], Any]


def loop(first: int, dtype: Any, holds: Step, step: Step) -> Any:
    """Runs a matmul per iteration; returns the matrix and the iterations."""

    def body(s: Any) -> Any:
        i, x, n = s
        return step(i), jnp.tanh(x @ x), n + 1

    def run(x: jax.Array, _: jax.Array) -> Any:
        return lax.while_loop(lambda s: holds(s[0]), body, (dtype(first), x, 0))[1:]

    return run


def compiled(function: Any) -> Any:
    return jax.jit(function).lower(X, N).compile()


def ran_of(program: Any, n: int = 0) -> int:
    """How many matmuls a compiled program says that it ran."""
    return int(program(jnp.ones((SIZE, SIZE)), jnp.int32(n))[1])


# First value, dtype, condition, step, iterations.
LOOPS: dict[str, tuple[int, Any, Step, Step, int]] = {
    "a stride that grows": (
        *(0, jnp.int32, lambda i: i < 100, lambda i: jnp.where(i < 10, i + 1, i + 10)),
        10 + 9,
    ),
    "a stride that grows after four": (
        *(0, jnp.int32, lambda i: i < 1000, lambda i: jnp.where(i < 4, i + 1, i + 62)),
        4 + 17,  # 4 + 16 · 62 = 996
    ),
    "doubling after four": (
        *(0, jnp.int32, lambda i: i < 2048),
        lambda i: jnp.maximum(i + 1, jnp.where(i >= 4, 2 * i, 0)),
        4 + 9,  # 4, 8, …, 2048
    ),
    "a shift": (1, jnp.int32, lambda i: i < 4096, lambda i: i << 1, 12),
    "a product": (1, jnp.int32, lambda i: i < 3**7, lambda i: i * 3, 7),
    "halving": (1000, jnp.int32, lambda i: i > 0, lambda i: i // 2, 10),
    "a remainder": (1, jnp.int32, lambda i: i != 0, lambda i: (i * 5 + 3) % 16, 9),
    "a line in the condition": (0, jnp.int32, lambda i: 3 * i - 7 < 50, lambda i: i + 2, 10),
    "steps of 5 modulo 256 until 3": (  # 5 · 103 = 2 · 256 + 3
        *(0, jnp.uint8, lambda i: i != 3, lambda i: i + jnp.uint8(5)),
        103,
    ),
    "no iteration": (5, jnp.int32, lambda i: i < 5, lambda i: i + 1, 0),
    "equality": (5, jnp.int32, lambda i: i == 5, lambda i: i + 1, 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_counts_as_often_as_it_runs(name: str) -> None:
    first, dtype, holds, step, trips = LOOPS[name]
    program = compiled(loop(first, dtype, holds, step))
    count = executed_flops(program)
    assert ran_of(program) == trips
    assert (count.total, count.unaccounted, count.flags) == (trips * ONE, (), ())


def test_a_long_count_is_proved_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_TRIPS", 10)
    program = compiled(loop(3, jnp.int32, lambda i: i < 2_000_000_000, lambda i: i + 7))
    assert executed_flops(program).total == -((3 - 2_000_000_000) // 7) * ONE


def growing_slowly() -> Any:
    """i + 1 for ever more i: no line, 200,000 iterations."""
    step = LOOPS["a stride that grows"][3]
    return compiled(loop(0, jnp.int32, lambda i: i < 10 * 200_000, step))


@pytest.mark.parametrize(
    ("module", "name", "limit"), [(loops, "MAX_TRIPS", 100_000), (evaluation, "MAX_STEPS", 50)]
)
def test_past_a_limit_a_loop_is_listed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, limit: int
) -> None:
    monkeypatch.setattr(module, name, limit)
    count = executed_flops(growing_slowly())
    assert [(item.name, item.times) for item in count.unaccounted] == [("while", 1)]
    assert "100,000 iterations" in count.unaccounted[0].reason
    assert count.total == ONE


def test_a_loop_that_never_ends_is_listed() -> None:
    count = executed_flops(compiled(loop(0, jnp.int32, lambda i: i < 10, lambda i: i * 2)))
    assert [item.name for item in count.unaccounted] == ["while"]
    assert count.total == ONE


def test_a_bound_from_data_is_listed() -> None:
    def run(x: jax.Array, n: jax.Array) -> Any:
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ s[1]), (0, x))

    count = executed_flops(compiled(run))
    assert [item.reason.split(";")[0] for item in count.unaccounted] == [loops.ON_DATA]
    assert count.total == ONE


def test_a_loop_starts_where_another_one_ends() -> None:
    def run(x: jax.Array, _: jax.Array) -> Any:
        i, x, n = lax.while_loop(
            lambda s: s[0] < 50,
            lambda s: (jnp.where(s[0] < 5, s[0] + 1, s[0] + 9), s[1] @ s[1], s[2] + 1),
            (0, x, 0),
        )
        return lax.while_loop(
            lambda s: s[0] < 60, lambda s: (s[0] + 1, s[1] @ s[1], s[2] + 1), (i, x, n)
        )[1:]

    program = compiled(run)
    assert ran_of(program) == (5 + 5) + 10  # 5, 14, …, 50, and then to 60
    assert executed_flops(program).total == 20 * ONE


CONDITION = """HloModule m

%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %s = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,4] get-tuple-element(%s), index=1
  %c = s32[] constant(1)
  %j = s32[] add(%i, %c)
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]) tuple(%j, %y)
}

%condition (s: (s32[], f32[4,4])) -> pred[] {
  %s = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %c = s32[] constant(7)
  ROOT %p = pred[] compare(%i, %c), direction=LT
}

ENTRY %main (x: f32[4,4]) -> (s32[], f32[4,4]) {
  %x = f32[4,4] parameter(0)
  %c = s32[] constant(0)
  %t = (s32[], f32[4,4]) tuple(%c, %x)
  ROOT %w = (s32[], f32[4,4]) while(%t), condition=%condition, body=%body STATED
}
"""


def stated(trips: str) -> ExecutedCount:
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return executed_flops(CONDITION.replace(" STATED", config))


def test_the_compilers_count_is_used() -> None:
    for trips, runs in (("", 7), ("7", 7), ("9", 9)):
        assert (stated(trips).total, stated(trips).flags) == (runs * 2 * 4**3, ())


def test_a_given_count_replaces_all_others() -> None:
    text = CONDITION.replace(" STATED", "")
    assert executed_flops(text, trip_counts={"w": 3}).total == 3 * 2 * 4**3


def test_a_counter_that_overflows_is_run_not_proved() -> None:
    text = (
        CONDITION.replace(" STATED", "").replace("s32", "s8").replace("constant(1)", "constant(50)")
    )
    text = text.replace("constant(7)", "constant(0)").replace("direction=LT", "direction=GE")
    assert executed_flops(text).total == 3 * 2 * 4**3  # 0, 50, 100, −106


@pytest.mark.parametrize("swapped", [False, True])
def test_branches_of_equal_most_but_not_of_equal_least_flops_are_flagged(swapped: bool) -> None:
    """One branch runs a matmul; the other one may, which depends on data as well."""

    def matmul(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        branches = [matmul, lambda x: lax.cond(n > 5, matmul, jnp.sin, x)]
        return lax.cond(n > 3, *branches[:: -1 if swapped else 1], x)

    count = executed_flops(compiled(run))
    assert count.total == ONE
    assert any(f"0 to {ONE:,}" in flag.text for flag in count.flags)
