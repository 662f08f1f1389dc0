"""Programs for what a count must name: evaluations, memory pressure, padding, dense expansion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.audit_programs import AUDIT
from tests.support.program_models import Model

BATCH, WIDTH = 8, 128
# Six of these activations nearly fill a v5e, twelve an H100.
PRESSED_WIDTH = 4096
PRESSED_ROWS = {"v5e": 2**18, "h100": 2**20}
PRESSED_LAYERS = {"v5e": 6, "h100": 12}


def _loss(weights: list[Any], x: jax.Array) -> jax.Array:
    for weight in weights:
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ weight)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def under_memory_pressure(weights: list[Any], x: jax.Array) -> Any:
    """A step whose activations do not fit, without `jax.checkpoint`."""
    value, gradient = jax.value_and_grad(_loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def phases(weights: Any, momentum: Any, x: jax.Array, held_out: jax.Array) -> Any:
    """A layer named optimizer, one step of Newton-Schulz, and an evaluation after the update."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("optimizer"):
            x = jnp.tanh(x @ weights["in"])
        with jax.named_scope("apply_updates"):
            return jnp.mean((x @ weights["out"]) ** 2)

    def orthogonal(g: jax.Array) -> jax.Array:
        return 1.5 * g - 0.5 * (g @ g.T) @ g

    value, gradient = jax.value_and_grad(loss)(weights, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    weights = jax.tree.map(lambda w, m: 0.99 * w - 0.1 * orthogonal(m), weights, momentum)
    return weights, momentum, value, loss(weights, held_out)


def complex_products(w: jax.Array, x: jax.Array) -> Any:
    """A complex product, and one for its gradient."""
    return jax.value_and_grad(lambda w: (jnp.abs(x @ w) ** 2).sum())(w)


IMAGE, TAPS, IN, OUT = 96, 3, 64, 128  # one image of a line, as speech models have it


def convolution_of_lines(w: jax.Array, x: jax.Array) -> Any:
    """A convolution, and both of its gradients."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.mean(jnp.tanh(y) ** 2)

    return jax.value_and_grad(loss, (0, 1))(w, x)


def convolution_of_integers(images: jax.Array, w: jax.Array) -> jax.Array:
    """Of one image, whose blocks a TPU joins by adding them."""
    return lax.conv_general_dilated(
        images,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.int32,
    )


SHARDED_BATCH, SHARDS = 8, 4


def sharded_image(devices: Any) -> Any:
    """The same, of images whose length is sharded: devices exchange their edges."""
    mesh = Mesh(np.reshape(devices[:SHARDS], (SHARDS,)), ("length",))

    def placed(spec: PartitionSpec, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    w = placed(PartitionSpec(), TAPS, IN, OUT)
    x = placed(PartitionSpec(None, "length"), SHARDED_BATCH, IMAGE, IN)
    return convolution_of_lines, (w, x)


TALL = (64, 16)


def thin_svd(a: jax.Array) -> Any:
    """Iterated on TPUs; cuSOLVER makes the full factors."""
    return jnp.linalg.svd(a, full_matrices=False)


def _of(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


INTEGERS = (_of(1, 64, 64, 3, dtype=jnp.int8), _of(3, 3, 3, 32, dtype=jnp.int8))


def _pressed(platform: str) -> Model:
    weight = _of(PRESSED_WIDTH, PRESSED_WIDTH, dtype=jnp.bfloat16)
    x = _of(PRESSED_ROWS[platform], PRESSED_WIDTH, dtype=jnp.bfloat16)
    return under_memory_pressure, ([weight] * PRESSED_LAYERS[platform], x), None


def programs(platform: str) -> dict[str, Model]:
    """The programs that are recorded for a platform, by name."""
    weights = {"in": _of(WIDTH, WIDTH), "out": _of(WIDTH, WIDTH)}
    rows = _of(BATCH, WIDTH)
    found: dict[str, Model] = {}
    if platform in ("v5e", "v6e", "tpu7x", "h100"):
        found["phases"] = (phases, (weights, weights, rows, rows), None)
    if platform in PRESSED_ROWS:
        found["memory"] = _pressed(platform)
    if platform in ("v5e", "h100"):
        products = (_of(WIDTH, WIDTH, dtype=jnp.complex64), _of(BATCH, WIDTH, dtype=jnp.complex64))
        found["complex"] = (complex_products, products, None)
    if platform in ("v5e", "h100"):
        found["svd"] = (thin_svd, (_of(*TALL),), None)
    if platform == "v5e":
        line = (_of(TAPS, IN, OUT), _of(1, IMAGE, IN))
        found["image_in_blocks"] = (convolution_of_lines, line, None)
        found["image_int8"] = (convolution_of_integers, INTEGERS, None)
    if platform == "h100":
        for name in ("strided_valid", "strided_grouped", "strided_dilated"):
            audit = AUDIT[f"convolution_{name}"]
            found[name] = (audit.function, audit.arguments, None)
    if platform in ("v5e", "h100"):
        audit = AUDIT["ragged_training"]
        found["ragged_training"] = (audit.function, audit.arguments, None)
    return found
