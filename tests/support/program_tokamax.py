"""Programs of tokamax (``pip install tokamax`` to record them): attention, matmuls, a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TRITON_SHAPE = (2, 512, 4, 128)
BATCH, LENGTH, HEADS, WIDTH = 1, 384, 2, 128  # of the other attention
TOKENS, INPUTS, VOCABULARY = 1024, 384, 2560  # of a fused loss
GROUPS, ROWS, IN, OUT, TILE = 4, 512, 256, 384, 128  # of grouped matmuls
TRITON_ROWS = 32  # of a tile of the gradient by Triton

Kernel = tuple[Callable[..., Any], tuple[Any, ...]]


def _of(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _pretend(platform: str) -> None:
    """Makes tokamax and Pallas believe that they run on a device of the platform."""
    from absl import flags
    from jax._src.pallas.mosaic import tpu_info
    from jax.extend import backend
    from tokamax._src.ops import op

    from tests.support.absent_devices import devices

    flags.FLAGS(["tokamax"])
    (device, *_) = devices(platform)
    backend.get_default_device = lambda: device
    op.infer_devices = lambda _: {device}
    tpu_info.get_device_kind = lambda: device.device_kind
    tpu_info.get_num_device_cores = lambda: 1


def _attention(platform: str, implementation: str) -> Callable[..., Any]:
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        import tokamax

        _pretend(platform)

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out = tokamax.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
            return out.astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return gradients


def _grouped(platform: str, implementation: str = "mosaic") -> Callable[..., Any]:
    def gradients(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> Any:
        import tokamax

        _pretend(platform)

        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            y = tokamax.ragged_dot(x, w, group_sizes=group_sizes, implementation=implementation)
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(x, w)

    return gradients


def _loss(platform: str) -> Callable[..., Any]:
    def gradients(x: jax.Array, labels: jax.Array, w: jax.Array) -> Any:
        import tokamax

        _pretend(platform)

        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return tokamax.linear_softmax_cross_entropy_loss(
                x, labels, w, reduction="mean", implementation="mosaic_tpu"
            )

        return jax.value_and_grad(loss, (0, 1))(x, w)

    return gradients


_QKV = (_of(BATCH, LENGTH, HEADS, WIDTH),) * 3
_EXPERTS = (_of(ROWS, IN), _of(GROUPS, IN, OUT), _of(GROUPS, dtype=jnp.int32))

KERNELS: dict[str, dict[str, Kernel]] = {
    "v6e": {
        "tokamax_splash": (_attention("v6e", "mosaic"), _QKV),
        "tokamax_gmm": (_grouped("v6e"), _EXPERTS),
        "tokamax_loss": (
            _loss("v6e"),
            (_of(TOKENS, INPUTS), _of(TOKENS, dtype=jnp.int32), _of(INPUTS, VOCABULARY)),
        ),
    },
    "h100": {
        "tokamax_gmm": (_grouped("h100"), _EXPERTS),
        "tokamax_gmm_triton": (_grouped("h100", "triton"), _EXPERTS),
        "tokamax_wgmma": (_attention("h100", "mosaic"), _QKV),
        "tokamax": (_attention("h100", "triton"), (_of(*TRITON_SHAPE),) * 3),
    },
}
