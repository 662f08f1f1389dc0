"""Programs whose matmuls XLA writes as a multiplication and a sum, on some platforms or on all.

Each entry of `PROGRAMS`: the function, the shapes of its arguments, its matmul FLOPs by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Serving: one token of one sequence, two scanned layers, four heads in two groups; and attention
# over the cache of four sequences, each head with keys of its own.
LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY = 2, 256, 512, 128, 1024
GROUPS, SHARED, HEAD = 2, 2, 64
SEQUENCES, HEADS = 4, 8


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", q, k), -1)
    return jnp.einsum("bhs,bshd->bhd", weights, v)


def serving(
    weights: dict[str, Any], cache: jax.Array, x: jax.Array, attention: tuple[jax.Array, ...]
) -> Any:
    """Logits of the next token, and the attention of four other sequences."""

    def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        w, (k, v) = of_layer
        q = (x @ w["q"]).reshape(1, GROUPS, SHARED, HEAD)
        scores = jnp.einsum("bgsh,bkgh->bgsk", q, k)
        mixed = jnp.einsum("bgsk,bkgh->bgsh", jax.nn.softmax(scores, -1), v)
        x = x + mixed.reshape(x.shape) @ w["o"]
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    x, _ = lax.scan(layer, x, (weights["layers"], cache))
    return x @ weights["head"], _attend(*attention)


_LAYER = {
    "q": _of(LAYERS, WIDTH, WIDTH),
    "o": _of(LAYERS, WIDTH, WIDTH),
    "up": _of(LAYERS, WIDTH, HIDDEN),
    "down": _of(LAYERS, HIDDEN, WIDTH),
}
_SERVING = (
    {"layers": _LAYER, "head": _of(WIDTH, VOCABULARY)},
    _of(LAYERS, 2, 1, KEYS, GROUPS, HEAD),
    _of(1, WIDTH),
    (_of(SEQUENCES, HEADS, HEAD), *[_of(SEQUENCES, KEYS, HEADS, HEAD)] * 2),
)
_LAYER_FLOPS = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + 2 * (2 * KEYS * WIDTH)
ATTENTION_FLOPS = 2 * (2 * SEQUENCES * HEADS * KEYS * HEAD)
SERVING_FLOPS = LAYERS * _LAYER_FLOPS + 2 * WIDTH * VOCABULARY + ATTENTION_FLOPS

# Training: one row through two layers, 16 rows through a value head with one output.
ROWS, INPUTS, UNITS = 16, 128, 256


def training(weights: dict[str, jax.Array], row: jax.Array, rows: jax.Array) -> Any:
    """Loss and gradients."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("policy"):
            policy = jnp.tanh(row @ w["in"]) @ w["out"]
        with jax.named_scope("value"):
            value = jnp.tanh(rows @ w["in"]) @ w["value"]
        return (policy**2).sum() + (value**2).sum()

    return jax.value_and_grad(loss)(weights)


_TRAINING = (
    {
        "in": _of(INPUTS, UNITS, dtype=jnp.float32),
        "out": _of(UNITS, INPUTS, dtype=jnp.float32),
        "value": _of(UNITS, 1, dtype=jnp.float32),
    },
    _of(1, INPUTS, dtype=jnp.float32),
    _of(ROWS, INPUTS, dtype=jnp.float32),
)
# Forward, the gradient of each weight, and of each hidden layer.
POLICY_FLOPS = (2 + 2 + 1) * 2 * INPUTS * UNITS
VALUE_FLOPS = 2 * ROWS * (2 * INPUTS * UNITS + 3 * UNITS)
TRAINING_FLOPS = POLICY_FLOPS + VALUE_FLOPS

PROGRAMS = {
    "serving": (serving, _SERVING, SERVING_FLOPS),
    "training": (training, _TRAINING, TRAINING_FLOPS),
}
PLATFORMS = ("cpu", "v5e", "v6e", "tpu7x", "h100")
CRASHES = {"tpu7x_vectors_serving"}  # libtpu 0.0.42.1, while compiling
