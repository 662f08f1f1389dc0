"""One traced function that two places of a program call: XLA inlines it late.

What XLA has added to it by then is named after the call (``jit(decode)/while/body/closed_call``),
such as the multiplication of each matrix-vector product. Each entry of `PROGRAMS`: the function,
the shapes of its arguments, its matmul FLOPs by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Decoding: one token of one sequence, two stacks of the same layer.
STACKS = {"first": 2, "second": 5}
WIDTH, HIDDEN, KEYS, HEADS = 128, 256, 64, 2


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, Any]:
    w, (k, v) = of_layer
    normed = _norm(x)
    q, new_k, new_v = ((normed @ w[name]).reshape(1, 1, HEADS, -1) for name in "qkv")
    k, v = (lax.dynamic_update_slice(a, b, (0, 3, 0, 0)) for a, b in ((k, new_k), (v, new_v)))
    scores = jnp.einsum("bhd,bshd->bhs", q[:, 0], k).astype(jnp.float32)
    mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
    x = x + mixed.reshape(x.shape) @ w["o"]
    normed = _norm(x)
    return x + (jax.nn.silu(normed @ w["up"]) * (normed @ w["gate"])) @ w["down"], (k, v)


def decode(stacks: dict[str, Any], x: jax.Array) -> Any:
    """The next hidden state, and both caches."""
    x, first = lax.scan(_layer, x, stacks["first"])
    x, second = lax.scan(_layer, x, stacks["second"])
    return x, first, second


def _stack(layers: int) -> Any:
    weights = {name: _of(layers, WIDTH, WIDTH) for name in "qkvo"}
    weights |= {name: _of(layers, WIDTH, HIDDEN) for name in ("up", "gate")}
    weights["down"] = _of(layers, HIDDEN, WIDTH)
    return weights, (_of(layers, 1, KEYS, HEADS, WIDTH // HEADS),) * 2


# Four square products, three of the MLP, and two of attention with every key.
LAYER_FLOPS = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * KEYS * WIDTH)
DECODE_FLOPS = sum(STACKS.values()) * LAYER_FLOPS

# PPO on single transitions: epochs over all of them, and one last pass.
EPOCHS, TRANSITIONS, INPUTS, UNITS, ACTIONS = 4, 6, 64, 128, 8
_CLIP, _RATE = 0.2, 1e-3


def _policy_loss(w: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.tanh(jnp.tanh(batch["observation"] @ w["in"]) @ w["mid"])
    chosen = jax.nn.log_softmax(hidden @ w["policy"])[..., 0]
    value = (hidden @ w["value"])[..., 0]
    ratio, advantage = jnp.exp(chosen - batch["before"]), batch["advantage"]
    clipped = jnp.clip(ratio, 1 - _CLIP, 1 + _CLIP)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    return ((value - batch["return"]) ** 2 - surrogate).mean()


def epochs(w: dict[str, jax.Array], transitions: dict[str, jax.Array]) -> Any:
    """The weights after all updates, and the losses."""

    def update(w: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradient = jax.value_and_grad(_policy_loss)(w, batch)
        return jax.tree.map(lambda a, b: a - _RATE * b, w, gradient), loss

    def epoch(w: Any, _: None) -> tuple[Any, jax.Array]:
        return lax.scan(update, w, transitions)

    w, losses = lax.scan(epoch, w, None, length=EPOCHS)
    w, last = lax.scan(update, w, transitions)
    return w, losses, last


_F32 = jnp.float32
_EPOCHS = (
    {
        "in": _of(INPUTS, UNITS, dtype=_F32),
        "mid": _of(UNITS, UNITS, dtype=_F32),
        "policy": _of(UNITS, ACTIONS, dtype=_F32),
        "value": _of(UNITS, 1, dtype=_F32),
    },
    {
        "observation": _of(TRANSITIONS, 1, INPUTS, dtype=_F32),
        **{name: _of(TRANSITIONS, 1, dtype=_F32) for name in ("before", "advantage", "return")},
    },
)
# Forward, the gradient of each weight, and of each layer's input but the first's.
_UPDATE_FLOPS = 2 * (2 * INPUTS * UNITS + 3 * UNITS * (UNITS + ACTIONS + 1))
EPOCHS_FLOPS = (EPOCHS + 1) * TRANSITIONS * _UPDATE_FLOPS

PROGRAMS = {
    "decode": (
        decode,
        ({name: _stack(n) for name, n in STACKS.items()}, _of(1, WIDTH)),
        DECODE_FLOPS,
    ),
    "epochs": (epochs, _EPOCHS, EPOCHS_FLOPS),
}
PLATFORMS = ("v5e", "v6e", "tpu7x")
