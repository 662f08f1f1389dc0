"""What is said of two calls that ran different programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.instrumentation.instrumented_step import instrument
from mfu_jax.instrumentation.programs import Signature, SignatureTable
from tests.support.sinks import ListSink

X = jax.ShapeDtypeStruct((8, 4), "float32")


def step(x: Any, n: int = 1, m: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (((X, 2), {}), ((X,), {"n": 2}), "n: now given by name"),
        (((X,), {"n": 2}), ((X, 2), {}), "n: now given by position"),
        (((X, 2, 3), {}), ((X,), {"n": 2, "m": 3}), "m, n: now given by name"),
        ((([X],), {}), (((X,),), {}), "a static field of an argument, or the kind of a container"),
    ],
)
def test_the_same_leaves_given_differently_are_told_apart(
    before: tuple[Any, Any], after: tuple[Any, Any], told: str
) -> None:
    one, two = (Signature.of(step, args, kwargs) for args, kwargs in (before, after))
    (line,) = one.differences(two)
    assert line.startswith(told)
    assert one.differences(one) == []


class Counter:
    """A pytree whose constructor converts what it is given, as brax's UInt64 does."""

    def __init__(self, high: Any, low: Any) -> None:
        self.high, self.low = self.converted(high), self.converted(low)

    def converted(self, value: Any) -> Any:
        return jnp.asarray(value, jnp.uint32) if isinstance(value, int) else value

    @property
    def dtype(self) -> Any:
        return jnp.uint32


class Strict(Counter):
    """A pytree whose constructor accepts nothing but arrays."""

    def converted(self, value: Any) -> Any:
        return jnp.asarray(value, jnp.uint32)


for kind in (Counter, Strict):
    jax.tree_util.register_pytree_node(
        kind, lambda counter: ((counter.high, counter.low), None), lambda _, ab, k=kind: k(*ab)
    )


@pytest.mark.parametrize("kind", [Counter, Strict])
def test_arguments_whose_constructors_convert_do_not_hide_a_change_of_the_batch(
    kind: type[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()

    @jax.jit
    def train_step(count: Counter, weights: jax.Array, batch: jax.Array) -> Any:
        return kind(count.high, count.low + 1), jnp.sum(batch @ weights)

    count, weights = kind(0, 0), jnp.ones((8, 4))
    with instrument(
        train_step, peak_tflops_per_device=1.0, flops_source="traced", sinks=[sink]
    ) as step:
        for rows in (16, 16, 8, 8, 16, 8):
            count, _ = step(count, weights, jnp.ones((rows, 8)))
    # 2 · rows · 8 · 4 FLOPs.
    flops = [1024, 1024, 512, 512, 1024, 512]
    assert sink.scalar("perf/per_device_tflops") == [n * 1e-12 for n in flops]
    executed = [
        record.scalars["perf/hfu"] * record.scalars["perf/step_time_seconds"] * 1e12
        for record in sink.records
    ]
    assert executed == pytest.approx(flops)
    assert caplog.messages == []
    assert int(count.low) == 6


def test_a_leaf_that_differs_inside_an_object_is_found_without_rebuilding_the_object() -> None:
    table: SignatureTable[int] = SignatureTable()
    calls = [((Strict(0, np.zeros(size)), X), {"n": 1}) for size in (2, 3)]
    for number, (args, kwargs) in enumerate(calls, 1):
        table.add(Signature.of(step, args, kwargs), number)
    assert [table.find(args, kwargs) for args, kwargs in calls] == [1, 2]
    assert table.find((Strict(0, np.zeros(4)), X), {"n": 1}) is None


def test_arguments_by_name_in_any_order_are_not_taken_for_each_other() -> None:
    """JAX flattens them by name; `aux` keeps the shape that `x` has in the first program."""

    def loss(w: jax.Array, *, x: jax.Array, aux: jax.Array) -> jax.Array:
        return jnp.sum(x @ w) + jnp.sum(aux)

    memory, w, aux = ListSink(), jnp.ones((4, 2)), jnp.ones((8, 4))
    with instrument(jax.jit(loss), peak_tflops_per_device=1, sinks=[memory]) as instrumented:
        for rows in (8, 6, 8, 6):
            instrumented(w, x=jnp.ones((rows, 4)), aux=aux)
    counted = [round(r.scalars["perf/per_device_tflops"] * 1e12) for r in memory.records]
    assert counted == [2 * rows * 4 * 2 for rows in (8, 6, 8, 6)]
    assert len([text for text in memory.texts if text[0].startswith("recompiled/")]) == 1
