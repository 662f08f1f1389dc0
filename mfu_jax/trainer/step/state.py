"""The train state: weights, optimizer state and step, created already sharded, if they fit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.hardware.chips import lookup
from mfu_jax.layers.attention.kernels import LANES
from mfu_jax.layers.attention.ops import SPLIT, STAGED, VALUE_DIM, choose_attention, supports
from mfu_jax.layers.decoder import Decoder
from mfu_jax.layers.families import model_spec
from mfu_jax.layers.families.blocks import ModelSpec
from mfu_jax.layers.sharding import STAGE_AXIS
from mfu_jax.layers.stack.pipeline import schedule_of
from mfu_jax.layers.stack.remat import computes_again
from mfu_jax.trainer.config.mesh_axes import weight_shards
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step.mesh import state_shardings
from mfu_jax.trainer.step.remat_choice import chosen_policy
from mfu_jax.trainer.step.trainable import trained_and_frozen
from mfu_jax.util.jax_internals import least_of_processes
from mfu_jax.util.optional_deps import QUANTIZE, require

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of the memory, if `remat_policy=auto` fills it; the rest is for buffers and fragmentation.
_FILLED = 0.85
_HOPPER = 9  # the major version of its compute capability
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step takes and returns; checkpoints hold all of it.

    Attributes:
        reference: the initial weights, which DPO compares with; without DPO, nothing.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    reference: Any = ()


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up, then a cosine decay to a fraction of the peak."""
    warmup = round(config.steps * config.warmup_steps_fraction)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate * config.cosine_learning_rate_final_fraction,
    )


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after clipping by the global norm."""
    adamw = optax.adamw(
        learning_rate_schedule(config),
        b1=config.adam_b1,
        b2=config.adam_b2,
        weight_decay=config.adam_weight_decay,
        mu_dtype=config.mu_dtype or None,
    )
    if not config.gradient_clipping_threshold:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.gradient_clipping_threshold), adamw)


def resolve_attention(config: Config, mesh: Mesh) -> Config:
    """The config with `attention=auto` replaced by the fastest kernel on the mesh's devices.

    Also resolves `grouped_matmul`, `weight_gathers`, `norm_gradients`, `logits_columns` and
    `remat_policy` of ``auto``.

    Raises:
        UserError: a kernel does not support this platform or dtype, the layers cannot be split as
            the mesh requires, or ``remat_policy=auto`` meets a device of unknown memory.
    """
    device = mesh.devices.flat[0]
    platform = device.platform
    if config.grouped_matmul == "kernel" and platform != "tpu":
        raise UserError(
            f"grouped_matmul=kernel is a TPU's, and the devices are {platform}",
            hint="leave it at auto",
        )
    spec = model_spec(config)
    is_split = dict(mesh.shape)["context"] > 1
    has_mask = config.dataset_type != "synthetic" or config.chunk_attn_window_size
    is_staged = bool(has_mask) and dict(mesh.shape).get(STAGE_AXIS, 1) > 1
    try:
        attention = choose_attention(
            _of_split(config, spec, mesh) if is_split else config.attention,
            platform=platform,
            dtype=config.dtype,
            needs={*spec.needs, *([SPLIT] * is_split), *([STAGED] * is_staged)},
            cudnn_lacks=() if _has_narrow_values(config, device) else (VALUE_DIM,),
        )
        schedule_of(config, spec.layers)
    except ValueError as error:
        raise UserError(str(error)) from None
    chosen = {k: v for k, v in _automatic(config, device).items() if getattr(config, k) == "auto"}
    config = config.replace(attention=attention, **chosen)
    if config.remat_policy == "auto":
        free = _FILLED * _memory_bytes(mesh) - state_bytes_per_device(config)
        policy = chosen_policy(config, mesh, free, _split_model)
        config = config.replace(remat_policy=policy)
    return config.replace(weight_gathers=_weight_gathers(config, platform))


def _has_narrow_values(config: Config, device: jax.Device) -> bool:
    """Whether cuDNN takes values narrower than keys: from Hopper on, without a mask for documents.

    With one, XLA compiles it, but whether cuDNN runs it was not tried. JAX 0.8.0 refuses heads over
    128 on later GPUs than Hopper.
    """
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if not major.isdecimal() or config.dataset_type != "synthetic":
        return False
    return int(major) == _HOPPER or (int(major) > _HOPPER and jax.__version_info__ >= (0, 8, 3))


def _memory_bytes(mesh: Mesh) -> float:
    """Memory of one device: what its runtime grants, or else, if it is absent, what its chip has.

    The least of all processes, each of which knows its own devices' only: they must agree.

    Raises:
        UserError: it is not known.
    """
    device = mesh.devices.flat[0]
    granted, own = None, jax.process_index()
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        granted = _limit_bytes([d for d in mesh.devices.flat if d.process_index == own])
    size = granted or lookup(device.device_kind).usable_memory_bytes
    return size if jax.process_count() == 1 else least_of_processes(size)


def _split_model(config: Config) -> tuple[Any, Any]:
    """The model's structure, and the shapes of its weights."""
    model = nnx.eval_shape(lambda: make_model(config, 0))
    return nnx.graphdef(model), nnx.state(model, nnx.Param)


def _automatic(config: Config, device: jax.Device) -> dict[str, str]:
    """What ``auto`` of these keys stands for on a device: what pays there.

    That the backward pass of a norm waits for its whole input pays on TPU v5p and v6e where a
    matmul is in front of it, and costs on TPU7x; rows from experts are gathered.
    """
    on_tpu, is_gpu = device.platform == "tpu", device.platform in ("gpu", "cuda")
    norms_wait = on_tpu and config.num_experts <= 1 and device.device_kind.startswith("TPU v")
    return {
        "grouped_matmul": "kernel" if on_tpu else "xla",
        "norm_gradients": "whole" if norms_wait else "fused",
        "logits_columns": "padded" if is_gpu else "exact",  # they fill its tensor cores
    }


def _weight_gathers(config: Config, platform: str) -> Literal["first", "xla"]:
    """Whether weights are gathered before their products on a platform.

    A gather before its product is exposed. It pays where a recomputed product shares the gather
    with its gradient, and where activations are large; a pipeline gathers again in every turn,
    for one microbatch. XLA has collective matmuls on TPUs only.
    """
    if config.weight_gathers != "auto":
        return config.weight_gathers
    stages = config.pipeline * config.dcn_pipeline_parallelism
    pays = platform == "tpu" and stages == 1 and computes_again(config, "mlpwi_0")
    return "first" if pays else "xla"


def _of_split(config: Config, spec: ModelSpec, mesh: Mesh) -> str:
    """The config's attention implementation for split sequences.

    A ring on TPUs takes tokens in another order, so no layer may read a token's neighbours, nor
    drop those that come last.
    """
    if config.context_parallel_strategy != "ring":
        return config.attention
    if config.attention not in ("auto", "ring"):
        raise ValueError(
            f"context_parallel_strategy=ring with attention={config.attention}: the ring has an "
            "attention of its own; leave attention at auto, or take all_gather"
        )
    has_neighbours = spec.vision or config.mtp_num_layers or config.engram_layers
    takes_any_order = not has_neighbours and config.capacity_factor <= 0
    halves = 2 * dict(mesh.shape)["context"]
    fits = config.max_target_length % (halves * LANES) == 0 and supports("ring_splash", spec.needs)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return "ring_splash" if on_tpu and takes_any_order and fits else "ring"


def make_model(config: Config, seed: int | jax.Array) -> Decoder:
    """The model with its initial weights.

    Raises:
        UserError: the config quantises, but qwix is missing.
    """
    if config.quantization:
        require("qwix", f"quantization={config.quantization}", install=QUANTIZE)
    return Decoder(config, attention=config.attention, rngs=nnx.Rngs(params=seed))


def model_graph(config: Config) -> Any:
    """The model's structure without weights, for `nnx.merge(graph, params)`."""
    return nnx.graphdef(nnx.eval_shape(lambda: make_model(config, 0)))


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without any array."""
    shapes = jax.eval_shape(lambda: _initial_state(config))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def create_state(config: Config, mesh: Mesh) -> TrainState:
    """The initial state; each device creates its own part."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        return jax.jit(lambda: _initial_state(config), out_shardings=shardings)()


def parameter_count(state: TrainState) -> int:
    """The number of weights, trained or not."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def _initial_state(config: Config) -> TrainState:
    params = nnx.state(make_model(config, config.seed), nnx.Param)
    trained, _ = trained_and_frozen(config, params)
    reference = jax.tree.map(jnp.copy, params) if config.use_dpo else ()
    moments = make_optimizer(config).init(trained)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, reference)


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
            f"{parameters:,} parameters do not fit: training takes at least {_gib(needed)} on "
            f"each device, which has {_gib(limit)}",
            hint=f"choose smaller sizes (emb_dim={config.emb_dim} "
            f"vocab_size={config.vocab_size} "
            f"num_decoder_layers={config.num_decoder_layers}), or split them over more "
            "devices with fsdp",
        )


def state_bytes_per_device(config: Config) -> int:
    """Bytes of weights, optimizer state and gradients on one device, if all are split evenly."""
    dtypes = [config.weight_dtype, config.mu_dtype or config.weight_dtype, config.weight_dtype]
    # All gradients exist at once: for their common norm, or to be summed.
    if config.gradient_clipping_threshold > 0 or config.gradient_accumulation_steps > 1:
        dtypes.append(min(config.weight_dtype, config.grad_dtype, key=_BYTES.__getitem__))
    width = sum(_BYTES[dtype] for dtype in dtypes)
    return count_parameters(config).total * width // weight_shards(config)


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
