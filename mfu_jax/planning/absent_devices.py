"""Devices of a topology to compile for, as the child processes of a plan get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def absent_devices(request: Mapping[str, Any]) -> list[Any]:
    """The devices of a request's topology, attached or not.

    Args:
        request: `platform` and `topology` as JAX names them, `slices`, and of GPUs
            `target_config`, XLA's text proto.
    """
    from mfu_jax.jax_internals import topology_devices

    options: dict[str, Any] = {}
    if request["platform"] == "cuda":
        options = {"target_config": request["target_config"]}
    elif request["slices"] > 1:
        options = {"num_slices": request["slices"]}
    return topology_devices(request["platform"], request["topology"], **options)
