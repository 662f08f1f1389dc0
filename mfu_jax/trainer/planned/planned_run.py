"""Maps a measured MaxText run to the reference trainer's keys: the nearest step it can run."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.model_configs.model import MAXTEXT_FIELDS
from mfu_jax.planning.measured_runs import DEFAULT_MODEL, MeasuredRun
from mfu_jax.planning.result.plan import UNITS
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.config.keys import REMAT_KEYS
from mfu_jax.trainer.config.mesh_axes import AXES
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.config.validation import FUSED_BLOCKS
from mfu_jax.util.formatting import percent
from mfu_jax.util.optional_deps import QUANTIZE
from mfu_jax.util.values import field_types, typed
from mfu_jax.util.yaml_files import read_mapping

_MESH_KEY = "_parallelism"
# Tile sizes of the experts' kernels: the plan's times are for the run's tiles.
_TILE = re.compile(r"tile_.*(?:batch_seq|_dim)$")
_CALIBRATION = "_quantization_calibration_method"
_SCALE = "global_parameter_scale"


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_mapping(Path(__file__).with_name("planned_run.yml"))


class Lost(NamedTuple):
    """A setting of the run that the reference model's step does not have.

    Attributes:
        setting: as text, with what it would need.
        work: what it changes, if the step is another program without it; else empty.
        touches: the part of the predicted time that it may change: a cause, or ``transfers``.
        longer: of the predicted time, how much more steps with it took at most, if it is known.
    """

    setting: str
    work: str = ""
    touches: str = ""
    longer: float = 0.0


class NearestStep(NamedTuple):
    """The reference trainer's step nearest to a run.

    Attributes:
        keys: the trainer's.
        lost: what they cannot express.
    """

    keys: Mapping[str, str]
    lost: tuple[Lost, ...]

    @property
    def other_work(self) -> tuple[str, ...]:
        """What makes it another program than the run's."""
        return tuple(f"{lost.setting} ({lost.work})" for lost in self.lost if lost.work)

    @property
    def doubts(self) -> tuple[tuple[str, float], ...]:
        """What may take much longer, for the first line, and how much."""
        return tuple(
            (f"without {lost.setting}: up to {percent(lost.longer)} more", lost.longer)
            for lost in self.lost
            if lost.longer
        )

    def notes(self, time_by_cause: Mapping[str, float]) -> tuple[str, ...]:
        """What is not followed, the largest part of the predicted time first.

        Args:
            time_by_cause: seconds of the prediction; empty: not known.
        """
        whole = sum(time_by_cause.values())
        seconds = {cause: time_by_cause.get(cause, 0.0) for cause in UNITS}
        links = [cause for cause in time_by_cause if " on " in cause]  # a kind on a link
        seconds["transfers"] = sum(time_by_cause[cause] for cause in links)
        groups: dict[str, list[str]] = {}
        for lost in self.lost:
            if not lost.work:
                groups.setdefault(lost.touches, []).append(lost.setting)
        notes = []
        for cause in sorted(groups, key=lambda cause: -seconds.get(cause, 0.0)):
            share = seconds[cause] / whole if cause and whole else None
            touched = f" ({cause}: {percent(share)} of the step)" if share is not None else ""
            notes.append(
                f"not followed by the reference model: {', '.join(groups[cause])}{touched}"
            )
        return tuple(notes)


def followed(run: MeasuredRun, follow: str = "") -> NearestStep:
    """The nearest step, if it is the run's program or ``follow=nearest`` accepts another.

    Raises:
        UserError: it is another program, or a size is not a number.
    """
    if follow not in ("", "nearest"):
        raise UserError(f"follow={follow}; expected nearest, or leave it out")
    nearest = reference_keys(run)
    if nearest.other_work and not follow:
        raise UserError(
            f"the reference model's step would be another program than the run's, without "
            f"{'; '.join(nearest.other_work)}; expected what it can follow",
            hint="install what is missing, plan MaxText's own step with maxtext_python=FILE, or "
            "pass follow=nearest",
        )
    return nearest


def reference_keys(run: MeasuredRun) -> NearestStep:
    """The trainer's keys for a run, and what they cannot express.

    Args:
        run: a run with MaxText's keys.

    Raises:
        UserError: a size of the mesh or of the model is not a number.
    """
    kinds = field_types(Config)
    defaults = {**_tables()["defaults"], **_tables()["of_family"].get(_family(run), {})}
    keys = {"override_model_config": "true", **defaults, **_sizes_of(run)}
    lost: list[Lost] = []
    renamed, attention = _tables()["renamed"], _tables()["attention"]
    for name, value in _program_keys(run):
        own = name.removeprefix("base_")
        own, value = renamed.get(own, own), attention.get(value, value)
        if own not in kinds or not _takes(kinds[own], value):
            lost.append(_lost(name, value))
        elif "quantization" in own and importlib.util.find_spec("qwix") is None:
            lost.append(_lost(name, value, f", which needs pip install {QUANTIZE}"))
        elif own == "fused_qkv" and not _may_fuse(run):
            lost.append(_lost(name, value))
        elif own.endswith(_CALIBRATION) and not run.keys.get("quantization"):
            lost.append(Lost(f"{name}={value} (without quantization)"))
        else:
            keys[own] = value
    if run.keys.get("use_tokamax_splash") == "true":  # has no other backward kernel
        keys["sa_use_fused_bwd_kernel"] = "true"
    mesh, others = _mesh(run.keys, run.target)
    lost += [Lost(other, touches="transfers") for other in others]
    slots = typed("capacity_factor", keys.get("capacity_factor", "-1"), float)
    ring = keys.get("context_parallel_strategy") == "ring" and run.target.platform == "tpu"
    if ring and (slots > 0 or keys.get("mtp_num_layers", "0") != "0"):
        lost.append(_lost("context_parallel_strategy", "ring", ", in kernels as the run's"))
    if run.keys.get("use_qwix_quantization") != "true":
        own_rounding = _tables()["without_qwix"].get(keys.get("quantization"))
        lost += [Lost(touches="vector", **own_rounding)] if own_rounding else []
    if run.target.platform == "cuda" and keys.get("quantization") and slots > 0:
        # Read off MaxText's own compiled step of DeepSeek-V3 in fp8 (held_out_runs.json).
        keys["whole_expert_gradients"] = "true"
        gathers = "XLA's second gathers of half of the quantized experts' matrices"
        lost.append(Lost(gathers, "", "transfers"))
    if "shard_exp_on_fsdp" in keys and not _has_whole_experts(run, mesh):
        lost.append(_lost("shard_exp_on_fsdp", keys.pop("shard_exp_on_fsdp")))
    return NearestStep({**keys, **mesh}, tuple(lost))


def _lost(name: str, value: str, needs: str = "") -> Lost:
    """A key that is not followed, with what it changes."""

    def first(kinds: str) -> str:
        patterns = _tables()[kinds].items()
        given = (name, f"{name}={value}")
        return next(
            (kind for kind, keys in patterns if any(map(re.compile(keys).match, given))), ""
        )

    work = first("other_work") or ("model" if name.removeprefix("base_") in MAXTEXT_FIELDS else "")
    return Lost(f"{name}={value}{needs}", work, "" if work else first("touches"))


def _family(run: MeasuredRun) -> str:
    return as_model_config(run.model).decoder_block


def _may_fuse(run: MeasuredRun) -> bool:
    """Whether its block can fuse, with as many key/value heads as query heads."""
    heads = as_model_config(run.model).attention
    return _family(run) in FUSED_BLOCKS and heads.num_query_heads == heads.num_kv_heads


def _has_whole_experts(run: MeasuredRun, mesh: Mapping[str, str]) -> bool:
    """Whether the experts divide evenly over the devices, each expert whole."""
    parts = math.prod(int(mesh[axis]) for axis in ("expert", "fsdp", "context_parallelism"))
    return as_model_config(run.model).experts.num_experts % parts == 0


def _program_keys(run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """The run's keys that change the program and are not expressed otherwise."""
    scaled = _SCALE in run.keys or run.keys["model_name"] == "default"
    tensors = {*REMAT_KEYS} - {"remat_policy"}
    keeps = run.keys.get("remat_policy") == "custom"
    silent, same = _tables()["silent"], _tables()["same"]
    for name, value in run.keys.items():
        if _is_as_experts_are(name, run.keys) or (_TILE.search(name) and run.tiles):
            continue
        if name.endswith(_MESH_KEY) or name in silent or same.get(name) == value or not value:
            continue
        if scaled and (name.startswith("base_") or name in (_SCALE, "model_name")):
            continue
        if name in tensors and not keeps:  # MaxText reads them only with this policy
            continue
        yield name, value


def _is_as_experts_are(name: str, keys: Mapping[str, str]) -> bool:
    """Whether a key follows from others: MaxText's sparse experts drop nothing.

    The kernel of sparse experts, megablox, is not read without them.
    """
    is_sparse = keys.get("sparse_matmul") == "true"
    if name == "megablox":
        return keys.get("sparse_matmul") == "false"
    if name == "capacity_factor":
        return is_sparse
    has_slots = typed("capacity_factor", keys.get("capacity_factor", "-1"), float) > 0
    return name == "sparse_matmul" and (is_sparse or has_slots)


def _sizes_of(run: MeasuredRun) -> dict[str, str]:
    """Sizes of MaxText's default model, or of one that it scales."""
    if run.keys["model_name"] != "default" and _SCALE not in run.keys:
        return {}
    config = as_model_config(run.model)
    heads, mlp = config.attention, config.feed_forward
    sizes = {
        "num_decoder_layers": str(config.num_decoder_layers),
        "emb_dim": str(config.emb_dim),
        "num_query_heads": str(heads.num_query_heads),
        "num_kv_heads": str(heads.num_kv_heads),
        "mlp_dim": str(mlp.mlp_dim),
    }
    if config.experts.num_experts > 1:
        sizes["moe_mlp_dim"] = str(config.experts.moe_mlp_dim)
    if run.keys["model_name"] != "default":
        given = {key: size for key, size in sizes.items() if size != "0"}  # absent in such a model
        return {**given, "model_name": run.keys["model_name"]}
    activations = ",".join(DEFAULT_MODEL["mlp_activations"])
    return {
        **sizes,
        "vocab_size": str(config.vocab_size),
        "head_dim": str(heads.head_dim),
        "mlp_activations": f"[{activations}]",
        "logits_via_embedding": "false",
    }


def _takes(kind: object, value: str) -> bool:
    """Whether a key with a fixed set of words accepts this one; others are checked when read."""
    words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return not words or value in words


def _mesh(keys: Mapping[str, str], target: Target) -> tuple[dict[str, str], list[str]]:
    """Sizes of our axes, and MaxText's axes that they merely stand in for."""
    slices = _slices(keys, target)
    within = _sizes(keys, "ici", "fsdp", target.devices // slices)
    between = _sizes(keys, "dcn", "data", slices)
    sizes = {name: within.get(name, 1) * between.get(name, 1) for name in {**within, **between}}
    mesh = {axis.key: math.prod(sizes.get(n, 1) for n in axis.maxtext) for axis in AXES}
    others = [
        f"{name}{_MESH_KEY}={sizes[name]} (as {axis.name})"
        for axis in AXES
        for name in axis.stand_ins
        if sizes.get(name, 1) > 1
    ]
    known = {name for axis in AXES for name in axis.maxtext}
    others += [f"{name}{_MESH_KEY}={s}" for name, s in sizes.items() if name not in known and s > 1]
    return {key: str(size) for key, size in mesh.items()}, others


def _slices(keys: Mapping[str, str], target: Target) -> int:
    """The product of MaxText's dcn axes: slices of TPUs, hosts of GPUs.

    One if a GPU run's ici axes already cover all GPUs.
    """
    if target.platform == "tpu":
        return target.slices
    within = math.prod(size for _, size in _given(keys, "ici") if size > 0)
    return 1 if within > target.shape[-1] else target.shape[0]


def _sizes(keys: Mapping[str, str], network: str, rest: str, devices: int) -> dict[str, int]:
    """MaxText's axis sizes over one network; an axis of -1 takes what the others leave.

    The axis `rest` is -1 by default, as in MaxText's base.yml.
    """
    sizes = dict(_given(keys, network))
    known = math.prod(size for size in sizes.values() if size > 0)
    if not any(size < 1 for size in sizes.values()):
        sizes.setdefault(rest, -1)
    for name, size in sizes.items():
        if size < 1:
            sizes[name], known = max(1, devices // known), devices
    return sizes


def _given(keys: Mapping[str, str], network: str) -> Iterator[tuple[str, int]]:
    for key, value in keys.items():
        if key.startswith(f"{network}_") and key.endswith(_MESH_KEY):
            name = key.removeprefix(f"{network}_").removesuffix(_MESH_KEY)
            yield name, typed(key, value, int)
