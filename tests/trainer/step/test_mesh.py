"""Meshes over a TPU pod's torus, by devices that only say where they stand."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest

from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.step.mesh import make_mesh


class TorusDevice:
    """What JAX asks of a TPU v5p device to lay a mesh over it."""

    platform = "tpu"
    device_kind = "TPU v5"
    slice_index = process_index = core_on_chip = 0
    num_cores = 1

    def __init__(self, number: int, coords: tuple[int, int, int]) -> None:
        self.id = number
        self.coords = coords


@pytest.mark.parametrize(("data", "fsdp", "tensor", "splits"), [(1, 64, 8, 0), (2, 64, 4, 1)])
def test_a_mesh_that_splits_an_axis_of_the_torus_is_laid_with_a_warning(
    data: int, fsdp: int, tensor: int, splits: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = pyconfig.load(
        [
            *("configs/base.yml", f"data={data}", f"fsdp={fsdp}", f"tensor={tensor}"),
            *("emb_dim=512", "num_query_heads=8", "num_kv_heads=8", "per_device_batch_size=1"),
        ]
    )
    devices: Any = [
        TorusDevice(i, coords) for i, coords in enumerate(itertools.product(range(8), repeat=3))
    ]
    with caplog.at_level(logging.WARNING):
        mesh = make_mesh(config, devices)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {
        axis: size
        for axis, size in {"data": data, "fsdp": fsdp, "tensor": tensor}.items()
        if size > 1
    }
    assert {device.id for device in mesh.devices.flat} == set(range(512))
    assert sum("splits axes" in record.message for record in caplog.records) == splits


@pytest.mark.parametrize(("data", "fsdp", "axis"), [(2, 64, "data"), (1, 128, "fsdp")])
def test_slices_lie_one_after_another_along_the_first_axis_that_they_divide(
    data: int, fsdp: int, axis: str
) -> None:
    devices = []
    for number, (piece, *coords) in enumerate(itertools.product(range(2), *[range(4)] * 3)):
        x, y, z = reversed(coords)
        device = TorusDevice(number, (x, y, z))
        device.slice_index = piece
        devices.append(device)
    config = pyconfig.load(
        [f"data={data}", f"fsdp={fsdp}", "emb_dim=128", "per_device_batch_size=1"]
    )
    mesh = make_mesh(config, devices)
    grid: Any = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    first, second = grid[: len(grid) // 2].flat, grid[len(grid) // 2 :].flat
    assert {device.slice_index for device in first} == {0}
    assert {device.slice_index for device in second} == {1}


def test_slices_lie_along_the_axes_that_have_a_size_between_them() -> None:
    """MaxText's dcn_fsdp_parallelism=2: each half of fsdp in one slice, tensor within."""
    devices = []
    for number, (piece, *coords) in enumerate(itertools.product(range(2), *[range(4)] * 3)):
        x, y, z = reversed(coords)
        device = TorusDevice(number, (x, y, z))
        device.slice_index = piece
        devices.append(device)
    config = pyconfig.load(
        [
            *("data=1", "ici_fsdp_parallelism=16", "ici_tensor_parallelism=4", "num_kv_heads=4"),
            *("dcn_fsdp_parallelism=2", "emb_dim=128", "per_device_batch_size=1"),
        ]
    )
    mesh = make_mesh(config, devices)  # type: ignore[arg-type]
    assert (mesh.shape["fsdp"], mesh.shape["tensor"]) == (32, 4)
    rows: Any = np.squeeze(mesh.devices)
    assert [{device.slice_index for device in row} for row in rows] == [{0}] * 16 + [{1}] * 16
