"""The small transformer step that every platform's program is compared on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def reference_step(
    *,
    scan: bool,
    remat: bool,
    B: int = 2,
    S: int = 128,
    D: int = 64,
    F: int = 256,
    V: int = 512,
    H: int = 4,
    L: int = 4,
    dtype: Any = jnp.float32,
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """An SGD step of a causal transformer, and the shapes of its arguments."""

    def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("attention"):
            q, k, v = ((x @ p[n]).reshape(B, S, H, D // H) for n in "qkv")
            scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32)
            scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e9)
            weights = jax.nn.softmax(scores, -1).astype(x.dtype)
            x = x + jnp.einsum("bhst,bthd->bshd", weights, v).reshape(B, S, D) @ p["o"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ p["wi"]) @ p["wo"]

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("layers"):
            return (jax.checkpoint(block) if remat else block)(x, p)

    def loss(p: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = p["embedding"][tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["layers"])
        else:
            for i in range(L):
                x = layer(x, jax.tree.map(lambda a, i=i: a[i], p["layers"]))
        with jax.named_scope("head"):
            logits = (x @ p["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(picked)

    def step(p: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        value, gradient = jax.value_and_grad(loss)(p, tokens)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda a, g: a - 0.1 * g.astype(a.dtype), p, gradient), value

    def of(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    layers = {n: of(L, D, D) for n in "qkvo"} | {"wi": of(L, D, F), "wo": of(L, F, D)}
    weights = {"embedding": of(V, D), "head": of(D, V), "layers": layers}
    return step, (weights, jax.ShapeDtypeStruct((B, S), jnp.int32))
