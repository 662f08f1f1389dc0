"""What a plan's child processes share: the devices to compile for, and writing the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_HOST = (2, 2, 1)  # chips per host that libtpu assumes by default


def write_dump(compiled: Any, path: str) -> None:
    """Writes what a child process compiled; its last stage."""
    print("writing", flush=True)
    from mfu_jax.dumps.recording import dump

    dump(compiled, path)


def absent_devices(request: Mapping[str, Any]) -> list[Any]:
    """The devices of a request's topology, attached or not.

    Args:
        request: `platform` and `topology` as JAX names them, `slices`; for TPUs `rings`, whether
            each axis wraps around; for GPUs `target_config`, XLA's text proto.
    """
    from mfu_jax.util.jax_internals import set_cuda_capability, topology_devices

    options = {"target_config": request["target_config"]}
    if request["platform"] == "tpu":
        options = tpu_options(request)
    devices = topology_devices(request["platform"], request["topology"], **options)
    if request["platform"] == "cuda":
        set_cuda_capability(devices[0].compute_capability)
    return devices


def tpu_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options that libtpu takes in addition to a topology's name."""
    options: dict[str, Any] = {}
    if request["slices"] > 1:
        options["num_slices"] = request["slices"]
    if request["topology"].startswith("v4:"):  # two cores as one device, as in JAX
        options["chip_config_name"] = "megacore"
    axes = [int(size) for size in request["topology"].partition(":")[2].split("x")]
    bounds = tuple(map(math.gcd, [*axes, 1][:3], _HOST))
    if bounds != _HOST:  # a host with fewer chips, such as v6e-1
        options["chips_per_host_bounds"] = bounds
    # Untold, libtpu takes a slice for a mesh: permutations are synchronous, and in place of each
    # all-gather over three axes, for which it has no rings, an all-reduce adds shards to zeros.
    if any(request["rings"]):
        options["wrap"] = tuple([*request["rings"], False][:3])
    return options
