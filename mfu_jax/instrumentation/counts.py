"""Cost of one call of a compiled step on one device: all its counts, and the peaks to divide by.

Shared by the reference trainer, `instrument`, and `MetricLogger.from_flags`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import jax

from mfu_jax.dumps.program import ModelFlops
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.names import LORA_A, LORA_B
from mfu_jax.flops.count import KernelRuns
from mfu_jax.flops.exact import integral
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.traced.counting import TracedCount, count_with_scopes, pallas_kernel_flops
from mfu_jax.flops.traced.masks.declared import PACKED
from mfu_jax.hardware.dtypes import canonical_dtype
from mfu_jax.hardware.step_peaks import Exact, StepPeaks
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.util.formatting import counted

if TYPE_CHECKING:
    from mfu_jax.flops.analytic.conventions import FlopsRow
    from mfu_jax.flops.executed.counting import HasText
    from mfu_jax.flops.executed.resharding.resharded_tensor import ReshardedTensor
    from mfu_jax.flops.executed.result import ExecutedCount
    from mfu_jax.flops.ledger import Ledger

_log = logging.getLogger("mfu_jax")
_WIDE = {"fp32", "fp64"}  # dtypes to which compilers widen narrower ones


def unwrap_compiled(compiled: Any) -> jax.stages.Compiled:
    """JAX's own `Compiled`, unwrapped from Flax's or Equinox's wrapper."""
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


def xla_reported_flops(compiled: Any) -> float | None:
    """``compiled.cost_analysis()["flops"]``, unchanged; None if absent."""
    analysis: Any = compiled.cost_analysis()
    return analysis.get("flops") if analysis else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCount(ModelFlops):
    """Model FLOPs of one step on one device, and where they come from.

    The convention of a value is ``as given``. If traced, `attention` is all products of
    activations.

    Attributes:
        tokens_per_device: tokens of one step on one device, if the source knows them.
        packed: the part of `per_device` that attention within packed documents would take with all
            pairs, by kind of mask as declared with `attention_mask`.
        complex_products: the part of `per_device` that is products of complex numbers.
        checkpointed: FLOPs that `jax.checkpoint` adds to it in a traced step.
        flops_by_dtype: FLOPs of the step's matmuls, to find the peak; any scale.
        unaccounted: work that could not be counted, in words.
        note: what the user should know of a number that may be too high; empty: nothing.
        how: the number's derivation in words, for the log.
    """

    tokens_per_device: int | float = 0
    packed: Mapping[str, Exact] = dataclasses.field(default_factory=dict)
    complex_products: Exact = 0
    checkpointed: Exact = 0
    flops_by_dtype: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unaccounted: tuple[str, ...] = ()
    note: str = ""
    how: str = ""

    def times(self, factor: Fraction) -> ModelCount:
        """The FLOPs and tokens of several such steps, or of a part of one."""
        if factor == 1:
            return self
        names = ("per_device", "dense", "attention")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        tokens = float(factor * Fraction(self.tokens_per_device))
        scaled: dict[str, Any] = {name: integral(factor * n) for name, n in known.items()}
        return dataclasses.replace(self, tokens_per_device=tokens, **scaled)


def traced_model(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    devices: int,
    convention: str = "maxtext",
    lengths: Lengths = NO_LENGTHS,
) -> ModelCount:
    """Counts ``step(*args, **kwargs)`` on its jaxpr, over all devices, and divides by them.

    Args:
        step: a jitted or plain function.
        args: arrays, donated or not, or `jax.ShapeDtypeStruct`s; trees of them.
        kwargs: the same by name.
        devices: number in the whole job; each gets an equal share, as an exact fraction.
        convention: ``maxtext``, ``exact`` or ``dense``, for recognised or declared masks.
        lengths: of groups and sequences, if they depend on data.

    Raises:
        UserError: the function cannot be traced, or the convention needs a config.
    """
    count, _ = count_with_scopes(step, args, kwargs, lengths)
    kinds = [k for k in PACKED if k in count.by_mask and convention != "dense"]
    all_pairs = ", with all pairs of packed documents" if kinds else ""
    return ModelCount.traced(
        count,
        devices,
        convention,
        packed={k: _share(count.by_mask[k], devices) for k in kinds},
        complex_products=_share(count.complex_products, devices),
        checkpointed=_share(count.rematerialized, devices),
        flops_by_dtype=count.by_dtype,
        unaccounted=tuple(
            f"{item.name} {item.where} {item.shapes}: {item.reason}" for item in count.unaccounted
        ),
        note="" if convention == "dense" else _note_on_masks(count),
        how=f"traced: {count.total_in(convention):,} FLOPs over {counted(devices, 'device')}"  # type: ignore[arg-type]
        + all_pairs,
    )


def _note_on_masks(count: TracedCount) -> str:
    if not count.unknown_masks:
        return ""
    return (
        f"{count.unknown_masks / count.total:.1%} of the model FLOPs are attention under a mask "
        f"that depends on data or is not recognised, with every pair counted: if it drops pairs, "
        f'MFU is too high; with mfu_jax.attention_mask("causal"): around that attention declares '
        f"a causal one (docs/masks.md)"
    )


def analytic_model(config: Any, *, convention: str = "maxtext") -> ModelCount:
    """Counts a step from its config, which specifies the work of one device.

    Args:
        config: what `mfu_jax.calculate_tflops_per_device` takes: a config, a mapping, or the name
            or file of a model.
        convention: any of the conventions.
    """
    from mfu_jax.flops.analytic.totals import calculate_tokens_per_device, flops_breakdown

    tokens = calculate_tokens_per_device(config)
    rows = flops_breakdown(config, convention)
    attention = sum(row.training_flops for row in rows if row.has_pairs)
    return ModelCount(
        per_device=integral(sum(row.training_flops for row in rows)),
        convention=convention,
        tokens_per_device=float(tokens),
        dense=integral(sum(row.training_flops for row in flops_breakdown(config, "dense"))),
        attention=integral(attention),
        flops_by_dtype=_config_dtypes(config, rows),
        how=f"analytic: {tokens} tokens per device",
    )


# MaxText's recipes for quantised training → the dtype of their matmuls.
_QUANTIZED = {
    "int8": "int8",
    **dict.fromkeys(("fp8", "fp8_e5m2", "fp8_full", "fp8_gpu", "fp8_nanoo", "nanoo_fp8"), "fp8"),
}
# Weights that these recipes do not quantise: convolutions, grouped matrices, adapters.
_NOT_QUANTIZED = ("conv", "o_a", LORA_A, LORA_B)


def _config_dtypes(config: Any, rows: Sequence[FlopsRow]) -> Mapping[str, int]:
    """FLOPs of a config's matmuls by dtype, if it states one.

    Quantised training narrows the matmuls with weights in the decoder's layers.
    """
    dtype = _text(config, "dtype")
    narrow = _QUANTIZED.get(_text(config, "quantization"), "")
    if not dtype or not narrow:
        return {dtype: 1} if dtype else {}
    found = dict.fromkeys((narrow, dtype), 0)
    for row in rows:
        last = row.component.rpartition("/")[2]
        is_narrow = row.kind == "weight" and "layers" in row.layer and last not in _NOT_QUANTIZED
        found[narrow if is_narrow else dtype] += round(row.training_flops)
    return found


def _text(config: Any, key: str) -> str:
    """A string value of a config; empty if absent."""
    found = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return found if isinstance(found, str) else ""


def given_model(flops_per_device: Exact) -> ModelCount:
    """The user's own number."""
    return ModelCount(per_device=flops_per_device, convention="as given", how="as given")


def kernel_flops_of(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: jax.Device
) -> KernelRuns:
    """FLOPs of one run of each Pallas kernel; empty on CPUs, where none is a custom call."""
    if device.platform == "cpu":
        return {}
    return pallas_kernel_flops(step, *args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The FLOPs of one step on one device: counted, reported by XLA, and compared.

    Attributes:
        model: what the model needs.
        executed: what the program runs.
        xla_reported: ``cost_analysis()["flops"]``; None if absent.
        ledger: how the first leads to the second.
        resharded: tensors that the partitioner moves or replicates without need.
    """

    model: ModelCount
    executed: ExecutedCount
    xla_reported: float | None
    ledger: Ledger
    resharded: tuple[ReshardedTensor, ...] = ()

    def __str__(self) -> str:
        return f"model FLOPs {self.model.how}\n{self.ledger}"

    def __repr__(self) -> str:
        return (
            f"StepFlops(model={float(self.model.per_device):.6g}, "
            f"executed={self.executed.total:_}, xla_reported={self.xla_reported})"
        )

    @property
    def timed_by_dtype(self) -> Mapping[str, int]:
        """FLOPs by dtype, for the dtypes whose peaks apply to the executed FLOPs.

        Dtypes are the program's, unless the compiler widened one of the model's: XLA runs bf16
        matmuls as float32 on CPUs. Then they are the model's, so that equal FLOPs give equal
        utilisation.
        """
        model = {_short(dtype) for dtype, flops in self.model.flops_by_dtype.items() if flops}
        program = {_short(dtype) for dtype, flops in self.executed.by_dtype.items() if flops}
        is_widened = bool(model - program) and bool(program & _WIDE)
        return self.model.flops_by_dtype if is_widened else self.executed.by_dtype

    def cost(self, peaks: StepPeaks | None, *, tokens_per_device: int | float) -> StepCost:
        """The step's cost, as `MetricLogger.record` accepts it."""
        executed, optimal = self.executed.total, None
        if peaks is not None:
            optimal = peaks.optimal_seconds(executed, self.timed_by_dtype)
        return dataclasses.replace(
            model_cost(self.model, peaks, tokens_per_device=tokens_per_device),
            executed_flops_per_device=executed,
            hardware_flops_per_device=self.executed.on_hardware,
            optimal_executed_seconds=optimal,
            removed_flops_per_device=self.ledger.removed,
            xla_reported_flops=self.xla_reported,
            bytes_per_device=self.executed.hbm_bytes,
            peak_bytes_per_sec=None if peaks is None else peaks.bytes_per_sec,
        )


def count_program(
    compiled: HasText,
    model: ModelCount,
    *,
    kernel_flops: KernelRuns | None = None,
    trip_counts: Mapping[str, int] | None = None,
    lengths: Lengths = NO_LENGTHS,
    unit: Literal["step", "call"] = "step",
) -> StepFlops:
    """Counts a compiled step and explains the count, starting from the model FLOPs.

    Args:
        compiled: the program.
        model: the model FLOPs of the same step.
        kernel_flops: see `executed_flops`, also for `trip_counts`.
        trip_counts: iterations of loops that depend on data.
        lengths: of groups and sequences that depend on data.
        unit: what one run of the program is, for the ledger.
    """
    # Imported by the thread that counts, during the first step: a third of the start-up's modules.
    from mfu_jax.flops.executed.counting import counter_of
    from mfu_jax.flops.executed.mesh_axes import mesh_of
    from mfu_jax.flops.executed.resharding.findings import resharded_tensors
    from mfu_jax.flops.ledger import compare_flops

    counter = counter_of(
        compiled, kernel_flops=kernel_flops or None, trip_counts=trip_counts, lengths=lengths
    )
    executed = counter.count()
    reported = xla_reported_flops(compiled)
    is_whole = model.is_whole and not executed.unaccounted
    ledger = compare_flops(
        **dataclasses.replace(model, is_whole=is_whole).ledger_arguments,
        executed=executed,
        xla_reported=reported,
        unaccounted=model.unaccounted,
        complex_products=model.complex_products,
        checkpointed=model.checkpointed,
    )
    ledger = dataclasses.replace(ledger, unit=unit)
    return StepFlops(
        model=model,
        executed=executed,
        xla_reported=reported,
        ledger=ledger,
        resharded=resharded_tensors(counter, mesh_of(compiled)),
    )


def warn_of_resharding(flops: StepFlops) -> None:
    """Logs what the partitioner of a step moves or replicates without need."""
    if flops.resharded:
        from mfu_jax.flops.executed.resharding.resharded_tensor import warnings_of

        for line in warnings_of(flops.resharded):
            _log.warning("%s", line)


def model_cost(
    model: ModelCount | None, peaks: StepPeaks | None, *, tokens_per_device: int | float
) -> StepCost:
    """The cost of a step whose program is not counted yet; None marks the unknown."""
    if model is None:
        return StepCost(model_flops_per_device=None, tokens_per_device=tokens_per_device)
    cost = StepCost(model_flops_per_device=model.per_device, tokens_per_device=tokens_per_device)
    if peaks is None:
        return cost
    return dataclasses.replace(
        cost,
        peak_flops_per_sec=peaks.main.flops_per_sec,
        optimal_model_seconds=peaks.optimal_seconds(model.per_device, model.flops_by_dtype),
    )


def _short(dtype: str) -> str:
    """``bf16`` for ``bfloat16``; a dtype without a known peak is returned unchanged."""
    try:
        return canonical_dtype(dtype)
    except UserError:
        return dtype


def _share(total: int, devices: int) -> Exact:
    return integral(Fraction(total, devices))
