"""The devices attached to this machine, and the environment in which it trains fastest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from mfu_jax.errors import UserError

GIB = 2**30
_MEMORY_FRACTION = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}  # of a GPU; JAX's default is 0.75


@dataclass(frozen=True, kw_only=True)
class Device:
    """The attached devices, all alike.

    Attributes:
        platform: gpu, tpu or cpu.
        kind: JAX's `device_kind`.
        count: devices of this host.
        memory_bytes: usable by one device; None if the runtime does not report it (CPUs).
        jax_version: of the training process.
    """

    platform: str
    kind: str
    count: int
    memory_bytes: int | None
    jax_version: str


def performance_flags(platform: str, kind: str, count: int) -> dict[str, str]:
    """Environment variables that make training fast on a platform.

    GPU: XLA's latency-hiding scheduler, and for several devices, combined and pipelined collectives
    for it to hide (docs.jax.dev, GPU performance tips). TPU: collective fusion, and more scoped
    VMEM on v6e (the flags of Google's public recipes).
    """
    if platform == "gpu":
        flags = ["--xla_gpu_enable_latency_hiding_scheduler=true"]
        if count > 1:
            gib = str(GIB)
            for collective in ("all_gather", "reduce_scatter", "all_reduce"):
                flags += [
                    f"--xla_gpu_{collective}_combine_threshold_bytes={gib}",
                    f"--xla_gpu_enable_pipelined_{collective}=true",
                ]
        return {"XLA_FLAGS": " ".join(flags), **_MEMORY_FRACTION}
    if platform == "tpu":
        flags = []
        if count > 1:
            flags = [
                "--xla_tpu_enable_async_collective_fusion=true",
                "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
                "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
                "--xla_tpu_overlap_compute_collective_tc=true",
                "--xla_enable_async_all_gather=true",
            ]
        if kind in ("TPU v6 lite", "TPU v6e"):
            flags.append("--xla_tpu_scoped_vmem_limit_kib=98304")
        return {"LIBTPU_INIT_ARGS": " ".join(flags)} if flags else {}
    return {}


def probe(platform: str) -> Device:
    """Finds the attached devices in a separate process, so that this one never holds them.

    Raises:
        UserError: there is no such device.
    """
    code = (
        "import json, jax; d = jax.local_devices(); s = d[0].memory_stats() or {};"
        "print(json.dumps([d[0].device_kind, len(d), s.get('bytes_limit'), jax.__version__]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**_MEMORY_FRACTION, **os.environ, **platform_environment(platform)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(
            f"JAX finds no {platform} ({last[0]}); usually its driver or the jax extra is missing, "
            f"which scripts/benchmark_{platform}.sh installs; --platform=cpu --configs=tiny runs "
            "without"
        )
    kind, count, limit, version = json.loads(done.stdout.strip().splitlines()[-1])
    return Device(
        platform=platform, kind=kind, count=count, memory_bytes=limit, jax_version=version
    )


def environment_of(device: Device) -> dict[str, str]:
    """This process's environment with the performance flags; the user's own settings win."""
    result = {**os.environ, **platform_environment(device.platform)}
    for name, value in performance_flags(device.platform, device.kind, device.count).items():
        own = os.environ.get(name, "")
        # XLA uses the last of repeated flags
        result[name] = f"{value} {own}".strip() if value.startswith("--") else own or value
    return result


def platform_environment(platform: str) -> dict[str, str]:
    """Sets the platform explicitly: a missing driver is an error, never a silent run on the CPU."""
    return {"JAX_PLATFORMS": {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}[platform]}
