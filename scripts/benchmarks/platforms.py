"""The devices attached to this machine, and the environment in which it trains fastest."""

from __future__ import annotations

import os

from mfu_jax.errors import UserError
from mfu_jax.planning.tune.attached_devices import AttachedDevices, attached
from mfu_jax.trainer.planned.trial_run import flags_variable
from mfu_jax.trainer.planned.tuned_axes import flags_of

GIB = 2**30
_MEMORY_FRACTION = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}  # of a GPU; JAX's default is 0.75


def performance_flags(devices: AttachedDevices) -> dict[str, str]:
    """Environment variables that make training fast on these devices.

    GPU: XLA's latency-hiding scheduler, and for several devices, combined and pipelined collectives
    for it to hide (docs.jax.dev, GPU performance tips). TPU: collective fusion, and more scoped
    VMEM on v6e (the flags of Google's public recipes).
    """
    rows = flags_of(devices.platform, devices.count, devices.chip)
    flags = {name: value for row in rows for name, value in row["flags"].items()}
    text = " ".join(f"{name}={value}" for name, value in flags.items())
    found = {flags_variable(devices.platform): text} if text else {}
    return found | (_MEMORY_FRACTION if devices.platform == "gpu" else {})


def probe(platform: str) -> AttachedDevices:
    """Finds the attached devices in a separate process, so that this one never holds them.

    Raises:
        UserError: there is no such device.
    """
    share = {name: os.environ.get(name, value) for name, value in _MEMORY_FRACTION.items()}
    try:
        return attached(**share, **platform_environment(platform))
    except UserError as error:
        raise UserError(
            f"JAX finds no {platform} ({error.what.partition(': ')[2]}); usually its driver or the "
            f"jax extra is missing, which scripts/benchmark_{platform}.sh installs; --platform=cpu "
            "--configs=tiny runs without"
        ) from None


def environment_of(devices: AttachedDevices) -> dict[str, str]:
    """This process's environment with the performance flags; the user's own settings win."""
    result = {**os.environ, **platform_environment(devices.platform)}
    for name, value in performance_flags(devices).items():
        own = os.environ.get(name, "")
        # XLA uses the last of repeated flags
        result[name] = f"{value} {own}".strip() if value.startswith("--") else own or value
    return result


def platform_environment(platform: str) -> dict[str, str]:
    """Sets the platform explicitly: a missing driver is an error, never a silent run on the CPU."""
    return {"JAX_PLATFORMS": {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}[platform]}
