"""The device mesh, and how weights and batches are split over it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mfu_jax.errors import UserError
from mfu_jax.jax_internals import split_torus
from mfu_jax.layers.sharding import BATCH_AXES, partition_spec
from mfu_jax.trainer.pyconfig import Config

_log = logging.getLogger("mfu_jax")
_AXES = ("data", "fsdp", "expert", "tensor")


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, expert, tensor) over all devices of the job, or over the given ones.

    Raises:
        UserError: the axes do not fill the devices, or a dimension is not divisible by its axis.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    inner = config.fsdp * config.expert * config.tensor
    data = config.data if config.data != -1 else count // inner
    if data * inner != count:
        raise UserError(
            f"the mesh data={config.data} fsdp={config.fsdp} expert={config.expert} "
            f"tensor={config.tensor} does not fill the {count} devices; their product has to be "
            f"{count} (data=-1 takes the rest)"
        )
    _check_divisible(config)
    batch_shards = data * config.fsdp * config.expert
    batch = micro_batch_size(config, count)
    if batch % batch_shards:
        raise UserError(
            f"the batch of {batch} sequences (per_device_batch_size="
            f"{config.per_device_batch_size:g} × {count} devices) is not divisible by the mesh's "
            f"data × fsdp × expert = {batch_shards}"
        )
    grid = _over_slices((data, config.fsdp, config.expert, config.tensor), devices)
    return Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * len(_AXES))


def _over_slices(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of `shape`: slices of TPUs, if there are several, lie one after
    another along the first axis that they divide, because the network between them is slowest.
    """
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    axis = next((i for i, size in enumerate(shape) if size % len(slices) == 0), None)
    if axis is None:
        raise UserError(
            f"the mesh {_sizes(shape)} cannot be laid over {len(slices)} slices; expected an axis "
            f"that is divisible by {len(slices)}, such as data={len(slices)}"
        )
    within = [size // len(slices) if i == axis else size for i, size in enumerate(shape)]
    return np.concatenate([_grid(within, part) for part in slices.values()], axis)


def _grid(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    try:
        return jax.make_mesh(tuple(shape), _AXES, devices=devices).devices
    except NotImplementedError:  # no axis of the TPU's torus matches one of ours in size
        _log.warning(
            "the mesh %s splits axes of the TPU's torus: some collectives take longer paths than "
            "with sizes that are products of whole axes",
            _sizes(shape),
        )
        return np.asarray(split_torus(shape, devices))


def _sizes(shape: Sequence[int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(_AXES, shape, strict=True))


def _check_divisible(config: Config) -> None:
    """Raises a `UserError` if an axis does not divide a size that it splits."""
    heads: tuple[str, ...] = ("num_query_heads",)
    if config.attention_type != "mla":
        heads += ("num_kv_heads",)
    width = "moe_mlp_dim" if config.num_experts > 1 else "mlp_dim"
    split = {
        ("tensor",): (*heads, width, "vocab_size"),
        ("fsdp", "expert"): ("emb_dim",),
        ("expert",): ("num_experts",) if config.expert > 1 else (),
    }
    for axes, keys in split.items():
        parts = math.prod(getattr(config, axis) for axis in axes)
        for key in keys:
            if getattr(config, key) % parts:
                raise UserError(
                    f"{key}={getattr(config, key)} is not divisible by {' × '.join(axes)}={parts}, "
                    f"over which it is split"
                )


def micro_batch_size(config: Config, device_count: int) -> int:
    """Sequences in one micro-batch of the whole job of `device_count` devices; of DPO, two a pair.

    Raises:
        UserError: `per_device_batch_size` × devices is not a whole number, or not divisible by
            the processes.
    """
    size = Fraction(config.per_device_batch_size).limit_denominator(1 << 20) * device_count
    if size.denominator != 1 or size < 1:
        raise UserError(
            f"per_device_batch_size={config.per_device_batch_size:g} on {device_count} "
            f"devices gives {float(size):g} sequences; expected a whole number"
        )
    if size % jax.process_count():
        raise UserError(
            f"the batch of {size} sequences is not divisible by the {jax.process_count()} processes"
        )
    return int(size) * (1 + config.use_dpo)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Batches are [accumulation, batch, sequence]; the batch dimension is split."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, None))


def rows_per_process(config: Config, mesh: Mesh) -> int:
    """Sequences of one micro-batch that each process feeds."""
    return micro_batch_size(config, mesh.size) // jax.process_count()


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows [accumulation, rows, sequence] → arrays of the whole job's batch."""
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    return {
        key: jax.make_array_from_process_local_data(sharding, value) for key, value in batch.items()
    }


def state_shardings(mesh: Mesh, abstract_state: Any) -> Any:
    """A sharding for every array of a train state; optimizer moments follow their weights."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            array = leaf.get_value()
            spec = partition_spec(leaf.get_metadata("logical_axes"), len(array.shape))
            return leaf.replace(NamedSharding(mesh, spec))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(of, abstract_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
