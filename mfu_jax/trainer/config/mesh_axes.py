"""The axes of the mesh: what each splits, its names in MaxText, its size on a number of devices.

Trainer and plans read the same table. Imports no JAX.

Adding one: `AXES` here, `MESH_AXIS` in layers/sharding.py, the work beyond the model in
`overheads`, and a mesh in tests/campaigns/meshes.py.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.trainer.config.messages import wrong
from mfu_jax.util.formatting import counted
from mfu_jax.util.values import typed

_log = logging.getLogger("mfu_jax")


class Axis(NamedTuple):
    """One axis of the mesh.

    Attributes:
        name: in the mesh and in partition specs.
        key: the config's key for its size; ``context`` is already the name of a tensor there.
        maxtext: MaxText's axes that split the same dimensions.
        stand_ins: those of them whose communication differs.
        splits_batch: whether it splits the batch by sequences.
    """

    name: str
    key: str
    maxtext: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()
    splits_batch: bool = False

    @property
    def between(self) -> str:
        """The key of its size across the network between slices."""
        return f"dcn_{self.name}_parallelism"


AXES = (
    Axis("data", "data", ("data",), splits_batch=True),
    Axis("pipeline", "pipeline", ("pipeline",), splits_batch=True),
    Axis("fsdp", "fsdp", ("fsdp",), splits_batch=True),
    Axis("fsdp_transpose", "fsdp_transpose", ("fsdp_transpose",), splits_batch=True),
    Axis("context", "context_parallelism", ("context", "sequence"), ("sequence",)),
    Axis("expert", "expert", ("expert",), splits_batch=True),
    Axis(
        "tensor",
        "tensor",
        ("tensor", "tensor_transpose", "tensor_sequence"),
        ("tensor_sequence",),
    ),
)
# MaxText's axes that training leaves at 1.
_SERVING = ("autoregressive", "context_autoregressive", "diloco")
_LIKE_FSDP = ("fsdp", "fsdp_transpose", "context", "expert")  # all of them split the width
_ALWAYS_SHOWN = ("data", "fsdp", "expert", "tensor")
_MAXTEXT_KEY = re.compile(r"(ici|dcn)_(\w+)_parallelism")
_REST = -1


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of all axes, in the order of `AXES`.

    Attributes:
        within: sizes within a slice.
        between: sizes between slices; all 1 where the config leaves the choice to the trainer.
    """

    within: tuple[int, ...]
    between: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → its size over all devices."""
        pairs = zip(AXES, self.within, self.between, strict=True)
        return {axis.name: inner * outer for axis, inner, outer in pairs}

    @property
    def batch_shards(self) -> int:
        """Number of parts of a batch."""
        return math.prod(self.sizes[axis.name] for axis in AXES if axis.splits_batch)

    @property
    def keys(self) -> dict[str, int]:
        """The config's keys with every size filled in."""
        inner = {axis.key: size for axis, size in zip(AXES, self.within, strict=True)}
        outer = {axis.between: size for axis, size in zip(AXES, self.between, strict=True)}
        return {**inner, **outer}

    def __str__(self) -> str:
        return _shown(self.sizes)


def axis_keys() -> list[str]:
    """Every config key that is the size of an axis."""
    return [key for axis in AXES for key in (axis.key, axis.between)]


def mesh_shape(config: Any, devices: int, slices: int = 1) -> MeshShape:
    """The sizes of a config's axes on `devices` devices in `slices` slices.

    A size of -1 takes what the others leave; ``data=-1``, the default, yields to another -1.

    Args:
        config: an object with the keys of `axis_keys`.

    Raises:
        UserError: the axes do not cover the devices.
    """
    inner = {axis.key: getattr(config, axis.key) for axis in AXES}
    outer = {axis.between: getattr(config, axis.between) for axis in AXES}
    has_outer = any(size != 1 for size in outer.values())
    if list(inner.values()).count(_REST) > 1 and inner["data"] == _REST:
        inner["data"] = 1
    parts = slices if has_outer else 1
    return MeshShape(
        within=_filled(inner, devices // parts, counted(devices, "device"), parts),
        between=_filled(outer, parts, counted(slices, "slice"), 1),
    )


def weight_shards(config: Any) -> int:
    """Number of parts of weights and optimizer state; every size must already be a number."""
    keys = [key for axis in AXES if axis.name != "data" for key in (axis.key, axis.between)]
    return math.prod(getattr(config, key) for key in keys)


def _filled(sizes: Mapping[str, int], count: int, what: str, parts: int) -> tuple[int, ...]:
    """`sizes` with the -1 filled in, so that their product is `count`."""
    open_keys = [key for key, size in sizes.items() if size == _REST]
    if len(open_keys) > 1:
        raise UserError(f"{' and '.join(f'{key}=-1' for key in open_keys)}: only one axis can be")
    known = math.prod(size for size in sizes.values() if size != _REST)
    filled = {k: count // known if size == _REST else size for k, size in sizes.items()}
    if math.prod(filled.values()) != count:
        over = f" in each of {parts} slices" if parts > 1 else ""
        rest = "data=-1" if "data" in sizes else "-1"
        raise UserError(
            f"the mesh {_shown(sizes)} does not fill the {what}; their product has to be "
            f"{count}{over}",
            hint=f"{rest} takes the rest",
        )
    return tuple(filled.values())


def _shown(sizes: Mapping[str, int]) -> str:
    shown = (k for k, size in sizes.items() if size != 1 or k in _ALWAYS_SHOWN)
    return " ".join(f"{key}={sizes[key]}" for key in shown)


def check_shape(config: Any, shape: MeshShape) -> None:
    """Raises a `UserError` if an axis does not divide a size that it splits."""
    heads = ("num_query_heads", "num_kv_heads")[: 1 if config.attention_type == "mla" else 2]
    width = "moe_mlp_dim" if config.num_experts > 1 else "mlp_dim"
    sizes = shape.sizes
    split: dict[tuple[str, ...], tuple[str, ...]] = {
        ("tensor",): (*heads, width, "vocab_size", "emb_dim"),
        _LIKE_FSDP: ("emb_dim",),
        ("context",): ("max_target_length",),
        ("expert",): ("num_experts",) if sizes["expert"] > 1 else (),
    }
    if config.shard_exp_on_fsdp and config.num_experts > 1:
        split["expert", "fsdp", "context"] = ("num_experts",)
        split["tensor", "fsdp_transpose"] = (width,)
    if config.images_per_sequence:
        split["tensor",] += (
            "num_attention_heads_for_vit",
            "intermediate_size_for_vit",
            "projector_input_dim_for_vit",
        )
        split[_LIKE_FSDP] += (
            "hidden_size_for_vit",
            "projector_output_dim_for_vit",
        )
    for axes, keys in split.items():
        parts = math.prod(sizes[axis] for axis in axes)
        for key in keys:
            if getattr(config, key) % parts:
                used = " × ".join(axis for axis in axes if sizes[axis] > 1)
                raise wrong(config, key, f"not divisible by {used}={parts}, which splits it")
    images = config.images_per_sequence * max(config.tiles_per_image, 1)
    if images % sizes["context"]:
        problem = f"{images} images and tiles, which context={sizes['context']} does not divide"
        raise wrong(config, "images_per_sequence", problem)


def check_batch(config: Any, shape: MeshShape, devices: int) -> None:
    """Raises a `UserError` if a micro-batch cannot be cut into the mesh's parts."""
    batch = sequences(config, devices)
    if batch % shape.batch_shards:
        names = " × ".join(axis.name for axis in AXES if axis.splits_batch)
        raise UserError(
            f"the batch of {float(batch):g} sequences (per_device_batch_size × "
            f"{counted(devices, 'device')}) is not divisible by the mesh's "
            f"{names} = {shape.batch_shards}"
        )
    _check_microbatches(config, shape, batch)


def _check_microbatches(config: Any, shape: MeshShape, batch: Fraction) -> None:
    stages, wanted = shape.sizes["pipeline"], config.num_pipeline_microbatches
    count = stages if wanted == _REST else wanted
    parts = shape.batch_shards // stages
    if stages > 1 and (count < stages or batch % (parts * count)):
        raise UserError(
            f"num_pipeline_microbatches={count} with pipeline={stages}: expected {stages} or more, "
            f"and a divisor of {batch // parts}, the sequences that a pipeline gets"
        )


def sequences(config: Any, devices: int) -> Fraction:
    """Sequences in one micro-batch of the whole job; a whole number if the config fits."""
    return Fraction(config.per_device_batch_size).limit_denominator(1 << 20) * devices


def own_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values` with MaxText's names of mesh axes replaced by ours.

    Raises:
        UserError: a size is given twice, or training does not use the axis.

    >>> own_names({"ici_fsdp_parallelism": 8, "dcn_data_parallelism": 2, "steps": 3}, "config")
    {'fsdp': 8, 'dcn_data_parallelism': 2, 'steps': 3}
    >>> own_names({"ici_tensor_parallelism": "4", "ici_tensor_transpose_parallelism": "2"}, "a")
    {'tensor': 8}
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        found.setdefault(_own_name(key), {})[key] = value
    for key, value in found.pop("", {}).items():
        if typed(f"{where}: {key}", value, int) not in (1, _REST):
            raise UserError(
                f"{where}: {key}={value}: training has no such axis",
                hint="leave it out",
            )
    return {own: _one_value(own, given, where) for own, given in found.items()}


def _own_name(key: str) -> str:
    """Our key for MaxText's; empty: an axis that training does not have."""
    match = _MAXTEXT_KEY.fullmatch(key)
    if match is None:
        return key
    network, name = match.groups()
    if name in _SERVING:
        return ""
    axis = next((axis for axis in AXES if name in axis.maxtext), None)
    if axis is None:
        return key
    return axis.key if network == "ici" else axis.between


def _one_value(own: str, given: Mapping[str, Any], where: str) -> Any:
    """The value of a key; the product if one of our axes stands for several of MaxText's."""
    for key in given:
        _say_stand_in(key, given[key], own, where)
    if len(given) == 1:
        return next(iter(given.values()))
    if not all(map(_MAXTEXT_KEY.fullmatch, given)):
        other = next(key for key in given if key != own)
        raise UserError(
            f"{where}: {own} is given twice, as {own} and as {other}",
            hint="give one",
        )
    sizes = [typed(f"{where}: {key}", value, int) for key, value in given.items()]
    split = [f"{key}={size}" for key, size in zip(given, sizes, strict=True) if size != 1]
    if _REST in sizes and len(split) > 1:
        raise UserError(
            f"{where}: {' '.join(split)} are one axis here, {own}",
            hint="give its size",
        )
    return math.prod(sizes)


def _say_stand_in(key: str, value: Any, own: str, where: str) -> None:
    match = _MAXTEXT_KEY.fullmatch(key)
    if match and any(match[2] in axis.stand_ins for axis in AXES) and str(value) != "1":
        _log.info("%s: %s is split as %s: its transfers differ from MaxText's", where, key, own)
