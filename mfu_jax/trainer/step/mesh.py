"""The device mesh, and how weights and batches are split over it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mfu_jax.errors import UserError
from mfu_jax.layers.sharding import EDGE_BATCH_AXES, SEQUENCE_AXIS, partition_spec
from mfu_jax.trainer.config.mesh_axes import (
    AXES,
    MeshShape,
    check_batch,
    check_shape,
    mesh_shape,
    sequences,
)
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.util.jax_internals import split_torus

_log = logging.getLogger("mfu_jax")
_AXES = tuple(axis.name for axis in AXES)
_RANK_OF_TEXT = 3


def with_mesh_sizes(config: Config, devices: Sequence[jax.Device] | None = None) -> Config:
    """The config with every axis of -1 replaced by a number.

    Raises:
        UserError: the axes do not cover the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes: dict[str, Any] = dict(_shape(config, devices).keys)
    return config.replace(**sizes)


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of all `AXES` over all devices of the job, or over the given ones.

    Raises:
        UserError: the axes do not cover the devices, or a dimension is not divisible by its axis.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = _shape(config, devices)
    check_shape(config, shape)
    micro_batch_size(config, len(devices))
    check_batch(config, shape, len(devices))
    return Mesh(_laid_out(shape, devices), _AXES, axis_types=(AxisType.Auto,) * len(_AXES))


def _shape(config: Config, devices: Sequence[jax.Device]) -> MeshShape:
    has_between = any(getattr(config, axis.between) > 1 for axis in AXES)
    return mesh_shape(config, len(devices), len(_slices(devices, or_processes=has_between)))


def _slices(devices: Sequence[jax.Device], *, or_processes: bool) -> list[list[jax.Device]]:
    """The devices of each slice; with `or_processes` and a single slice, of each process."""
    slices = _grouped(devices, "slice_index")
    return _grouped(devices, "process_index") if or_processes and len(slices) == 1 else slices


def _grouped(devices: Sequence[jax.Device], attribute: str) -> list[list[jax.Device]]:
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute, 0), []).append(device)
    return list(groups.values())


def _laid_out(shape: MeshShape, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of the mesh's sizes.

    Slices lie along the axes that have a size between slices; if the config names none, one after
    another along the first axis that they divide, because the network between them is slowest.
    """
    has_between = math.prod(shape.between) > 1
    slices = _slices(devices, or_processes=has_between)
    if not has_between:
        shape = _over_slices(shape, len(slices))
    parts = np.stack([_grid(shape.within, part) for part in slices])
    rank = len(shape.within)
    # [*between, *within] → [between × within of each axis]
    order = [place for axis in range(rank) for place in (axis, rank + axis)]
    whole = parts.reshape(*shape.between, *shape.within).transpose(order)
    return whole.reshape(tuple(shape.sizes.values()))


def _over_slices(shape: MeshShape, slices: int) -> MeshShape:
    """The same sizes with one axis spread over the slices."""
    axis = next((i for i, size in enumerate(shape.within) if size % slices == 0), None)
    if axis is None:
        raise UserError(
            f"the mesh {shape} cannot be laid over {slices} slices; expected an axis "
            f"that is divisible by {slices}, such as data={slices}"
        )
    within, between = list(shape.within), list(shape.between)
    within[axis], between[axis] = within[axis] // slices, slices
    return MeshShape(within=tuple(within), between=tuple(between))


def _grid(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    types = (AxisType.Auto,) * len(_AXES)
    try:
        return jax.make_mesh(tuple(shape), _AXES, devices=devices, axis_types=types).devices
    except NotImplementedError:  # no axis of the TPU's torus has the size of one of ours
        _log.warning(
            "the mesh %s splits axes of the TPU's torus: some collectives take longer paths",
            " ".join(f"{axis}={size}" for axis, size in zip(_AXES, shape, strict=True)),
        )
        return np.asarray(split_torus(shape, devices))


def micro_batch_size(config: Config, device_count: int) -> int:
    """Sequences in one micro-batch of the whole job of `device_count` devices; for DPO, two a pair.

    Raises:
        UserError: `per_device_batch_size` × devices is not a whole number.
    """
    size = sequences(config, device_count)
    if size.denominator != 1 or size < 1:
        raise UserError(
            f"per_device_batch_size={config.per_device_batch_size:g} on {device_count} "
            f"devices gives {float(size):g} sequences; expected a whole number"
        )
    return int(size) * (1 + config.use_dpo)


def batch_sharding(mesh: Mesh, rank: int = _RANK_OF_TEXT) -> NamedSharding:
    """Batches are [accumulation, batch, sequence]; only `context` splits sequences.

    Images have a higher `rank` and stay whole.
    """
    sequence = SEQUENCE_AXIS if rank == _RANK_OF_TEXT else None
    return NamedSharding(mesh, PartitionSpec(None, EDGE_BATCH_AXES, sequence))


class BatchShare(NamedTuple):
    """The part of every batch that a process feeds: number `place` of `shares`.

    Processes whose devices hold the same sequences, or parts of them, feed the same share.
    """

    place: int
    shares: int


@functools.cache
def own_share(mesh: Mesh) -> BatchShare:
    """This process's share.

    Raises:
        UserError: the processes' devices hold overlapping but different sequences.
    """
    sharding = batch_sharding(mesh)
    rows = mesh.size
    of_process: dict[int, set[int]] = {}
    device: Any
    for device, (_, part, _) in sharding.devices_indices_map((1, rows, rows)).items():
        of_process.setdefault(device.process_index, set()).update(range(*part.indices(rows)))
    shares = sorted({tuple(sorted(held)) for held in of_process.values()})
    if sum(map(len, shares)) != rows or len(set(map(len, shares))) > 1:
        raise UserError(
            f"the mesh {dict(mesh.shape)} gives processes overlapping parts of a batch",
            hint="choose context_parallelism, tensor and pipeline by the devices of a process",
        )
    return BatchShare(shares.index(tuple(sorted(of_process[jax.process_index()]))), len(shares))


def rows_per_process(config: Config, mesh: Mesh) -> int:
    """Sequences of one micro-batch that each process feeds."""
    return micro_batch_size(config, mesh.size) // own_share(mesh).shares


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows [accumulation, rows, …] → arrays of the whole job's batch."""
    shardings = {key: batch_sharding(mesh, rows.ndim) for key, rows in batch.items()}
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), shardings)
    count = own_share(mesh).shares

    def put(key: str, rows: np.ndarray) -> jax.Array:
        accumulation, own, *row = rows.shape
        shape = (accumulation, own * count, *row)
        return jax.make_array_from_process_local_data(shardings[key], rows, shape)

    return {key: put(key, rows) for key, rows in batch.items()}


def state_shardings(mesh: Mesh, abstract_state: Any) -> Any:
    """A sharding for every array of a train state; optimizer moments follow their weights."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            array = leaf.get_value()
            names = leaf.get_metadata("logical_axes")
            spec = partition_spec(names, array.shape, dict(mesh.shape))
            return leaf.replace(NamedSharding(mesh, spec))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(of, abstract_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
