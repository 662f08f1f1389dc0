"""Products with weights that are gathered before the product starts.

Otherwise, XLA for TPUs may multiply the parts of a weight as they arrive (a collective matmul, Wang
et al., ASPLOS 2023), and reads and writes the activations once per part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint

from ..sharding import Gathering, gathering

# When a weight that the mesh splits is gathered: as XLA decides; before each product; or so that
# the backward pass gathers again. Outside `jax.checkpoint`, and without a scan, XLA would keep the
# whole weights of all layers from the forward pass.
Gathers = Literal["xla", "first", "again"]
MatmulFunction = Callable[[jax.Array, jax.Array], jax.Array]


def gathers_of(config: Any) -> Gathers:
    """When weights are gathered, for a config whose ``auto`` is resolved."""
    if config.weight_gathers != "first":
        return "xla"
    return "again" if config.remat_policy == "none" else "first"


def gathered_product(
    product: MatmulFunction,
    x: jax.Array,
    weight: jax.Array,
    gathers: Gathers,
    *,
    axes: tuple[str, ...],
    dtype: jnp.dtype,
) -> jax.Array:
    """`product` of `x` and `weight` in `dtype`, in which the weight's parts are also exchanged.

    The gradient of a gathered weight is summed and scattered to where the weight is stored. Where
    the mesh does not split weights as fsdp does, this is simply the product.

    Args:
        product: linear in both of its arguments.
        axes: the logical axis of every dimension of `weight`.
    """
    how = None if gathers == "xla" else gathering(axes, weight.shape)
    if how is None:
        return product(x, weight.astype(dtype))
    return _product(_How(product, how, gathers == "again", dtype), x, weight)


class _How(NamedTuple):
    product: MatmulFunction
    gathering: Gathering
    again: bool
    dtype: jnp.dtype

    def whole(self, weight: jax.Array) -> jax.Array:
        return with_sharding_constraint(weight.astype(self.dtype), self.gathering.whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, weight: jax.Array) -> jax.Array:
    return how.product(x, how.whole(weight))


def _forward(how: _How, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    """Keeps the device's own part: a scan would stack the whole weights of all layers."""
    return _product(how, x, weight), (x, weight)


def _backward(how: _How, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    whole = how.whole(jax.lax.optimization_barrier(weight) if how.again else weight)
    dx, dweight = jax.vjp(how.product, x, whole)[1](dy)
    return dx, with_sharding_constraint(dweight, how.gathering.stored).astype(weight.dtype)


_product.defvjp(_forward, _backward)
