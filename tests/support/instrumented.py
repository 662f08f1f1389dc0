"""A small step to instrument, and what its tests look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PEAK = {"peak_tflops_per_device": 0.001}

# x[B, D] @ w1[D, F] @ w2[F, E]; training needs no gradient of x, so the first layer costs 2 × and
# the second 3 × its forward: 2·B·D·F·2 + 2·B·F·E·3.
B, D, F, E = 4, 8, 16, 2
STEP_FLOPS = 2 * B * D * F * 2 + 2 * B * F * E * 3


class Compilations:
    """Names of the executables that JAX makes."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(details.get("fun_name")))

    def of(self, name: str) -> int:
        return self.names.count(f"jit({name})")


def train_step(state: Any, x: jax.Array, scale: float = 1.0) -> tuple[Any, dict[str, jax.Array]]:
    def loss(weights: Any) -> jax.Array:
        return scale * jnp.mean((jnp.tanh(x @ weights["w1"]) @ weights["w2"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), {"loss": value}


def make_state() -> dict[str, jax.Array]:
    one, two = jax.random.split(jax.random.key(0))
    return {"w1": jax.random.normal(one, (D, F)), "w2": jax.random.normal(two, (F, E))}


def batch(rows: int = B) -> jax.Array:
    return jnp.arange(rows * D, dtype=jnp.float32).reshape(rows, D) / 100


def run(step: Callable[..., Any], steps: int = 4) -> list[Any]:
    state, outputs = make_state(), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        outputs.append(jax.tree.map(np.asarray, (state, metrics)))
    return outputs
