"""Programs whose FLOPs are in kernels: Pallas and Mosaic on TPU, cuDNN and cuBLAS on GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.reference_model import Shape, reference_step

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 1024, 128
WINDOW = 256


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def _flash(causal: bool) -> Callable[..., Any]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        return flash_attention(q, k, v, causal=causal, sm_scale=0.1)

    return _gradients(attend)


def beside_linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """The gradient of a step with flash attention, and a user's own linear attention in chunks."""

    def linear(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def chunk(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v = now
            scores = jnp.tril(jnp.einsum("bhqd,bhkd->bhqk", q, k))
            inside = jnp.einsum("bhqk,bhkd->bhqd", scores, v)
            past = jnp.einsum("bhqd,bhde->bhqe", q, state)
            return state + jnp.einsum("bhkd,bhke->bhde", k, v), inside + past

        chunks = (BATCH, HEADS, LENGTH // HEAD_DIM, HEAD_DIM, HEAD_DIM)
        now = tuple(jnp.moveaxis(x.reshape(chunks), 2, 0) for x in (q, k, v))
        state = jnp.zeros((BATCH, HEADS, HEAD_DIM, HEAD_DIM), q.dtype)
        return jnp.moveaxis(lax.scan(chunk, state, now)[1], 0, 2).reshape(q.shape)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        return linear(flash_attention(q, k, v, causal=True), k, v)

    return _gradients(attend)(q, k, v)


def _splash(
    *, window: int | None = None, fused: bool = False, mqa: bool = False
) -> Callable[..., Any]:
    """Splash attention in blocks of 256, causal or over a window of the last keys.

    With a window of 0, as with chunks of one block, each row of blocks has one: XLA writes the
    table of blocks as a broadcast.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernel,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        mask = masks.CausalMask((LENGTH, LENGTH))
        if window is not None:
            mask = masks.LocalMask((LENGTH, LENGTH), (window, 0), 0)
        forward = ("block_q", "block_kv", "block_kv_compute")
        backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
        apart = () if fused else ("block_q_dq", "block_kv_dq")
        sizes = kernel.BlockSizes(
            **dict.fromkeys((*forward, *backward, *apart), 256), use_fused_bwd_kernel=fused
        )
        make = kernel.make_splash_mqa_single_device if mqa else kernel.make_splash_mha_single_device
        return jax.vmap(make(masks.MultiHeadMask([mask] * HEADS), block_sizes=sizes))(q, k, v)

    return _gradients(attend)


SHARDS = 4  # of the sequence


def splash_in_context(devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Causal splash attention in blocks of 128, a quarter of the queries on each device.

    The masks of both batches are the same; each device takes its rows of their table of blocks.
    """
    mesh = Mesh(np.array(devices[: BATCH * SHARDS]).reshape(BATCH, SHARDS), ("data", "context"))
    queries, keys = PartitionSpec("data", None, "context"), PartitionSpec("data")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
        blocks = [f"block_{which}" for which in ("q", "kv", "kv_compute")]
        sizes = dict.fromkeys(blocks + [f"{block}_dkv" for block in blocks[:2]], 128)
        kernel = kernels.make_splash_mha(
            mask,
            head_shards=1,
            q_seq_shards=SHARDS,
            block_sizes=kernels.BlockSizes(
                **sizes, block_kv_dkv_compute=128, use_fused_bwd_kernel=True
            ),
        )
        tables = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context")))
        return jax.shard_map(
            lambda q, k, v, kernel: jax.vmap(kernel)(q, k, v),
            mesh=mesh,
            in_specs=(queries, keys, keys, tables),
            out_specs=queries,
            check_vma=False,
        )(q, k, v, kernel)

    def of(spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        shape = (BATCH, HEADS, LENGTH, HEAD_DIM)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    return _gradients(attend), (of(queries), of(keys), of(keys))


def _cudnn(**settings: Any) -> Callable[..., Any]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **settings)

    return _gradients(attend)


def triton(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """JAX's Pallas attention for GPUs: forward and backward are Triton kernels."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.gpu import attention

        return attention.mha(q, k, v, segment_ids=None, causal=True)

    return _gradients(attend)(q, k, v)


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _fp8(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """The pattern that XLA turns into one FP8 matmul: both operands widened and scaled."""
    wide = (
        a.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for a, s in ((x, x_scale), (w, w_scale))
    )
    return lax.dot(*wide)


def _fp8_direct(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot(x, w, preferred_element_type=jnp.float32)


def _convolution(x: jax.Array, kernel: jax.Array) -> Any:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1))(x, kernel)


TPU_QKV = (_of(BATCH, HEADS, LENGTH, HEAD_DIM),) * 3
_ONE_HEAD = _of(BATCH, LENGTH, HEAD_DIM)
_GPU_QKV = (_of(BATCH, LENGTH, HEADS, HEAD_DIM),) * 3
_GPU_ONE_HEAD = _of(BATCH, LENGTH, 1, HEAD_DIM)
_F8 = jnp.float8_e4m3fn
_MATMUL = (_of(256, 512), _of(512, 1024))
_FP8 = (_of(256, 512, dtype=_F8), _of(512, 1024, dtype=_F8))
_SCALES = (_of(dtype=jnp.float32),) * 2
_IMAGES = (_of(8, 32, 32, 16), _of(3, 3, 16, 32))
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}

Kernel = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]

KERNELS: dict[str, dict[str, Kernel]] = {
    "v5e": {
        "flash_causal": (_flash(True), TPU_QKV, None),
        "flash_full": (_flash(False), TPU_QKV, None),
        "flash_beside_linear": (beside_linear_attention, TPU_QKV, None),
        "splash_causal": (_splash(), TPU_QKV, None),
        "splash_window": (_splash(window=WINDOW), TPU_QKV, None),
        "splash_diagonal": (_splash(window=0), TPU_QKV, None),
        "splash_fused": (_splash(fused=True), TPU_QKV, None),
        "splash_mqa": (_splash(mqa=True), (TPU_QKV[0], _ONE_HEAD, _ONE_HEAD), None),
        "convolution": (_convolution, _IMAGES, None),
    },
    "tpu7x": {"fp8": (_fp8_direct, _FP8, None)},
    "h100": {
        "cudnn_full": (_cudnn(), _GPU_QKV, None),
        "cudnn_causal": (_cudnn(is_causal=True), _GPU_QKV, None),
        "cudnn_window": (
            _cudnn(is_causal=True, local_window_size=(WINDOW - 1, 0)),
            _GPU_QKV,
            None,
        ),
        "cudnn_mqa": (
            _cudnn(is_causal=True),
            (_GPU_QKV[0], _GPU_ONE_HEAD, _GPU_ONE_HEAD),
            None,
        ),
        "triton": (triton, _GPU_QKV, None),
        "cublas": (_matmul, _MATMUL, _NO_TRITON),
        "fp8": (_fp8, (*_FP8, *_SCALES), None),
        "fp8_cublas": (_fp8, (*_FP8, *_SCALES), _NO_TRITON),
        "convolution": (_convolution, _IMAGES, None),
    },
}

# Llama 3 70B (hidden 8192, MLP 28672, 64 heads of 128 in 8 groups, 80 layers, vocabulary 128256),
# with a plain MLP of as many weights and FLOPs: 2 · 43008 = 3 · 28672.
LLAMA_70B = Shape(
    B=1024,
    S=8192,
    D=8192,
    F=43008,
    V=128256,
    H=64,
    K=8,
    L=80,
    remat="full",
    dtype="bfloat16",
    attention="flash",
)


def llama70b_step(devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A Llama-3-70B-sized step: scanned, full remat, flash attention, fsdp over 512 chips."""
    mesh = Mesh(np.array(devices).reshape(1, 512, 1), ("data", "fsdp", "tensor"))
    return reference_step(LLAMA_70B, mesh)
