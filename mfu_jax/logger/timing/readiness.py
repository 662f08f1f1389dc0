"""When a step's outputs are ready, and which of them to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mfu_jax.logger.records.drop_large import MOST_NUMBERS
from mfu_jax.logger.records.scalars import is_deleted
from mfu_jax.util.failsafe import is_interrupt


def block_until_ready(metrics: Mapping[str, Any]) -> None:
    """Waits for every array in `metrics`, without copying any to the host.

    An array donated to a later step is not waited for: nobody can read it any more.
    """
    for value in metrics.values():
        block = getattr(value, "block_until_ready", None)
        if block is not None:
            try:
                block()
            except RuntimeError as error:
                if is_interrupt(error) or not is_deleted(value):
                    raise
        elif isinstance(value, Mapping):
            block_until_ready(value)


def is_ready(metrics: Mapping[str, Any]) -> bool:
    """True if every array in `metrics` has been computed, or was donated to a later step."""
    for value in metrics.values():
        ready = getattr(value, "is_ready", None)
        if ready is not None:
            # On a deleted array is_ready() ends the process with a segmentation fault (jax 0.10).
            if not (is_deleted(value) or ready()):
                return False
        elif isinstance(value, Mapping) and not is_ready(value):
            return False
    return True


def end_marker(output: Any) -> Any:
    """A small array that is ready when `output` is, and that no later call can donate.

    Args:
        output: what a step returned.
    """
    arrays = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]
    if not arrays:
        return None
    smallest = min(arrays, key=lambda array: array.size)
    # Outputs are often passed to the next call, whose donation deletes them.
    if smallest.size <= MOST_NUMBERS:
        return jnp.copy(smallest)
    is_on_one = len(smallest.sharding.device_set) == 1
    part = smallest if is_on_one else smallest.addressable_data(0)
    if jax.sharding.get_abstract_mesh().empty:
        return _first_number(part)
    with jax.set_mesh(Mesh(np.array(list(part.devices())), ("_one",))):  # not the user's mesh
        return _first_number(part)


@jax.jit
def _first_number(array: jax.Array) -> jax.Array:
    return array[(0,) * array.ndim]
