"""What one call of a compiled step costs one device: every count of it, and the peaks to divide by.

Used by whoever has a step: the reference trainer, `instrument`, and `MetricLogger.from_flags`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

import jax

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.flops.comparison import Ledger, compare_flops
from mfu_jax.flops.executed import ExecutedCount, executed_flops
from mfu_jax.flops.pairs import integral
from mfu_jax.flops.traced import TracedCount, count_model_flops, pallas_kernel_flops
from mfu_jax.hardware import Peak
from mfu_jax.step_cost import StepCost

HfuSource = Literal["executed", "cost_analysis"]
Exact = int | Fraction


def unwrap_compiled(compiled: Any) -> jax.stages.Compiled:
    """JAX's own `Compiled` from what Flax's or Equinox's jit made of it."""
    while not isinstance(compiled, jax.stages.Compiled) and hasattr(compiled, "compiled"):
        compiled = compiled.compiled
    return compiled


def compiled_devices(compiled: jax.stages.Compiled) -> tuple[int, jax.Device]:
    """How many devices of the whole job a program runs on, and one of them."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if not shardings:
        return 1, jax.local_devices()[0]
    local = sorted(shardings[0].addressable_devices, key=lambda device: device.id)
    return shardings[0].num_devices, local[0]


def find_peak(
    device: jax.Device,
    dtype: object,
    *,
    peak_tflops_per_device: float | None = None,
    hardware_name: str | None = None,
) -> Peak:
    """The dense peak of `device` for matmuls of `dtype`: flag, table, or measured on CPUs.

    Raises:
        UserError: the chip is in no table and no override is given.
    """
    return hardware.resolve_peak(
        device.device_kind,
        dtype,
        peak_tflops_per_device=peak_tflops_per_device or None,
        hardware=hardware_name or None,
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        compute_capability=getattr(device, "compute_capability", None),
    )


def xla_reported_flops(compiled: Any) -> float | None:
    """``compiled.cost_analysis()["flops"]`` as it is, or None where there is none."""
    analysis: Any = compiled.cost_analysis()
    return analysis.get("flops") if analysis else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCount:
    """Model FLOPs of one step on one device, and where they come from.

    Attributes:
        per_device: matmul FLOPs by `convention`.
        source: ``traced``, ``analytic`` or ``value``.
        convention: how attention pairs are counted; ``as given`` for a value.
        tokens_per_device: tokens of one step on one device, where the source knows them.
        dense: the same FLOPs with all attention pairs, None where not known.
        attention: the part of `per_device` between activations, None where not known.
        flops_by_dtype: what the step's matmuls are, to find the peak; any scale.
        unaccounted: what the count does not know, in words.
        how: the number's derivation in words, for the log.
    """

    per_device: Exact
    source: str
    convention: str
    tokens_per_device: int | float = 0
    dense: Exact | None = None
    attention: Exact | None = None
    flops_by_dtype: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unaccounted: tuple[str, ...] = ()
    how: str = ""


def traced_model(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    devices: int,
    convention: str = "maxtext",
) -> ModelCount:
    """Counts ``step(*args, **kwargs)`` on its jaxpr, which is of all devices, and divides.

    Args:
        step: a jitted or plain function.
        args: arrays, donated ones too, or `jax.ShapeDtypeStruct`s; trees of them.
        kwargs: the same by name.
        devices: of the whole job; every device gets an equal share, as an exact fraction.
        convention: ``maxtext``, ``exact`` or ``dense``, for the masks that are seen or told.

    Raises:
        UserError: the function cannot be traced, or the convention needs a config.
    """
    count: TracedCount = count_model_flops(step, *args, **kwargs)
    total = count.total_in(convention)  # type: ignore[arg-type]  # it says what is allowed
    skipped = count.total - total
    return ModelCount(
        per_device=_share(total, devices),
        source="traced",
        convention=convention,
        dense=_share(count.total, devices),
        attention=_share(count.activations - skipped, devices),
        flops_by_dtype=count.by_dtype,
        unaccounted=tuple(
            f"{item.name} {item.where} {item.shapes}: {item.reason}" for item in count.unaccounted
        ),
        how=f"traced: {total:,} FLOPs over {devices} device{'s' * (devices > 1)}",
    )


def analytic_model(config: Any, *, convention: str = "maxtext") -> ModelCount:
    """Counts a step from its config, which says what one device gets.

    Args:
        config: what `mfu_jax.calculate_tflops_per_device` takes: a config, a mapping, or the name
            or file of a model.
        convention: any of the conventions.
    """
    from mfu_jax.flops.analytic import calculate_tokens_per_device, flops_breakdown

    tokens = calculate_tokens_per_device(config)
    rows = flops_breakdown(config, convention)
    attention = sum(row.training_flops for row in rows if row.kind == "attention")
    return ModelCount(
        per_device=integral(sum(row.training_flops for row in rows)),
        source="analytic",
        convention=convention,
        tokens_per_device=float(tokens),
        dense=integral(sum(row.training_flops for row in flops_breakdown(config, "dense"))),
        attention=integral(attention),
        how=f"analytic: {tokens} tokens per device",
    )


def given_model(flops_per_device: Exact) -> ModelCount:
    """The user's own number."""
    return ModelCount(
        per_device=flops_per_device, source="value", convention="as given", how="as given"
    )


def kernel_flops_of(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: jax.Device
) -> Mapping[str, int]:
    """FLOPs of one run of each Pallas kernel; empty on CPUs, where kernels are no custom calls."""
    if device.platform == "cpu":
        return {}
    return pallas_kernel_flops(step, *args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Peaks of one device by the dtypes of a step's matmuls.

    Attributes:
        main: of the dtype with most FLOPs.
        by_dtype: dtype as counted → peak in FLOP/s.
        bytes_per_sec: memory bandwidth, None where no table has it.
        notes: what was chosen for want of a number.
    """

    main: Peak
    by_dtype: Mapping[str, float]
    bytes_per_sec: float | None
    notes: tuple[str, ...] = ()

    def optimal_seconds(self, flops: Exact, flops_by_dtype: Mapping[str, int]) -> float | None:
        """Shortest time for `flops`, mixed of dtypes as `flops_by_dtype` is; None for one dtype."""
        whole = sum(flops_by_dtype.values())
        if not whole or len({self.by_dtype[dtype] for dtype in flops_by_dtype}) < 2:
            return None
        mixed = sum(n / Fraction(self.by_dtype[dtype]) for dtype, n in flops_by_dtype.items())
        return float(mixed * flops / whole)


def find_peaks(
    device: jax.Device,
    flops_by_dtype: Mapping[str, int],
    *,
    peak_tflops_per_device: float | None = None,
    hardware_name: str | None = None,
) -> StepPeaks:
    """The peaks that a step with these matmuls is measured against.

    Raises:
        UserError: the dtype of most FLOPs has no known peak.
    """
    counted = {dtype: flops for dtype, flops in flops_by_dtype.items() if flops} or {"f32": 0}
    ordered = sorted(counted, key=lambda dtype: -counted[dtype])
    if peak_tflops_per_device:
        main = hardware.resolve_peak(None, "fp32", peak_tflops_per_device=peak_tflops_per_device)
        main = dataclasses.replace(main, dtype=ordered[0])
        return StepPeaks(
            main=main,
            by_dtype=dict.fromkeys(flops_by_dtype, main.flops_per_sec),
            bytes_per_sec=_bandwidth(device, hardware_name),
        )
    main = find_peak(device, ordered[0], hardware_name=hardware_name)
    by_dtype = dict.fromkeys(flops_by_dtype, main.flops_per_sec)
    notes = []
    for dtype in ordered[1:]:
        try:
            by_dtype[dtype] = find_peak(device, dtype, hardware_name=hardware_name).flops_per_sec
        except UserError as error:
            notes.append(f"{counted[dtype]:,} FLOPs in {dtype} are set at {main}: {error}")
    return StepPeaks(
        main=main,
        by_dtype=by_dtype,
        bytes_per_sec=_bandwidth(device, hardware_name),
        notes=tuple(notes),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The FLOPs of one step on one device: counted, reported by XLA, and set against each other."""

    model: ModelCount
    executed: ExecutedCount
    xla_reported: float | None
    ledger: Ledger

    def cost(
        self, peaks: StepPeaks, *, tokens_per_device: int | float, hfu_source: HfuSource
    ) -> StepCost:
        """What `MetricLogger.record` takes."""
        executed: Exact | None = self.executed.total
        by_dtype = self.executed.by_dtype
        if hfu_source == "cost_analysis":
            executed = None if self.xla_reported is None else round(self.xla_reported)
        optimal = None
        if executed is not None and set(by_dtype) <= set(peaks.by_dtype):
            optimal = peaks.optimal_seconds(executed, by_dtype)
        return dataclasses.replace(
            model_cost(self.model, peaks, tokens_per_device=tokens_per_device),
            executed_flops_per_device=executed,
            optimal_executed_seconds=optimal,
            xla_reported_flops=self.xla_reported,
            bytes_per_device=self.executed.hbm_bytes,
            peak_bytes_per_sec=peaks.bytes_per_sec,
        )


def count_program(
    compiled: jax.stages.Compiled,
    model: ModelCount,
    *,
    kernel_flops: Mapping[str, int] | None = None,
) -> StepFlops:
    """Counts a compiled step and explains the count, from the model's FLOPs on."""
    executed = executed_flops(compiled, kernel_flops=kernel_flops or None)
    reported = xla_reported_flops(compiled)
    ledger = compare_flops(
        model=model.per_device,
        dense=model.dense,
        attention=model.attention,
        convention=model.convention,
        executed=executed,
        xla_reported=reported,
    )
    return StepFlops(model=model, executed=executed, xla_reported=reported, ledger=ledger)


def model_cost(model: ModelCount, peaks: StepPeaks, *, tokens_per_device: int | float) -> StepCost:
    """The cost of a step whose program is not counted yet."""
    return StepCost(
        model_flops_per_device=model.per_device,
        tokens_per_device=tokens_per_device,
        peak_flops_per_sec=peaks.main.flops_per_sec,
        optimal_model_seconds=peaks.optimal_seconds(model.per_device, model.flops_by_dtype),
    )


def _share(total: int, devices: int) -> Exact:
    return integral(Fraction(total, devices))


def _bandwidth(device: jax.Device, hardware_name: str | None) -> float | None:
    try:
        if hardware_name and hardware_name != hardware.CALIBRATE:
            chip = hardware.named(hardware_name)
        else:
            chip = hardware.lookup(device.device_kind, getattr(device, "compute_capability", None))
    except UserError:  # no MBU then; the peak is what has to be known
        return None
    return chip.memory_bandwidth_bytes_per_sec
