"""Programs of kernels that are read from their bodies, or from nothing but their shapes.

Pallas for TPUs without a grid, Mosaic GPU and megablox; cuDNN's attention in FP8, and with values
narrower than keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from mfu_jax.layers.attention import kernels as attention_kernels  # noqa: F401, they register themselves
from mfu_jax.layers.attention.ops import ATTENTION_OPS, AttentionInputs

from mfu_jax.util.jax_internals import set_cuda_capability

SIZE = 128
M, N, K = 256, 384, 512  # of the matmul on tensor cores
GROUPS, ROWS, WIDTH, HIDDEN, TILE = 4, 512, 128, 256, 128  # of megablox
TAIL_IN, TAIL_OUT, TAIL_TILE = 384, 640, 256  # of XLA's grouped matmul
BATCH, LENGTH, HEADS, HEAD_DIM = 2, 256, 2, 64  # of attention on tensor cores
FP8_SHAPE = (2, 256, 4, 128)
NARROW_SHAPE, KEY_WIDTH, VALUE_WIDTH = (2, 256, 4), 192, 128  # DeepSeek-V3's widths of heads
PAGES, PAGE, PAGES_OF_A_SEQUENCE, SEQUENCES = 16, 16, 8, 4  # of paged attention
QUERY_HEADS, KEY_HEADS = 8, 2

_FP8_PARAMETERS = (
    "amax_dQ amax_dK amax_dV amax_dP descale_q descale_k descale_v descale_s scale_s scale_o "
    "descale_o descale_dO descale_dP scale_dQ scale_dK scale_dV scale_dP"
).split()


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _dot(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def _thrice(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros_like(out_ref)

    def add(_: Any, carry: Any) -> Any:
        out_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
        return carry

    jax.lax.fori_loop(0, 3, add, 0)


def misnamed(x: jax.Array, w: jax.Array) -> Any:
    """Kernels without a grid whose names are those of XLA's own calls: 1, 3 and 2 matmuls."""
    from jax.experimental import pallas as pl

    shape = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    block = pl.BlockSpec((SIZE, SIZE), lambda i: (0, 0))
    twice = pl.pallas_call(
        _dot, out_shape=shape, name="threefry2x32_mlp", grid=(2,), in_specs=[block] * 2,
        out_specs=block,
    )  # fmt: skip
    return (
        pl.pallas_call(_dot, out_shape=shape, name="TopK")(x, w),
        pl.pallas_call(_thrice, out_shape=shape, name="Pin")(x, w),
        twice(x, w),
    )


def wgmma(a: jax.Array, b: jax.Array) -> Any:
    """JAX's matmul for Hopper: warp-specialised, in clusters, a loop over tiles for each block."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

    hopper.get_num_sms = lambda: 4  # of a device that is not there
    dimension = hopper.MatmulDimension.M
    config = hopper.TuningConfig(
        tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2, cluster_dimension=dimension
    )
    return hopper.matmul(a, b, None, config)


def wgmma_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """JAX's causal attention for Hopper: warp groups of 64 queries, blocks of 64 keys."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=64, max_concurrent_steps=2, causal=True
    )
    return attention_mgpu.attention(q, k, v, config)


def megablox(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> Any:
    """A grouped matmul and its gradients: gmm, gmm, tgmm."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = ops.gmm(x, w, group_sizes, jnp.bfloat16, (TILE, TILE, TILE))
        return (y.astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def ragged_in_tiles(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """XLA's grouped matmul, in tiles that neither `TAIL_IN` nor `TAIL_OUT` is a multiple of."""
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(ragged_dot_tiling=f"{TILE},{TAIL_TILE},{TAIL_TILE}"):
        return jax.lax.ragged_dot(x, w, group_sizes)


def paged(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, pages: jax.Array) -> Any:
    """A decoding step of paged attention, over pages of 16 keys, four at a time."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return paged_attention(q, k, v, lengths, pages, pages_per_compute_block=4)


def cudnn_fp8(q: jax.Array, k: jax.Array, v: jax.Array, one: jax.Array) -> Any:
    """cuDNN's FP8 attention, causal, and its gradients."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    parameters = dict.fromkeys(_FP8_PARAMETERS, one)
    mask = cudnn.MaskType.CAUSAL

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, *_ = cudnn.dot_product_attention(
            q, k, v, use_fp8=True, fp8_params=parameters, mask_type=mask
        )
        return out.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def cudnn_narrow_values(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """cuDNN's causal attention with values narrower than keys, and its gradients."""
    set_cuda_capability("9.0")
    return jax.value_and_grad(causal_attention, (1, 2, 3))("cudnn_flash", q, k, v)


def causal_attention(name: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The sum of the result of one of the layers' implementations."""
    segments = jnp.ones(q.shape[:2], jnp.int32)
    context = ATTENTION_OPS[name](AttentionInputs(q, k, v, segments, packed=False))
    return context.astype(jnp.float32).sum()


_CACHE = _of(KEY_HEADS, PAGES, PAGE, HEAD_DIM * 2)

Kernel = tuple[Callable[..., Any], tuple[Any, ...]]

KERNELS: dict[str, dict[str, Kernel]] = {
    "v5e": {
        "misnamed": (misnamed, (_of(SIZE, SIZE),) * 2),
        "paged": (
            paged,
            (
                _of(SEQUENCES, QUERY_HEADS, HEAD_DIM * 2),
                _CACHE,
                _CACHE,
                _of(SEQUENCES, dtype=jnp.int32),
                _of(SEQUENCES, PAGES_OF_A_SEQUENCE, dtype=jnp.int32),
            ),
        ),
    },
    "v6e": {
        "megablox": (
            megablox,
            (_of(ROWS, WIDTH), _of(GROUPS, WIDTH, HIDDEN), _of(GROUPS, dtype=jnp.int32)),
        ),
        "ragged_tail": (
            ragged_in_tiles,
            (_of(ROWS, TAIL_IN), _of(GROUPS, TAIL_IN, TAIL_OUT), _of(GROUPS, dtype=jnp.int32)),
        ),
    },
    "tpu7x": {"misnamed": (misnamed, (_of(SIZE, SIZE),) * 2)},
    "h100": {
        "wgmma": (wgmma, (_of(M, K), _of(K, N))),
        "wgmma_attention": (
            wgmma_attention,
            (_of(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=jnp.float16),) * 3,
        ),
        "cudnn_narrow_values": (
            cudnn_narrow_values,
            (*(_of(*NARROW_SHAPE, KEY_WIDTH),) * 2, _of(*NARROW_SHAPE, VALUE_WIDTH)),
        ),
        "cudnn_fp8": (
            cudnn_fp8,
            (
                *(_of(*FP8_SHAPE, dtype=jnp.float8_e4m3fn),) * 3,
                _of(1, 1, 1, 1, dtype=jnp.float32),
            ),
        ),
    },
}
