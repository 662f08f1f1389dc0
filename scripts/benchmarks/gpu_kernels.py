"""Times attention kernels and matmuls on this machine's GPU: what `mfu-jax plan` assumes of them.

    python -m scripts.benchmarks.gpu_kernels [--write]

Attention is cuDNN's, causal, forward and backward, with and without a mask of [batch, 1, T, T] (the
reference trainer passes one, for packed documents). Shares are of the bf16 peak; causal attention
counts half of all pairs, and 2.5 times the forward pass for the backward pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mfu_jax import hardware
from scripts import results

_ATTENTION = ((32, 1024, 12, 64), (4, 2048, 16, 128), (8, 4096, 32, 64), (2, 8192, 32, 128))
_MATMULS = (
    (8192, 8192, 8192),
    (8192, 2048, 8192),
    (8192, 2048, 2048),
    (8192, 1024, 1024),
    (8192, 50304, 1024),
    (8192, 50257, 1024),
    (50257, 1024, 8192),
    (8192, 1024, 50257),
)
_SECONDS = 0.3  # of each measurement, after a warm-up


def main() -> None:
    peak = hardware.lookup(jax.devices()[0].device_kind).peak_flops_per_sec("bf16")
    rows: list[tuple[str, str, str]] = []
    for batch, length, heads, width in _ATTENTION:
        flops = 2 * batch * heads * length**2 * width  # two matmuls, half of the pairs
        for is_masked in (False, True):
            forward, backward = _attention(batch, length, heads, width, is_masked)
            name = f"attention {batch} x {length} x {heads} x {width}" + " masked" * is_masked
            rows.append((f"{name}, forward", *_cells(forward, flops, peak)))
            rows.append((f"{name}, both", *_cells(backward, 3.5 * flops, peak)))
    for m, n, k in _MATMULS:
        a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
        b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
        seconds = _seconds(jax.jit(jnp.matmul), a, b)
        rows.append((f"matmul {m} x {k} x {n}", *_cells(seconds, 2 * m * n * k, peak)))
    named = results.named(("kernel", "ms", "share of the peak"), rows)
    print(results.table(named))
    if "--write" in sys.argv:
        results.write("gpu_kernels", "attention and matmuls, share of the bf16 peak", named)


def _attention(
    batch: int, length: int, heads: int, width: int, is_masked: bool
) -> tuple[float, float]:
    """Seconds of a forward pass, and of a forward and backward pass."""
    shape = (batch, length, heads, width)
    q, k, v = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 3)
    )
    segments = jnp.ones((batch, length), jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None] if is_masked else None
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, implementation="cudnn"
        )

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v).astype(jnp.float32).sum()

    return _seconds(jax.jit(attend), q, k, v), _seconds(jax.jit(jax.grad(loss, (0, 1, 2))), q, k, v)


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    """Mean seconds of a call, with calls in flight one after another."""
    compiled = function.lower(*args).compile()  # type: ignore[attr-defined]
    jax.block_until_ready([compiled(*args) for _ in range(3)])
    began = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    count = max(3, int(_SECONDS / (time.perf_counter() - began)))
    began = time.perf_counter()
    out = None
    for _ in range(count):
        out = compiled(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / count


def _cells(seconds: float, flops: float, peak: float) -> tuple[str, str]:
    return f"{seconds * 1e3:.3f}", f"{flops / seconds / peak:.1%}"


if __name__ == "__main__":
    main()
