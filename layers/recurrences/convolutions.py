"""The short causal convolution before recurrences."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def short_convolution(x: jax.Array, kernel: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Depthwise and causal; a token's window stops at the start of its document.

    Args:
        x: [batch, sequence, channels].
        kernel: [size, channels]; the last row multiplies the token itself.
        segment_ids: [batch, sequence].
    """
    size, length = kernel.shape[0], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (size - 1, 0), (0, 0)))
    segments = jnp.pad(segment_ids, ((0, 0), (size - 1, 0)), constant_values=-1)
    window = []
    for i in range(size):
        same = segments[:, i : i + length] == segment_ids
        window.append(jnp.where(same[..., None], padded[:, i : i + length], 0))
    with jax.named_scope("conv"):
        return jnp.einsum("bskc,kc->bsc", jnp.stack(window, axis=2), kernel.astype(x.dtype))
