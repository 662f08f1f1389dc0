"""Projections, and embeddings with the tied output head."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import axis_size
from .gathered_products import gathered_product
from .lora import Adapter, Lora
from .quantization import quantized_dot

if TYPE_CHECKING:
    from ..building import Builder

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}


class Dense(nnx.Module):
    """``x @ kernel (+ bias)``, contracting the last `len(in_shape)` dimensions of `x`.

    The kernel is [*in_shape, *out_shape]; it is stored in `weight_dtype` and multiplied in `dtype`,
    or as `quantization` says. `lora` adds an adapter. `gathers` says when a kernel that is not
    quantised is gathered.
    """

    def __init__(
        self,
        build: Builder,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        logical_axes: tuple[str, ...],
        *,
        use_bias: bool,
        lora: Lora | None,
    ) -> None:
        shape, rank = (*in_shape, *out_shape), len(in_shape)
        # Scaled by fan-in, so that every layer's output keeps its input's variance.
        scale = 1 / math.sqrt(math.prod(in_shape))
        kernel = jax.random.truncated_normal(build.rngs.params(), -2, 2, shape, build.weight_dtype)
        self.kernel = nnx.Param(kernel * scale, logical_axes=logical_axes)
        if use_bias:
            self.bias = build.vector(shape[rank:], 0.0, logical_axes[rank:])
        if lora is not None:
            self.adapter = Adapter(lora, build, shape, logical_axes, in_rank=rank)
        self.use_bias, self.is_adapted, self.in_rank = use_bias, lora is not None, rank
        self.dtype, self.quantization = build.dtype, build.quantization
        self.logical_axes, self.gathers = logical_axes, build.gathers

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, *in_shape] → [batch, sequence, *out_shape]."""
        kernel = self.kernel[...]
        if self.quantization is not None:
            y = quantized_dot(x, kernel.astype(self.dtype), self.in_rank, self.quantization)
        else:
            dot = functools.partial(_dot, self.in_rank)
            y = gathered_product(
                dot, x, kernel, self.gathers, axes=self.logical_axes, dtype=self.dtype
            )
        if self.is_adapted:
            y = y + self.adapter(x)
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y


def _dot(in_rank: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    contracted = tuple(range(x.ndim - in_rank, x.ndim))
    return jax.lax.dot_general(x, kernel, ((contracted, tuple(range(in_rank))), ((), ())))


# GPT-2's value; small, so that a tied head starts near the uniform distribution.
_EMBEDDING_STD = 0.02


# Tensor cores load 8 elements at once; a matmul whose vocabulary is no multiple of that reaches
# 0.24 to 0.43 of an H100's peak, others 0.72 to 0.88 (scripts/results/gpu_kernels.json).
_ALIGNED, _PADDED_TO = 8, 128
_PADDING_SCOPE = "zero_padding"  # in which the executed count takes zeros for padding


class Embed(nnx.Module):
    """A table [rows, emb_dim], for lookups and, as the output head, for a matmul.

    With `by_matmul`, a lookup is a matmul with one-hot rows, as with MaxText's `use_iota_embed`.
    """

    def __init__(
        self, build: Builder, rows: int, emb_dim: int, *, row_axis: str, by_matmul: bool = False
    ) -> None:
        table = jax.random.normal(build.rngs.params(), (rows, emb_dim), build.weight_dtype)
        self.embedding = nnx.Param(table * _EMBEDDING_STD, logical_axes=(row_axis, "embed"))
        self.dtype, self.pads, self.by_matmul = build.dtype, build.pads_vocabulary, by_matmul

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[batch, sequence] of row numbers → [batch, sequence, emb_dim]."""
        if self.by_matmul:
            table = self.embedding[...].astype(self.dtype)
            return jnp.dot(jax.nn.one_hot(ids, table.shape[0], dtype=self.dtype), table)
        return _looked_up(self.embedding[...], ids, self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, emb_dim] → logits [batch, sequence, rows]."""
        table = self.embedding[...].astype(self.dtype)
        rows = table.shape[0]
        if not self.pads or rows % _ALIGNED == 0 or axis_size("tensor") > 1:
            return jnp.einsum("bsd,vd->bsv", x, table)
        with jax.named_scope(_PADDING_SCOPE):
            table = jnp.pad(table, ((0, -rows % _PADDED_TO), (0, 0)))
        logits = jnp.einsum("bsd,vd->bsv", x, table)
        with jax.named_scope(_PADDING_SCOPE):
            return logits[..., :rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _looked_up(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows `ids` of a table, in `dtype`; on NVIDIA GPUs, their gradients are added in float32.

    A GPU adds with atomics, which it has for 32 bits; for bfloat16 it compares and swaps, which
    takes longer by tens (scripts/results/planted_faults.json), and rounds each sum.
    """
    return table.astype(dtype)[ids]


def _keep_ids(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, Any]:
    empty = jnp.empty((0, *table.shape), table.dtype)  # shape and dtype, as an array
    return _looked_up(table, ids, dtype), (ids, empty)


def _added_rows(dtype: jnp.dtype, kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    ids, empty = kept
    shape = empty.shape[1:]

    def added(ids: jax.Array, gradient: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        rows = jnp.zeros(shape, dtype).at[ids].add(gradient.astype(dtype))
        return rows.astype(empty.dtype)

    in_dtype = functools.partial(added, dtype=dtype)
    in_float32 = functools.partial(added, dtype=jnp.dtype(jnp.float32))
    return jax.lax.platform_dependent(ids, gradient, cuda=in_float32, default=in_dtype), None


_looked_up.defvjp(_keep_ids, _added_rows)
