"""Programs that ran on an H100 beside its own counters, as in tests/data/h100_counters.yaml.

Without the GPU nothing is tuned: where the counters are those of a tuned tile, the compiler is told
that tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Dims = tuple[int, ...]


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ weights[0])
        return jnp.sum(jnp.square(hidden @ weights[1]).astype(jnp.float32))

    return jax.grad(loss)((up, down))


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


def _attention(is_causal: bool) -> Callable[..., jax.Array]:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")

    return attention


def _attention_gradient(*qkv: jax.Array) -> Any:
    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(_attention(is_causal=True)(*arrays).astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(*qkv)


def _decode(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def _convolve(images: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        images,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _convolutions(images: jax.Array, *kernels: jax.Array) -> Any:
    def loss(kernels: tuple[jax.Array, ...]) -> jax.Array:
        value = images
        for kernel, stride in zip(kernels, (1, 2, 1), strict=True):
            value = jax.nn.relu(_convolve(value, kernel, stride))
        return jnp.sum(jnp.square(value.astype(jnp.float32)))

    return jax.grad(loss)(kernels)


def _depthwise(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return _convolve(images, kernel, groups=256)


def _precise(*arrays: jax.Array) -> Any:
    with jax.default_matmul_precision("highest"):
        return _mlp(*arrays)


def _fp8(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """The pattern that XLA turns into one FP8 matmul: both operands widened and scaled."""
    wide = (
        a.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for a, s in ((x, x_scale), (w, w_scale))
    )
    return lax.dot(*wide)


def _ragged(rows: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(rows, experts, sizes)


def _pallas_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import mha

    out: jax.Array = mha(q, k, v, segment_ids=None, causal=True)
    return out


_QKV = (_of(4, 2048, 16, 128),) * 3
_FLOAT32 = tuple(_of(*s, dtype=jnp.float32) for s in ((4096, 2048), (2048, 8192), (8192, 2048)))
_TUNED = {
    "xla_gpu_override_gemm_autotuner": "block_m: 128 block_n: 256 block_k: 64 split_k: 1 "
    "num_stages: 4 num_warps: 8 num_ctas: 1"
}
# Name → function, arguments, compiler options.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]] = {
    "mlp": (_mlp, (_of(4096, 2048), _of(2048, 8192), _of(8192, 2048)), None),
    "mlp_float32": (_mlp, _FLOAT32, None),
    "mlp_highest": (_precise, _FLOAT32, None),
    "fp8": (
        _fp8,
        (*(_of(4096, 4096, dtype=jnp.float8_e4m3fn),) * 2, *(_of(dtype=jnp.float32),) * 2),
        {"xla_gpu_enable_triton_gemm": False},
    ),
    "ragged": (
        _ragged,
        (_of(4096, 1024), _of(8, 1024, 2048), _of(8, dtype=jnp.int32)),
        None,
    ),
    "pallas": (_pallas_attention, (_of(4, 1024, 8, 64, dtype=jnp.float16),) * 3, None),
    "odd": (_matmul, (_of(4000, 1111), _of(1111, 777)), _TUNED),
    "attention": (_attention_gradient, _QKV, None),
    "attention_full": (_attention(is_causal=False), _QKV, None),
    "decode": (_decode, (_of(1, 4096), _of(8, 4096, 4096)), None),
    "convolutions": (
        _convolutions,
        (_of(32, 56, 56, 64), _of(3, 3, 64, 128), _of(3, 3, 128, 256), _of(3, 3, 256, 256)),
        None,
    ),
    "depthwise": (_depthwise, (_of(16, 64, 64, 256), _of(3, 3, 1, 256)), None),
}
