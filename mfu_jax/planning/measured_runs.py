"""A measured run as a program to plan: MaxText's keys, mesh, remat and XLA flags.

A run is one JSON object: `model_name`, `per_device_batch_size`, `max_target_length`, `hardware`
with `topology`, `device_type` or `chips`, `num_slices`; the groups `mesh`, `remat_tensors`,
`splash`, `optimizer` and `other_flags` of MaxText's keys; `remat_policy`, `attention`, `dtype`,
`quantization`, `scan_layers`; and `xla_flags`. MaxText's keys may also stand outside the groups.
Of `env`, a plan follows flags of the compiler; on GPUs also the share of their memory that JAX
takes, and whether XLA schedules by a profile.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.inputs.maxtext_keys import parse_override
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.model_configs.model import MAXTEXT_FIELDS
from mfu_jax.flops.analytic.names import EXPERTS
from mfu_jax.planning.compilation.compiling import PROFILE_FLAG
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.step_time.attention_kernels import AS_COMPILED, RunsKernel
from mfu_jax.planning.step_time.durations import Efficiencies
from mfu_jax.planning.step_time.grouped_matmuls import KernelTiles, tiles_of_run
from mfu_jax.planning.targets import (
    MEMORY_FRACTION,
    Target,
    generation_of,
    parse_target,
    slice_name,
    with_memory_fraction,
    with_network,
)
from mfu_jax.util.formatting import percent, seconds_text
from mfu_jax.util.user_files import read_text
from mfu_jax.util.values import typed
from mfu_jax.util.yaml_files import model_names, read_mapping

_MOST_BYTES = 2**20
_PROFILES = "JAX_ENABLE_PGLE"  # JAX takes a profile of the first steps, and compiles again
_TABLES = read_mapping(Path(__file__).with_name("measured_runs.yml"))
_GROUPS, _SINGLE, _REQUIRED = (_TABLES[key] for key in ("groups", "single", "required"))
_AXES = [f"{net}_{axis}_parallelism" for axis in _TABLES["axes"] for net in ("ici", "dcn")]
FIXED: Mapping[str, str] = _TABLES["fixed"]
DEFAULT_MODEL: Mapping[str, Any] = _TABLES["default_model"]
DEFAULT_STEP: Mapping[str, str] = _TABLES["default_step"]
_TRAINERS: Mapping[str, Mapping[str, float]] = _TABLES["trainers"]
_OWN = "maxtext"  # the trainer whose keys and loop a plan follows: it reads a loss one step late
_LOOP = "levanter"  # the one whose loop's time is known
_MISSING = (None, "")
FLAG_VARIABLES = {"tpu": ("XLA_FLAGS", "LIBTPU_INIT_ARGS"), "cuda": ("XLA_FLAGS",)}
_MODEL_KEYS = {"model_name", "global_parameter_scale", *MAXTEXT_FIELDS} - {"capacity_factor"}
# What a run may leave out although it decides much of a step's time.
REMAT_POLICY, ATTENTION_BLOCKS = "remat_policy", "sa_block sizes"
EXPERT_TILES = "tiles of the experts' matmuls"
_MATTERS = 0.2  # of the step: then the plan is 25% above a run with the best settings
_MEASURED = "_printed"
_WORTH_SAYING = 0.05  # of the peak
# Per logit: MaxText's cross_entropy_with_logits passes the logits, their exponentials and the
# targets' one-hot rows to its backward pass in float32, and gets the logits' gradient in float32.
# XLA keeps between none and all of them: 3.5 and 3.7 times 4 bytes more than in the reference step
# for the 22B and 52B models in scripts/results/plan_memory.json.
_LOSS_BYTES = 14
# Of a gradient of a query's number: what JAX's fused kernel writes for each block of keys, and what
# three arrays of tokamax's take, in the float32 of its ring (its splash_attention_kernel.py).
_PARTIAL_BYTES, _THREE_SUMS_BYTES = 2, 3 * 4


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, ready to be compiled.

    Attributes:
        target: its chips.
        keys: MaxText's keys, values as text.
        model: the mapping that `mfu_jax.flops_breakdown` counts.
        flags: compiler flags.
        trainer: whose step it is, as `framework` has it; empty: not given.
        left_out: settings that the run does not give and that may take much of the step's time:
            MaxText's defaults are planned.
        notes: what of the run cannot be reproduced.
    """

    target: Target
    keys: Mapping[str, str]
    model: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    trainer: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tiles(self) -> KernelTiles | None:
        """Tile sizes of MaxText's grouped matmuls of experts; None without such kernels."""
        config = as_model_config(self.model)
        if config.experts.num_experts < 2:
            return None
        return tiles_of_run(self.keys, config.emb_dim)

    @property
    def has_tokamax_experts(self) -> bool:
        """Whether its grouped matmuls of experts are tokamax's kernels instead of megablox's."""
        return self.keys.get("use_tokamax_gmm") == "true"

    @property
    def loop_seconds(self) -> float:
        """What its trainer's loop adds to each step, as far as other runs of it on TPUs tell."""
        known = _TRAINERS.get(self.trainer, {}) if self.target.platform == "tpu" else {}
        return known.get("loop_seconds", 0.0)

    @property
    def attention(self) -> RunsKernel:
        """Its attention kernel, if it is tokamax's."""
        if self.keys.get("use_tokamax_splash") != "true":
            return AS_COMPILED
        estimate = typed(
            "use_max_logit_estimate", self.keys.get("use_max_logit_estimate", "-1"), float
        )
        splits = self.keys.get("sa_bwd_dkv_megacore") == "true"
        return RunsKernel(estimate > 0, True, self._has_three_sums and not splits, splits)

    @property
    def _has_three_sums(self) -> bool:
        """Whether its backward kernel adds queries' gradients to three arrays."""
        is_tokamaxs = self.keys.get("use_tokamax_splash") == "true"
        return is_tokamaxs and self.keys.get("dq_reduction_steps") == "3"

    @property
    def partial_gradient_bytes(self) -> float:
        """Bytes of queries' gradients that JAX's kernel holds beyond the run's, on one device."""
        if not self._has_three_sums:
            return 0.0
        config = as_model_config(self.model)
        length = config.step.max_target_length
        is_ring = self.keys.get("context_parallel_strategy") == "ring"
        keys = length / (self._parts("context") if is_ring else 1)
        blocks = keys / typed("sa_block_kv_dkv", self.keys.get("sa_block_kv_dkv", "512"), int)
        width = config.attention.num_query_heads * config.attention.head_dim / self._parts("tensor")
        numbers = float(config.step.per_device_batch_size * length * width)
        return max(0.0, (blocks * _PARTIAL_BYTES - _THREE_SUMS_BYTES) * numbers)

    def _parts(self, axis: str) -> int:
        """Parts along one of MaxText's axes, over both networks."""
        names = (f"{network}_{axis}_parallelism" for network in ("ici", "dcn"))
        return math.prod(max(1, typed(name, self.keys.get(name, "1"), int)) for name in names)

    @property
    def loss_bytes(self) -> float:
        """Bytes that MaxText's loss may hold beyond the reference model's, on one device."""
        config = as_model_config(self.model)
        tokens = config.sequences_per_step * config.step.max_target_length
        parts = config.step.gradient_accumulation_steps * max(
            typed("num_vocab_tiling", self.keys.get("num_vocab_tiling", "1"), int), 1
        )
        return float(_LOSS_BYTES * tokens * config.vocab_size / parts)


def load_run(name: str) -> MeasuredRun:
    """Reads the run of a file; ``-``: of the standard input.

    Raises:
        UserError: it cannot be read, or a key is missing or wrong.
    """
    expected = "one JSON object, as docs/plan.md describes it"
    text = sys.stdin.read(_MOST_BYTES) if name == "-" else read_text(name, expected, _MOST_BYTES)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name}: not JSON ({error}); expected {expected}") from None
    return read_run(given)


def read_run(run: Mapping[str, Any]) -> MeasuredRun:
    """Reads one run.

    Raises:
        UserError: a key is missing or wrong, or its chips are not known.
    """
    if not isinstance(run, Mapping):
        raise UserError(f"a run is {type(run).__name__}; expected a JSON object")
    run, defaults, left_out = _with_defaults(run)
    missing = [key for key in _REQUIRED if run.get(key) in _MISSING]
    if missing:
        raise UserError(f"the run lacks {', '.join(missing)}; expected {', '.join(_REQUIRED)}")
    values = {key: run[key] for key in run if _is_setting(key, run[key])}
    _check_axes(values, "the run")
    for group in _GROUPS:
        given = run.get(group) or {}
        if not isinstance(given, Mapping):
            raise UserError(f"{group} of the run is {given!r}; expected a JSON object")
        _check_axes(given, f"{group} of the run", all_are=group == "mesh")
        values |= {str(key): value for key, value in given.items() if value is not None}
    values |= {key: run[key] for key in (*_REQUIRED[:3], *_SINGLE) if run.get(key)}
    values |= {"scan_layers": False} if run.get("scan_layers") is False else {}
    _check_model(values)
    if values.get("decoder_block") == "mistral" and str(values.get("num_experts", 1)) != "1":
        values["decoder_block"] = "mixtral"  # its name in MaxText since 5409f5584 of April 2025
    target = with_network(_target(run), _number(run, "network_gbits", float))
    in_environment = [_environment(run).get(name) or "" for name in FLAG_VARIABLES[target.platform]]
    flags, words = _flags(*in_environment, run.get("xla_flags") or ())
    is_profiled = str(_environment(run).get(_PROFILES)).lower() in ("true", "1")
    if is_profiled and target.platform == "cuda":
        flags = (*flags, f"--{PROFILE_FLAG}=measured")
    read = MeasuredRun(
        target=target,
        keys={key: _text(value) for key, value in values.items()},
        model=model_of(values),
        flags=flags,
        trainer=re.split(r"\W", str(run.get("framework") or "").lower())[0],
        left_out=left_out,
        notes=(*defaults, *_not_followed(run, target, words)),
    )
    if read.tiles is None or any("tile_" in key for key in read.keys):
        return read
    return replace(read, left_out=(*left_out, EXPERT_TILES))


def _with_defaults(
    run: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[str, ...], tuple[str, ...]]:
    """The run with MaxText's defaults, notes that say so, and the costly settings left out."""
    added: dict[str, Any] = {}
    notes, left_out = [], []
    flags = run.get("other_flags")
    given = {**run, **(flags if isinstance(flags, Mapping) else {})}
    has_sizes = any(key.startswith("base_") or key == "global_parameter_scale" for key in given)
    if run.get("model_name") in _MISSING and has_sizes:
        added["model_name"] = "default"
        notes.append("no model_name: MaxText's default model with the run's sizes is planned")
    if run.get("max_target_length") in _MISSING:
        added["max_target_length"] = length = int(DEFAULT_STEP["max_target_length"])
        notes.append(f"no max_target_length: MaxText's default, {length}, is planned")
    if given.get("remat_policy") in _MISSING:
        left_out.append(REMAT_POLICY)
        notes.append("no remat_policy: MaxText's default, full, is planned")
    splash = run.get("splash")
    named = (*given, *(splash if isinstance(splash, Mapping) else ()))
    hardware = str(run.get("hardware"))
    is_tpu = generation_of(hardware) or generation_of(hardware.rpartition("-")[0])
    has_blocks = given.get("attention") in (*_MISSING, "autoselected", "flash")
    if is_tpu and has_blocks and not any(key.startswith("sa_") for key in named):
        left_out.append(ATTENTION_BLOCKS)
        notes.append(
            "no sa_block sizes: MaxText's default, 512, is planned; recipes with up to 2,048 halve "
            "the time of attention"
        )
    return {**run, **added}, tuple(notes), tuple(left_out)


def _is_setting(key: str, value: Any) -> bool:
    """Whether a key of the run itself is one of MaxText's: any single value with no other use."""
    others = (*_GROUPS, *_SINGLE, *_REQUIRED, *_TABLES["known"])
    is_single = isinstance(value, bool | int | float | str) or key in _MODEL_KEYS
    return is_single and key not in others and not key.endswith(_MEASURED)


def _check_axes(given: Mapping[str, Any], where: str, *, all_are: bool = False) -> None:
    """An error if a key that is named like the size of an axis, or that has to be one, is none."""
    for key in map(str, given):
        if key not in _AXES and (all_are or re.fullmatch(r"(ici|dcn)_\w+_parallelism", key)):
            raise UserError(
                f"{key!r} in {where} is no axis of MaxText's mesh",
                hint=f"{nearest(key, _AXES)}expected sizes such as ici_fsdp_parallelism there",
            )


def _check_model(values: Mapping[str, Any]) -> None:
    """An error if neither the model's name nor its sizes are known."""
    name = str(values["model_name"])
    known = {"default", *model_names()}
    if name.replace("-Instruct", "") in known or "vocab_size" in values:
        return
    close = nearest(name.rpartition("/")[2].lower(), known)
    raise UserError(
        f"model_name={name!r} of the run is not a bundled model; expected one, or its sizes",
        hint=f"{close}pass base_emb_dim, vocab_size … as MaxText has them, in other_flags",
    )


def model_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that determine the model's FLOPs, without slots that experts leave empty.

    Args:
        values: MaxText's keys; ``model_name`` is one of them.
    """
    sizes = {
        key: parse_override(key, value) if isinstance(value, str) else value
        for key, value in values.items()
        if key.removeprefix("base_") in _MODEL_KEYS
    }
    if sizes["model_name"] != "default":
        return {"override_model_config": True, **sizes}
    del sizes["model_name"]
    sizes = {**DEFAULT_MODEL, **sizes}
    if sizes["decoder_block"] == "mixtral" and "moe_mlp_dim" not in sizes:
        # Mixtral's experts have the MLP's width unless they have their own.
        sizes.setdefault("base_moe_mlp_dim", sizes["base_mlp_dim"])
    return sizes


def _flags(*given: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags and other words from texts, lists or objects, without shell quotes."""
    words = [word for flags in given for word in _words(flags)]
    bare = [word.replace("'", "").replace('"', "") for word in words]
    return (
        tuple(word for word in bare if word.startswith("--")),
        tuple(word for word in bare if word and not word.startswith("--")),
    )


def _words(flags: Any) -> Iterable[str]:
    if isinstance(flags, Mapping):
        return (f"--{str(name).lstrip('-')}={_text(value)}" for name, value in flags.items())
    return flags.split() if isinstance(flags, str) else map(str, flags)


def _target(run: Mapping[str, Any]) -> Target:
    hardware, slices = str(run["hardware"]), _number(run, "num_slices")
    generation, slice_of = generation_of(hardware), hardware.rpartition("-")[0]
    is_slice = not generation and bool(generation := generation_of(slice_of))  # v5e-8
    if not generation:
        devices = _number(run, "jax_devices") or _number(run, "chips")
        target = parse_target(hardware=hardware.lower(), devices=devices)
        return with_memory_fraction(target, _number(_environment(run), MEMORY_FRACTION, float))
    for given in (run.get("topology"), run.get("device_type"), hardware if is_slice else ""):
        if name := str(given or "").lower():  # 4x4x8, or a slice name
            is_shape = name[0].isdigit() and not any(map(str.isalpha, name.replace("x", "")))
            full = f"{generation}:{name}" if is_shape else name
            return parse_target(topology=full, slices=slices)
    chips = _number(run, "chips")
    if not chips:
        raise UserError("the run has neither topology, device_type nor chips; expected one of them")
    return parse_target(topology=slice_name(generation, chips // (slices or 1)), slices=slices)


def _number(run: Mapping[str, Any], key: str, kind: Any = int) -> Any:
    value = run.get(key)
    return None if value is None else typed(key, str(value), kind)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment(run: Mapping[str, Any]) -> Mapping[str, Any]:
    given = run.get("env") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"env of the run is {given!r}; expected a JSON object")
    return given


def _not_followed(run: Mapping[str, Any], target: Target, words: Sequence[str]) -> tuple[str, ...]:
    notes = [f"no flags of the compiler, left out: {' '.join(words)}"] if words else []
    unknown = [
        str(key)
        for key in run
        if run[key] is not None
        and key not in (*_GROUPS, *_SINGLE, *_REQUIRED, *_TABLES["known"])
        and not _is_setting(str(key), run[key])
        and not str(key).endswith(_MEASURED)
    ]
    if unknown:
        notes.append(
            f"not understood, ignored: {', '.join(unknown)}; expected MaxText's keys in other_flags"
        )
    of_gpus = (MEMORY_FRACTION, _PROFILES) if target.platform == "cuda" else ()
    followed = (*FLAG_VARIABLES[target.platform], *of_gpus)
    if unset := [name for name in _environment(run) if name not in followed]:
        notes.append(f"environment variables are not set: {', '.join(unset)}")
    if run.get("framework_commit_or_image"):
        notes.append(
            f"the run used {run['framework_commit_or_image']}; the plan, what is installed"
        )
    return tuple(notes)


def with_left_out(plan: Plan, run: MeasuredRun) -> Plan:
    """The plan, with the settings in its first line that the run leaves out, if they may be costly.

    The run may have had any settings in place of the defaults: the range begins at what the best
    of them would take.
    """
    step = plan.step_time_seconds
    if not step or not run.left_out:
        return plan
    saved = {name: may_save(plan, name, run) for name in run.left_out}
    share = sum(saved.values()) / step
    if share < _MATTERS:
        return plan
    span = plan.step_time_range
    if span:
        span = max(plan.step_time_bound_seconds or 0.0, span[0] * (1 - share)), span[1]
    named = tuple(name for name in run.left_out if saved[name])
    return replace(plan, left_out=named, left_out_share=share, step_time_range=span)


def with_doubts(plan: Plan, run: MeasuredRun) -> Plan:
    """The plan, with why the run may have been far from it, if that may be much, in its first line.

    A run fitted. MaxText's keys describe a part of another trainer's step. A loop that waits for
    each step's loss adds its own work; a plan has it if the trainer is named and was compared.
    """
    step, trainer = plan.step_time_seconds, run.trainer
    if step and not plan.fits:
        plan = plan.with_doubt("times of a program that does not fit, so no run had it")
    if not step or trainer == _OWN:
        return plan
    if trainer and not run.loop_seconds:
        longer = _TRAINERS.get(trainer, {}).get("longer")
        beside = f"; other runs of it took up to {percent(longer)} more" if longer else ""
        plan = plan.with_doubt(f"{trainer}'s step, by MaxText's keys alone{beside}", longer or 0.0)
    loop = _TRAINERS[_LOOP]["loop_seconds"]
    if run.loop_seconds or run.target.platform != "tpu" or loop < _MATTERS * step:
        return plan
    return plan.with_doubt(
        f"without the loop's own work, which takes {seconds_text(loop)} a step in {_LOOP}'s, "
        f"{percent(loop / step)} of this one",
        loop / step,
    )


def may_save(plan: Plan, left_out: str, run: MeasuredRun) -> float:
    """Seconds that the best setting in place of a default would save.

    Args:
        plan: the plan with the default.
        left_out: the setting.
        run: what is planned.
    """
    if left_out == REMAT_POLICY:
        return sum(op["seconds"] for op in plan.ops if op["phase"] == "rematerialized")
    if left_out == ATTENTION_BLOCKS:  # blocks of 2,048 have a sixteenth of the grid's steps
        return sum(op["seconds"] for op in plan.ops if "splash" in op["kind"]) / 2
    grouped = [op for op in plan.ops if EXPERTS in op["scope"] and op["kind"] == "matmul"]
    peak = (plan.model_flops or 0) / (plan.mfu or 1.0) / (plan.step_time_seconds or 1.0)
    chip = run.target.chip
    shares = Efficiencies()
    best = shares.tokamax_grouped_matmul if run.has_tokamax_experts else shares.grouped_matmul
    share = best * chip.clock_with(run.flags) / chip.default_clock
    at_best = sum(op["flops"] for op in grouped) / (share * peak or 1.0)
    return max(0.0, sum(op["seconds"] for op in grouped) - at_best)


def judged(plan: Plan, run: MeasuredRun) -> Plan:
    """The plan of the reference model's step, judged and annotated for MaxText's.

    MaxText's may need more memory for its loss. Where the reference model's fits only because the
    compiler recomputes matmuls, and this would not fit beside it, the run does not fit. A compiled
    attention kernel may need more than the run's, and prove neither.
    """
    plan = _without_partial_gradients(plan, run.partial_gradient_bytes)
    peak, limit = plan.memory_peak_bytes, plan.memory_limit_bytes
    if not (plan.fits and peak and limit):
        return plan
    more = run.loss_bytes
    if not _WORTH_SAYING * peak <= more <= limit:  # XLA recomputes more than that
        return plan
    is_over = peak + more > limit
    verdict = " and may then not fit" if is_over else ""
    is_own_shortage = run.partial_gradient_bytes < _WORTH_SAYING * peak
    if is_over and plan.is_short_of_memory and is_own_shortage:
        plan = replace(plan, fits=False)
        verdict = " and is taken not to fit, as the compiler already recomputes matmuls"
    return plan.with_notes(
        "the memory is that of the reference model's step; the loss of MaxText's may need up to "
        f"{more / 2**30:,.3g} GiB more{verdict}; maxtext_python=FILE plans it"
    )


def _without_partial_gradients(plan: Plan, held: float) -> Plan:
    """The plan with the run's kernel's memory, if the step fits with that alone.

    Args:
        plan: of the reference model's step.
        held: bytes that its attention kernel holds beyond the run's.
    """
    peak, limit = plan.memory_peak_bytes, plan.memory_limit_bytes
    if plan.fits or not (peak and limit and held) or not 0 < peak - held <= limit:
        return plan
    left = {**plan.memory, "temporaries": max(0, plan.memory.get("temporaries", 0) - round(held))}
    plan = replace(plan, fits=True, memory_peak_bytes=round(peak - held), memory=left)
    share = plan.time_by_cause.get("kernel", 0.0) / (plan.step_time_seconds or math.inf)
    return plan.with_doubt(
        f"with another kernel's attention, which does not fit where the run's does (kernels: "
        f"{percent(share)} of the step)"
    ).with_notes(
        f"the compiled attention kernel holds {held / 2**30:,.3g} GiB of queries' gradients that "
        "tokamax's with dq_reduction_steps=3 does not: without them the step fits"
    )
