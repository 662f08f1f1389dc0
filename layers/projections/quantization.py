"""Matmuls with weights in eight bits: operands of the forward and the backward pass.

Quantised training as MaxText does it with qwix: both operands of all three matmuls of a projection
are scaled to the range of an 8-bit type, by row or by column, multiplied there, and scaled back.
qwix quantises and multiplies; this module decides which axes share a scale, and defines the
gradient, which passes straight through the rounding (arXiv 1308.3432).

Adding a recipe: a row of `RECIPES`, its dtype in mfu_jax/instrumentation/counts.py and its name in
mfu_jax/trainer/config/keys.yml.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .grouped_matmuls import gradient_of_matrices, gradient_of_rows, grouped_product


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A quantisation recipe.

    Attributes:
        operands: dtype of activations and weights, which the backward pass reuses.
        gradients: dtype of the incoming gradients.
        activation_range, weight_range, gradient_range: how a scale is found: ``absmax``, from the
            largest value, or ``fixed,LOW,HIGH``, which reads no values.
    """

    operands: str
    gradients: str
    activation_range: str = "absmax"
    weight_range: str = "absmax"
    gradient_range: str = "absmax"


# MaxText's recipe names → dtypes of operands and gradients.
RECIPES = {
    "int8": ("int8", "int8"),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn"),
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2"),
    "fp8_full": ("float8_e4m3fn", "float8_e5m2"),
    "nanoo_fp8": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
}


def quantization(config: Any) -> Quantization | None:
    """The recipe of a config; None: matmuls run in the config's dtype."""
    if not config.quantization:
        return None
    operands, gradients = RECIPES[config.quantization]
    return Quantization(
        operands=operands,
        gradients=gradients,
        activation_range=config.act_quantization_calibration_method,
        weight_range=config.weight_quantization_calibration_method,
        gradient_range=config.bwd_quantization_calibration_method,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def quantized_dot(x: jax.Array, kernel: jax.Array, in_rank: int, recipe: Quantization) -> jax.Array:
    """``x · kernel`` over the last `in_rank` dimensions of x.

    Args:
        x: [*lead, *inputs]; each index of `lead` has a scale.
        kernel: [*inputs, *outputs]; each output has a scale.

    Returns:
        [*lead, *outputs].
    """
    return _dot_forward(x, kernel, in_rank, recipe)[0]


def _dot_forward(
    x: jax.Array, kernel: jax.Array, in_rank: int, recipe: Quantization
) -> tuple[jax.Array, Any]:
    lead = x.ndim - in_rank
    narrow_x = _narrow(x, recipe.operands, range(lead), recipe.activation_range)
    outputs = range(in_rank, kernel.ndim)
    narrow_kernel = _narrow(kernel, recipe.operands, outputs, recipe.weight_range)
    inputs = (tuple(range(lead, x.ndim)), tuple(range(in_rank)))
    y = _dot(narrow_x, narrow_kernel, inputs).astype(x.dtype)
    inside = (_inside(x, recipe.activation_range), _inside(kernel, recipe.weight_range))
    return y, (narrow_x, narrow_kernel, inside)


def _dot_backward(
    in_rank: int, recipe: Quantization, residuals: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scales along contracted dimensions multiply the gradient first, so products are 8-bit."""
    narrow_x, narrow_kernel, (x_inside, kernel_inside) = residuals
    lead, outputs = narrow_x.qvalue.ndim - in_rank, narrow_kernel.qvalue.ndim - in_rank
    of_kernel = narrow_kernel.scale.reshape(narrow_kernel.scale.shape[in_rank:])
    dy_wide = _narrow(dy * of_kernel, recipe.gradients, range(lead), recipe.gradient_range)
    contracted = tuple(range(lead, dy.ndim)), tuple(range(in_rank, in_rank + outputs))
    dx = _dot(dy_wide, narrow_kernel.qvalue, contracted)
    of_x = narrow_x.scale.reshape(narrow_x.scale.shape[:lead] + (1,) * outputs)
    dy_tall = _narrow(dy * of_x, recipe.gradients, range(lead, dy.ndim), recipe.gradient_range)
    leading = tuple(range(lead))
    dkernel = _dot(narrow_x.qvalue, dy_tall, (leading, leading))
    return (
        _where(x_inside, dx).astype(narrow_x.scale.dtype),
        _where(kernel_inside, dkernel).astype(narrow_kernel.scale.dtype),
    )


quantized_dot.defvjp(_dot_forward, _dot_backward)


class Shard(NamedTuple):
    """A device's part of the experts' matrices: dimension `dim` is split over mesh axes `axes`."""

    dim: int
    axes: tuple[str, ...]


def shards_of(spec: PartitionSpec) -> tuple[Shard, ...]:
    """The dimensions of experts' matrices to gather, in this order.

    Expert and tensor splits are not gathered. Whole experts come last: most of what is gathered is
    then in the order of the gathered matrices.
    """
    found = []
    for dim, names in enumerate(spec):
        split = names if isinstance(names, tuple) else (names,)
        axes = tuple(axis for axis in split if axis in ("fsdp", "fsdp_transpose", "context"))
        found += [Shard(dim, axes)] if axes else []
    return tuple(reversed(found))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def quantized_ragged_dot(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    recipe: Quantization,
    on_tpu: bool = False,
    shards: tuple[Shard, ...] = (),
) -> jax.Array:
    """`jax.lax.ragged_dot`: each group of rows times its kernel.

    Args:
        rows: [rows, inputs]; each row has a scale.
        kernels: [groups, inputs, outputs]; each output has a scale, shared by all groups.
        sizes: rows of each group, [groups].
        recipe: dtypes and ranges.
        on_tpu: whether the program is for TPUs.
        shards: `kernels` is a part: it is gathered in eight bits, and the gradient is summed over
            the devices and scattered.

    Returns:
        [rows, outputs]; on TPUs, rows past the last group are as they were in memory.
    """
    return _ragged_forward(rows, kernels, sizes, recipe, on_tpu, shards)[0]


def _ragged_forward(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    recipe: Quantization,
    on_tpu: bool,
    shards: tuple[Shard, ...],
) -> tuple[jax.Array, Any]:
    narrow_rows = _narrow(rows, recipe.operands, (0,), recipe.activation_range)
    narrow_kernels = _narrow(kernels, recipe.operands, (2,), recipe.weight_range)
    for shard in shards:
        narrow_kernels = jax.tree.map(functools.partial(_gathered, shard=shard), narrow_kernels)
    if on_tpu:
        scales = narrow_rows.scale, narrow_kernels.scale.reshape(1, -1)
        of_rows, matrices = map(_loadable, (narrow_rows, narrow_kernels))
        y = grouped_product(of_rows, matrices, sizes, rows.dtype, scales)
    else:
        y = _qwix().ragged_dot(narrow_rows, narrow_kernels, sizes).astype(rows.dtype)
    inside = (_inside(rows, recipe.activation_range), _inside(kernels, recipe.weight_range))
    return y, (narrow_rows, narrow_kernels, sizes, inside)


def _ragged_backward(
    recipe: Quantization, on_tpu: bool, shards: tuple[Shard, ...], residuals: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    narrow_rows, narrow_kernels, sizes, (rows_inside, kernels_inside) = residuals
    of_kernels = narrow_kernels.scale.reshape(1, -1)
    dy_wide = _narrow(dy * of_kernels, recipe.gradients, (0,), recipe.gradient_range)
    dy_tall = _narrow(dy * narrow_rows.scale, recipe.gradients, (1,), recipe.gradient_range)
    dtype = narrow_kernels.scale.dtype
    if on_tpu:
        wide, matrices, tall, of_rows = map(
            _loadable, (dy_wide, narrow_kernels, dy_tall, narrow_rows)
        )
        drows = gradient_of_rows(wide, matrices, sizes, dy.dtype, (dy_wide.scale,))
        dkernels = gradient_of_matrices(of_rows, tall, sizes, dtype, dy_tall.scale)
    else:
        drows = _qwix().ragged_dot(dy_wide, narrow_kernels.qvalue.swapaxes(1, 2), sizes)
        dkernels = _qwix().ragged_dot_general(narrow_rows.qvalue, dy_tall, sizes, _BY_GROUP)
    dkernels = dkernels.astype(dtype)
    for shard in reversed(shards):
        dkernels = jax.lax.psum_scatter(
            dkernels, shard.axes, scatter_dimension=shard.dim, tiled=True
        )
    return (
        _where(rows_inside, drows).astype(narrow_rows.scale.dtype),
        _where(kernels_inside, dkernels),
        None,
    )


quantized_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _gathered(part: jax.Array, shard: Shard) -> jax.Array:
    """A quantised shard, or its scales, gathered; a single common scale is on each device."""
    if part.shape[shard.dim] == 1 and part.dtype.itemsize > 1:
        return part
    whole: jax.Array = jax.lax.all_gather(part, shard.axes, axis=shard.dim, tiled=True)
    return whole


def _loadable(narrow: Any) -> jax.Array:
    """The values for a Pallas kernel, which cannot load AMD's types of eight bits."""
    values: jax.Array = narrow.qvalue
    return values.astype("bfloat16") if values.dtype.name.endswith("fnuz") else values


# [rows, inputs] · [rows, outputs] → [groups, inputs, outputs]
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _narrow(x: jax.Array, dtype: str, scaled: Sequence[int], calibration: str) -> Any:
    """x in `dtype`, with a scale for each index of the dimensions `scaled`."""
    return _qwix().quantize(
        x, jnp.dtype(dtype), channelwise_axes=tuple(scaled), calibration_method=calibration
    )


def _dot(x: Any, y: Any, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    product: jax.Array = _qwix().dot_general(x, y, (contracted, ((), ())))
    return product


def _inside(x: jax.Array, calibration: str) -> jax.Array | None:
    """Where a fixed range did not clip; None: a range taken from the values never clips."""
    method, *bounds = calibration.split(",")
    if method != "fixed":
        return None
    low, high = map(float, bounds)
    return (x >= low) & (x <= high)


def _where(inside: jax.Array | None, gradient: jax.Array) -> jax.Array:
    return gradient if inside is None else jnp.where(inside, gradient, 0)


def _qwix() -> Any:
    """Imported on first use: optional, and slow to import."""
    import qwix

    return qwix
