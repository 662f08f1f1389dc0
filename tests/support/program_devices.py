"""Programs in which devices do different work: branches and bounds that follow the device's index.

Each entry of `PROGRAMS`: what makes the step for a mesh of stages, and its model FLOPs by hand,
over all devices.
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
STAGES, COPIES = 4, 2  # devices along the stages, and beside them
MICROBATCHES = 4
ONE = 2 * ROWS * WIDTH * WIDTH
P = PartitionSpec

Step = Callable[[jax.Array, jax.Array], Any]
Body = Callable[[jax.Array, jax.Array], jax.Array]


def mapped(mesh: Mesh, body: Body, out: PartitionSpec, *, x: PartitionSpec) -> Step:
    """`body` on each device: the weights of its stage [1, WIDTH, WIDTH], and its part of `x`."""
    return jax.shard_map(body, mesh=mesh, in_specs=(P("stage"), x), out_specs=out, check_vma=False)  # type: ignore[return-value]


def branches(mesh: Mesh) -> Step:
    """Stages multiply zero, one, two and three times."""

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        kinds = [
            lambda x: x,
            lambda x: x @ w[0],
            lambda x: x @ w[0] @ w[0],
            lambda x: x @ w[0] @ w[0] @ w[0],
        ]
        return lax.switch(lax.axis_index("stage"), kinds, x)

    return mapped(mesh, body, P(("stage", "copy")), x=P("copy"))


def bounds(mesh: Mesh) -> Step:
    """Devices multiply once to eight times."""

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        number = lax.axis_index("stage") * COPIES + lax.axis_index("copy")
        return lax.fori_loop(0, number + 1, lambda _, x: jnp.tanh(x @ w[0]), x)

    return mapped(mesh, body, P(("stage", "copy")), x=P("copy"))


def exchanged(mesh: Mesh) -> Step:
    """As often as the stages' numbers sum to, then as the next stage's number says."""

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")
        following = [((i + 1) % STAGES, i) for i in range(STAGES)]
        for times in (lax.psum(stage, "stage"), lax.ppermute(stage, "stage", following)):
            x = lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ w[0]), x)
        return x

    return mapped(mesh, body, P(("stage", "copy")), x=P("copy"))


def pipeline(mesh: Mesh) -> Step:
    """The gradient of a pipeline: a stage works while it has a microbatch, the last one has a head.

    Each microbatch needs a product in every stage and one in the head, forward and twice backward;
    the first stage's input needs no gradient, but its loop does not know that.
    """

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")

        def tick(carry: Any, t: jax.Array) -> Any:
            h, total = carry
            h = jnp.where(stage == 0, x[jnp.clip(t - stage, 0, MICROBATCHES - 1)], h)
            works = (t >= stage) & (t < stage + MICROBATCHES)
            h = lax.cond(works, lambda h: jnp.tanh(h @ w[0]), lambda h: h, h)
            ends = (stage == STAGES - 1) & works
            total += lax.cond(ends, lambda h: jnp.sum(jnp.tanh(h @ w[0].T)), lambda h: 0.0, h)
            ring = [(i, (i + 1) % STAGES) for i in range(STAGES)]
            return (lax.ppermute(h, "stage", ring), total), None

        start = (jnp.zeros((ROWS, WIDTH)), 0.0)
        carry, _ = lax.scan(tick, start, jnp.arange(STAGES + MICROBATCHES - 1))
        return lax.psum(carry[1], ("stage", "copy"))

    total = mapped(mesh, body, P(), x=P(None, "copy"))
    return jax.value_and_grad(total)


_ROWS = (COPIES * ROWS, WIDTH)
PROGRAMS: dict[str, tuple[Callable[[Mesh], Step], tuple[int, ...], PartitionSpec, int]] = {
    "branches": (branches, _ROWS, P("copy"), COPIES * (0 + 1 + 2 + 3) * ONE),
    "bounds": (bounds, _ROWS, P("copy"), sum(range(1, STAGES * COPIES + 1)) * ONE),
    "exchanged": (exchanged, _ROWS, P("copy"), COPIES * (STAGES + 1) * sum(range(STAGES)) * ONE),
    "pipeline": (
        pipeline,
        (MICROBATCHES, *_ROWS),
        P(None, "copy"),
        3 * COPIES * MICROBATCHES * (STAGES + 1) * ONE,
    ),
}
PLATFORMS = ("v5e", "h100")


def build(name: str, devices: Any) -> tuple[Step, tuple[Any, ...]]:
    """A step and the shapes of its arguments, on the first eight devices."""
    grid = np.array(devices[: STAGES * COPIES]).reshape(STAGES, COPIES)
    mesh = Mesh(grid, ("stage", "copy"))
    make, rows, spec, _ = PROGRAMS[name]

    def of(dims: tuple[int, ...], split: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, split))

    return make(mesh), (of((STAGES, WIDTH, WIDTH), P("stage")), of(rows, spec))
