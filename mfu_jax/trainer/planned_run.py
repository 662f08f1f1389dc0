"""A measured run of MaxText as the reference trainer's keys: the nearest step that it can make."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import typing
from collections.abc import Iterator, Mapping

from mfu_jax.parts import QUANTIZE
from mfu_jax.planning.measured_runs import MeasuredRun
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.pyconfig import Config

# MaxText's defaults where ours differ.
_DEFAULTS = {"dtype": "bfloat16", "remat_policy": "full", "decoder_layer_input": "device"}
_ATTENTION = {
    "autoselected": "auto",
    "flash": "auto",
    "cudnn_flash_te": "cudnn_flash",
    "cudnn_flash_jax": "cudnn_flash",
}
# MaxText's axes of the mesh by ours. Those below the line are other ways to split a step: the
# devices are used, but their transfers differ.
_AXES = {
    "data": ("data",),
    "fsdp": ("fsdp", "fsdp_transpose"),
    "expert": ("expert",),
    "tensor": ("tensor", "tensor_transpose"),
}
_OTHER_AXES = {"fsdp": ("pipeline",), "tensor": ("context", "sequence", "tensor_sequence")}
_MESH_KEY = "_parallelism"
# Keys that do not change the program.
_SILENT = (
    "dataset_type",
    "allow_split_physical_axes",
    "use_iota_embed",
    "use_qwix_quantization",  # all quantisation here is qwix's
)
_SAME = {"opt_type": "adamw"}


def reference_keys(run: MeasuredRun) -> tuple[dict[str, str], tuple[str, ...]]:
    """The trainer's keys for a run, and notes on what they cannot say.

    Args:
        run: with MaxText's keys.
    """
    fields = {field.name for field in dataclasses.fields(Config)}
    kinds = typing.get_type_hints(Config)
    keys = {"override_model_config": "true", **_DEFAULTS}
    lost: list[str] = []
    for name, value in run.keys.items():
        own, value = name.removeprefix("base_"), _ATTENTION.get(value, value)
        if name.endswith(_MESH_KEY) or name in _SILENT or _SAME.get(name) == value:
            continue
        if "quantization" in own and importlib.util.find_spec("qwix") is None:
            lost.append(f"{name}={value} (it needs pip install {QUANTIZE})")
        elif own in fields and _takes(kinds[own], value):
            keys[own] = value
        else:
            lost.append(f"{name}={value}")
    mesh, others = _mesh(run.keys, run.target)
    notes = ["MaxText is not installed: the reference model's step is planned in its place"]
    lost += others
    if lost:
        notes.append(f"not followed by the reference model: {', '.join(lost)}")
    return {**keys, **mesh}, tuple(notes)


def _takes(kind: object, value: str) -> bool:
    """Whether a key of a few words has this one; others are checked when they are read."""
    words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return not words or value in words


def _mesh(keys: Mapping[str, str], target: Target) -> tuple[dict[str, str], list[str]]:
    """Sizes of our axes, and MaxText's axes that they only stand for."""
    within = _sizes(keys, "ici", "fsdp", target.devices // target.slices)
    between = _sizes(keys, "dcn", "data", target.slices)
    mesh = {}
    for axis, names in _AXES.items():
        all_names = (*names, *_OTHER_AXES.get(axis, ()))
        mesh[axis] = math.prod(within.get(n, 1) * between.get(n, 1) for n in all_names)
    others = [
        f"{name}{_MESH_KEY}={within.get(name, 1) * between.get(name, 1)} (as {axis})"
        for axis, names in _OTHER_AXES.items()
        for name in names
        if within.get(name, 1) * between.get(name, 1) > 1
    ]
    return {axis: str(size) for axis, size in mesh.items()}, others


def _sizes(keys: Mapping[str, str], network: str, rest: str, devices: int) -> dict[str, int]:
    """MaxText's sizes of the axes over one network; an axis of -1 takes what the others leave."""
    sizes = dict(_given(keys, network))
    sizes.setdefault(rest, -1)
    known = math.prod(size for size in sizes.values() if size > 0)
    for name, size in sizes.items():
        if size < 1:
            sizes[name], known = max(1, devices // known), devices
    return sizes


def _given(keys: Mapping[str, str], network: str) -> Iterator[tuple[str, int]]:
    for key, value in keys.items():
        if key.startswith(f"{network}_") and key.endswith(_MESH_KEY):
            yield key.removeprefix(f"{network}_").removesuffix(_MESH_KEY), int(value)
