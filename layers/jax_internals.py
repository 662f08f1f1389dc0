"""JAX's private functions of attention, for which it has no public name; checked on 0.8 to 0.12."""

from __future__ import annotations

from typing import Any

import jax


def cudnn_causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    scale: float,
    window: int | None,
) -> jax.Array:
    """cuDNN's causal attention, whose values [B, S, K, v] may be narrower than keys [B, S, K, h].

    `jax.nn.dot_product_attention` calls the same function, but wants values as wide as keys.

    Args:
        q: queries, [B, S, N, h].
        k, v: keys and values.
        mask: True where a query sees a key, [B, 1, S, S]; None: no more than the causal mask.
        scale: of the scores.
        window: how many keys a query sees; None: all before it.

    Returns:
        [B, S, N, v].
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    causal = MaskType.CAUSAL
    context: jax.Array = dot_product_attention(
        q, k, v, mask=mask, scale=scale, mask_type=causal, sliding_window_length=window
    )
    return context


def splash_backward(residuals: tuple[Any, ...], dout: jax.Array, **settings: Any) -> Any:
    """The gradients of queries, keys and values of the splash kernel, by some of the keys.

    The public kernel's gradient takes its own sums; a ring's are over other devices' keys, too.

    Args:
        residuals: one row's q [N, S, h], k [K, S, h], v [K, S, v], segments, sinks, results
            [N, S, v], logs of the weights' sums [N, S], and the masks' tables of both kernels.
        dout: the results' gradient, [N, S, v].
        settings: the kernel's own.

    Returns:
        The gradients, shaped as q, k and v.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    run = splash_attention_kernel._splash_attention_bwd
    return run(res=residuals, do=dout, **settings)[3:6]
