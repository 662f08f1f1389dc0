"""One real trace of eight CPU devices for all tests of profiles."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mfu_jax

LAYERS, D, F, ROWS = 3, 64, 128, 32
STEPS = 4

# Of the job, over LAYERS: x[ROWS, D] @ [D, F], then @ [F, D], forward and two backward; the first
# layer's input needs a gradient as well, because all layers run in one scan.
MODEL_FLOPS = LAYERS * 3 * 2 * (2 * ROWS * D * F)


def step(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    gradient = jax.grad(loss)(weights)
    with jax.named_scope("optimizer"):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


@pytest.fixture(scope="session")
def cpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a sharded step on 4 × 2 devices, with its program."""
    folder = tmp_path_factory.mktemp("trace")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def put(shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        values = jnp.full(shape, 0.01, jnp.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    weights = put((LAYERS, D, F), None, "data", "model"), put((LAYERS, F, D), None, "model", "data")
    x = put((ROWS, D), "data")
    train = jax.jit(step)
    weights = jax.block_until_ready(train(weights, x))
    with mfu_jax.profile(folder, train, weights, x):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                weights = train(weights, x)
    return folder
