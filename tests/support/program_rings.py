"""Rings of devices around which an index travels: it bounds a loop, or chooses a branch.

Each body returns what it computed and how often it multiplied, as the device counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, WIDTH = 8, 16
DEVICES = 8
ONE = 2 * ROWS * WIDTH * WIDTH
P = PartitionSpec

Counted = tuple[jax.Array, jax.Array]  # an array, and how many products made it
Body = Callable[[jax.Array, jax.Array], Counted]


def onwards(stages: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % stages) for i in range(stages)]


def backwards(stages: int) -> list[tuple[int, int]]:
    return [((i + 1) % stages, i) for i in range(stages)]


def multiplied(w: jax.Array, counted: Counted) -> Counted:
    x, n = counted
    return jnp.tanh(x @ w), n + 1


def _started(x: jax.Array) -> Counted:
    return x, jnp.int32(0)


def _times(w: jax.Array, times: Any, counted: Counted) -> Counted:
    return lax.fori_loop(0, times, lambda _, c: multiplied(w, c), counted)


def bounds(w: jax.Array, x: jax.Array) -> Counted:
    """A scan of as many steps as there are devices; the index that arrives bounds a loop."""

    def step(carry: Any, _: None) -> Any:
        counted, index = carry
        counted = _times(w, index + 1, counted)
        return (counted, lax.ppermute(index, "ring", onwards(4))), None

    return lax.scan(step, (_started(x), lax.axis_index("ring")), None, length=4)[0][0]


def received_first(w: jax.Array, x: jax.Array) -> Counted:
    """The index is passed on before it is used, in the same step."""

    def step(_: Any, carry: Any) -> Any:
        counted, index = carry
        index = lax.ppermute(index, "ring", onwards(4))
        return _times(w, index * index, counted), index

    return lax.fori_loop(0, 3, step, (_started(x), lax.axis_index("ring")))[0]


def causal(w: jax.Array, x: jax.Array) -> Counted:
    """Ring attention's branch: blocks after the device's own are skipped."""
    own = lax.axis_index("ring")

    def step(_: Any, carry: Any) -> Any:
        counted, index = carry
        counted = lax.cond(index <= own, lambda c: multiplied(w, c), lambda c: c, counted)
        return counted, lax.ppermute(index, "ring", backwards(4))

    return lax.fori_loop(0, 4, step, (_started(x), own))[0]


def three_cases(w: jax.Array, x: jax.Array) -> Counted:
    """An earlier block takes two products, the device's own one, a later one none."""
    own = lax.axis_index("ring")

    def step(_: Any, carry: Any) -> Any:
        counted, index = carry
        cases = [
            lambda c: multiplied(w, multiplied(w, c)),
            lambda c: multiplied(w, c),
            lambda c: c,
        ]
        counted = lax.switch(jnp.sign(index - own) + 1, cases, counted)
        return counted, lax.ppermute(index, "ring", onwards(4))

    return lax.fori_loop(0, 4, step, (_started(x), own))[0]


def one_axis_of_two(w: jax.Array, x: jax.Array) -> Counted:
    """The number on both axes travels along one of them."""

    def step(carry: Any, _: None) -> Any:
        counted, index = carry
        counted = _times(w, index, counted)
        return (counted, lax.ppermute(index, "ring", backwards(4))), None

    number = lax.axis_index("ring") * 2 + lax.axis_index("copy")
    return lax.scan(step, (_started(x), number), None, length=3)[0][0]


def without_a_source(w: jax.Array, x: jax.Array) -> Counted:
    """The first device receives nothing: zeros."""

    def step(_: Any, carry: Any) -> Any:
        counted, index = carry
        counted = _times(w, index + 1, counted)
        return counted, lax.ppermute(index + 1, "ring", onwards(4)[:-1])

    return lax.fori_loop(0, 5, step, (_started(x), lax.axis_index("ring")))[0]


def both_directions(w: jax.Array, x: jax.Array) -> Counted:
    """Two indices meet: a device works where they differ."""

    def step(_: Any, carry: Any) -> Any:
        counted, left, right = carry
        counted = lax.cond(left != right, lambda c: multiplied(w, c), lambda c: c, counted)
        left = lax.ppermute(left, "ring", backwards(4))
        return counted, left, lax.ppermute(right, "ring", onwards(4))

    own = lax.axis_index("ring")
    return lax.fori_loop(0, 6, step, (_started(x), own, own))[0]


def layers(w: jax.Array, x: jax.Array) -> Counted:
    """A ring in each of three layers; where it stops, the next layer goes on."""

    def layer(carry: Any, number: jax.Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            counted, index = carry
            counted = lax.cond(index > number, lambda c: multiplied(w, c), lambda c: c, counted)
            return counted, lax.ppermute(index, "ring", onwards(4))

        return lax.fori_loop(0, 3, step, carry), None

    start = (_started(x), lax.axis_index("ring"))
    return lax.scan(layer, start, jnp.arange(3))[0][0]


def gathered(w: jax.Array, x: jax.Array) -> Counted:
    """Every device knows what all had, and takes its neighbour's."""

    def step(_: Any, carry: Any) -> Any:
        counted, index = carry
        table = lax.all_gather(index, "ring")
        counted = _times(w, table[(lax.axis_index("ring") + 1) % 4], counted)
        return counted, index + jnp.max(table)

    return lax.fori_loop(0, 3, step, (_started(x), lax.axis_index("ring")))[0]


def until_all_are_done(w: jax.Array, x: jax.Array) -> Counted:
    """The devices' sum ends the loop."""

    def step(carry: Any) -> Any:
        counted, left = carry
        counted = lax.cond(left > 0, lambda c: multiplied(w, c), lambda c: c, counted)
        return counted, jnp.maximum(left - 1, 0)

    def goes_on(carry: Any) -> Any:
        return lax.psum(carry[1], "ring") > 0

    return lax.while_loop(goes_on, step, (_started(x), lax.axis_index("ring")))[0]


def groups_apart(w: jax.Array, x: jax.Array) -> Counted:
    """Only some columns of devices run a ring: those of `copy` 1."""

    def ring(counted: Counted) -> Counted:
        def step(_: Any, carry: Any) -> Any:
            counted, index = carry
            return _times(w, index, counted), lax.psum(index, "ring") % 5

        return lax.fori_loop(0, 3, step, (counted, lax.axis_index("ring")))[0]

    return lax.cond(lax.axis_index("copy") == 1, ring, lambda c: multiplied(w, c), _started(x))


BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (
        bounds,
        received_first,
        causal,
        three_cases,
        one_axis_of_two,
        without_a_source,
        both_directions,
        layers,
        gathered,
        until_all_are_done,
        groups_apart,
    )
}


RECORDED = ("bounds", "causal", "layers", "without_a_source")
PLATFORMS = ("v5e", "v6e")


def build(name: str, devices: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step and the shapes of its arguments, on the first eight devices."""
    return mapped(BODIES[name], devices)


def mapped(body: Body, devices: Any) -> tuple[Any, tuple[Any, ...]]:
    """A body on a mesh of rings of four and two copies; and the shapes of its arguments."""
    mesh = Mesh(np.array(devices[:DEVICES]).reshape(4, 2), ("ring", "copy"))
    everywhere = P(("ring", "copy"))

    def on_device(w: jax.Array, x: jax.Array) -> Any:
        y, n = body(w, x)
        return y, n[None]

    step = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), everywhere), out_specs=everywhere, check_vma=False
    )

    def of(dims: tuple[int, ...], split: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, split))

    return step, (of((WIDTH, WIDTH), P()), of((DEVICES * ROWS, WIDTH), everywhere))
