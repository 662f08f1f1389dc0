"""Refuses a model that cannot fit, before anything is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.trainer.config.mesh_axes import weight_shards
from mfu_jax.trainer.config.pyconfig import Config

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(config: Config, devices: Sequence[jax.Device]) -> None:
    """Compares the minimum that training needs with the memory of this process's devices.

    Activations, logits and buffers are not counted: a model that passes may still not fit.

    Raises:
        UserError: the state alone does not fit.
    """
    needed = state_bytes_per_device(config)
    limit = _limit_bytes(devices)
    if limit is not None and needed > limit:
        parameters = count_parameters(config).total
        raise UserError(
            f"{parameters:,} parameters do not fit: {_parts(config)} take at least "
            f"{_gib(needed)} on each device, which has {_gib(limit)}; choose smaller sizes "
            f"(emb_dim={config.emb_dim} vocab_size={config.vocab_size} num_decoder_layers="
            f"{config.num_decoder_layers}), or split them over more devices with fsdp"
        )


def state_bytes_per_device(config: Config) -> int:
    """Bytes of weights, optimizer state and gradients on one device, if all are split evenly."""
    dtypes = [config.weight_dtype, config.mu_dtype or config.weight_dtype, config.weight_dtype]
    if _keeps_gradients(config):
        dtypes.append(min(config.weight_dtype, config.grad_dtype, key=_BYTES.__getitem__))
    width = sum(_BYTES[dtype] for dtype in dtypes)
    return count_parameters(config).total * width // weight_shards(config)


def _keeps_gradients(config: Config) -> bool:
    """Whether all gradients exist at once: for their common norm, or to be summed."""
    return config.gradient_clipping_threshold > 0 or config.gradient_accumulation_steps > 1


def _parts(config: Config) -> str:
    gradients = ", gradients" if _keeps_gradients(config) else ""
    return f"weights in {config.weight_dtype}{gradients} and AdamW's moments"


def _limit_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Memory of one device; on CPUs, its share of the machine's. None: unknown."""
    if devices[0].platform != "cpu":
        statistics = devices[0].memory_stats() or {}
        return statistics.get("bytes_limit")
    limits = [limit for path in _CGROUP_LIMITS if (limit := _cgroup_limit(Path(path)))]
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits) // len(devices) if limits else None


def _cgroup_limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # another version of cgroups; "max"
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
