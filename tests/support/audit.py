"""What a program of the audit is: a step that tries to fool the counters, and its model FLOPs.

Each is a step as somebody might write it; its ledger must have no residual that no line names.
The expected numbers are arithmetic on the sizes below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

B, D, H, L = 8, 16, 32, 3  # rows, width, hidden width, layers
ONE = 2 * B * D * H  # one matmul between width and hidden width
SQUARE = 2 * B * D * D
CHUNKS = 4
TAPS, SIZE, CHANNELS = 3, 8, 6  # of convolutions
GROUPS, ROWS = 4, 32  # of ragged products


class Audit(NamedTuple):
    """One program.

    Attributes:
        function: the step.
        arguments: their shapes.
        forward: forward model FLOPs, the evaluation included.
        backward: backward model FLOPs.
        optimizer: FLOPs on gradients, as traced.
        evaluation: the part of `forward` that evaluates.
        removed: model FLOPs for which the CPU program has no matmul; None where matmuls on vector
            units make it a matter of definition.
        expansion: FLOPs of the CPU program on the zeros of products computed densely.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    forward: int
    backward: int = 0
    optimizer: int = 0
    evaluation: int = 0
    removed: int | None = 0
    expansion: int = 0


AUDIT: dict[str, Audit] = {}


def of(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def audit(*arguments: Any, **expected: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        AUDIT[function.__name__] = Audit(function, arguments, **expected)
        return function

    return add


MLP = {"up": of(D, H), "down": of(H, D)}
X = of(B, D)
# Forward of the MLP's loss, and its backward: no gradient of x.
FORWARD, BACKWARD = 2 * ONE, 3 * ONE


def mlp(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["down"]


def loss(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(mlp(w, x) ** 2)


def square_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def sgd(w: Any, g: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g)
