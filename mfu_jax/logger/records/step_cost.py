"""The cost of one optimizer step on one device, and the rates that follow from its time.

Adding a metric: `StepRates.at`; on the console `format_step` and `format_short` of `sinks.console`,
in the rolling window `run_log.record_builder._WINDOW_NAMES`, in totals `Summary` and
`records.summary._MEANS` (a utilisation is also in `StepRates.optimal`); read back by `_NAMES` of
`runs.metrics.lines`; and a row in docs/metrics.md. One that does not follow from cost and time
belongs in `RecordBuilder.build`, or in a `Monitor`.

Impossible numbers, which no real step can have, are shown and marked with their likely causes
(`diagnose`), never clipped: a clipped MFU hides the mistake behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, SupportsFloat

from mfu_jax.errors import UserError
from mfu_jax.verdict import TOLERANCE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The work of one optimizer step on one JAX device, and the device's peaks.

    Attributes:
        model_flops_per_device: matmul FLOPs that the mathematics needs, without recomputation;
            None if unknown: no TFLOP/s, no MFU.
        tokens_per_device: tokens that one device processes; 0 if unknown: no tokens/s.
        peak_flops_per_sec: dense peak of one device in FLOP/s; None if unknown: no MFU, no HFU.
        executed_flops_per_device: matmul FLOPs that the compiled program runs; None: no HFU.
        hardware_flops_per_device: the executed FLOPs, and what their tiles and padding add on the
            device; None if not known.
        optimal_model_seconds: shortest time for the model FLOPs of a step that mixes dtypes (the
            sum over dtypes of FLOPs / peak); None: model FLOPs / peak.
        optimal_executed_seconds: the same for the executed FLOPs.
        removed_flops_per_device: model FLOPs that the compiler is known to have removed; the
            program may run that many fewer than the model has.
        xla_reported_flops: ``compiled.cost_analysis()["flops"]``, unchanged.
        bytes_per_device: bytes moved to and from device memory; with `peak_bytes_per_sec`, MBU.
        peak_bytes_per_sec: peak memory bandwidth of one device in bytes/s.

    Raises:
        UserError: an impossible number: negative, not finite, or a peak of zero.
    """

    model_flops_per_device: int | Fraction | None
    tokens_per_device: int | float = 0
    peak_flops_per_sec: float | None = None
    executed_flops_per_device: int | Fraction | None = None
    hardware_flops_per_device: int | Fraction | None = None
    optimal_model_seconds: float | None = None
    optimal_executed_seconds: float | None = None
    removed_flops_per_device: int | Fraction = 0
    xla_reported_flops: float | None = None
    bytes_per_device: int | None = None
    peak_bytes_per_sec: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            is_divisor = field.name.startswith(("peak", "optimal"))
            is_number = isinstance(value, SupportsFloat) and math.isfinite(value)
            if not is_number or value < 0 or (is_divisor and value == 0):
                raise UserError(
                    f"{field.name}={value!r} is impossible: expected a finite number "
                    f"{'above' if is_divisor else 'of at least'} 0",
                    hint="usually a wrong unit, or a lookup that failed; pass the number of "
                    "one device, or None if not known",
                )

    @property
    def model_seconds(self) -> float | None:
        """Shortest time in seconds in which one device could run the model FLOPs."""
        return self.optimal_model_seconds or _shortest(
            self.model_flops_per_device, self.peak_flops_per_sec
        )

    @property
    def executed_seconds(self) -> float | None:
        """Shortest time in seconds in which one device could run the executed FLOPs."""
        return self.optimal_executed_seconds or _shortest(
            self.executed_flops_per_device, self.peak_flops_per_sec
        )

    @property
    def memory_seconds(self) -> float | None:
        """Shortest time in seconds in which one device could move the bytes."""
        return _shortest(self.bytes_per_device, self.peak_bytes_per_sec)

    @property
    def tiles(self) -> float | None:
        """What the device runs / executed FLOPs: 1.4 if tiles add 40%; None if not known."""
        if self.hardware_flops_per_device is None or not self.executed_flops_per_device:
            return None
        return float(self.hardware_flops_per_device / Fraction(self.executed_flops_per_device))

    @property
    def runs_too_little(self) -> bool:
        """Whether the program runs fewer FLOPs than the model needs, without an explanation.

        Compares FLOPs, not utilisation: MFU and HFU may be relative to different dtypes' peaks.
        """
        executed, model = self.executed_flops_per_device, self.model_flops_per_device
        if executed is None or model is None:
            return False
        return 200 * executed < 199 * (model - self.removed_flops_per_device)  # TOLERANCE, exactly

    def over(self, steps: int | Fraction) -> StepCost:
        """The cost of each of `steps` steps that together cost this, exactly.

        >>> StepCost(model_flops_per_device=300, peak_flops_per_sec=1000.0).over(4)
        ... # doctest: +ELLIPSIS
        StepCost(model_flops_per_device=75, tokens_per_device=0, peak_flops_per_sec=1000.0, ...)
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        amounts = {n: v for n, v in values.items() if v and not n.startswith("peak")}
        return dataclasses.replace(self, **{n: _divided(v, steps) for n, v in amounts.items()})

    def rates(self, seconds: float) -> dict[str, float]:
        """All ``perf/`` scalars of a step that takes `seconds`, under MaxText's names.

        Utilisation is optimal time / measured time, which for one dtype is FLOPs / (time × peak).

        Args:
            seconds: the step's time; there are no rates if it is not above 0.

        >>> cost = StepCost(model_flops_per_device=300, executed_flops_per_device=400,
        ...                 peak_flops_per_sec=1000.0)
        >>> rates = cost.rates(0.5)
        >>> rates["perf/mfu"], rates["perf/hfu"]
        (0.6, 0.8)
        """
        return StepRates(self).at(seconds)


class StepRates:
    """The rates of many steps with one cost; exact fractions are divided once, not per step.

    Args:
        cost: the cost of each step.

    Attributes:
        amounts: ``perf/per_device_tflops`` (10¹²) and ``perf/per_device_tokens`` of a step, where
            known.
        optimal: name of a utilisation, such as ``perf/mfu`` → shortest seconds, where known.
        shortest_seconds: the longest of these times; infinite if the program runs too little.
        note: why MFU is above HFU, if the compiler's savings explain it; else empty.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        model, xla = cost.model_flops_per_device, cost.xla_reported_flops
        self.amounts: dict[str, float] = {}
        if model is not None:
            self.amounts["perf/per_device_tflops"] = float(model) / 1e12
        if cost.tokens_per_device:
            self.amounts["perf/per_device_tokens"] = _plain(cost.tokens_per_device)
        known = {
            "perf/mfu": cost.model_seconds,
            "perf/hfu": cost.executed_seconds,
            "perf/mbu": cost.memory_seconds,
        }
        self.optimal = optimal = {name: best for name, best in known.items() if best is not None}
        self._xla = {} if xla is None else {"perf/xla_reported_tflops": float(xla) / 1e12}
        self.note = "" if cost.runs_too_little else _note_on_savings(cost)
        # A step that took longer is possible, as most are.
        self.shortest_seconds = math.inf if cost.runs_too_little else max([0.0, *optimal.values()])

    def may_take(self, seconds: float) -> bool:
        """False if a step of `seconds` may have an impossible number; see `diagnose`."""
        return seconds > self.shortest_seconds

    def at(self, seconds: float) -> dict[str, float]:
        """See `StepCost.rates`."""
        scalars = {"perf/step_time_seconds": seconds}
        for name, amount in self.amounts.items():
            scalars[name] = amount
            if seconds > 0:
                scalars[f"{name}_per_sec"] = amount / seconds
        if seconds > 0:
            for name, best in self.optimal.items():
                scalars[name] = best / seconds
        if self._xla:
            scalars.update(self._xla)
        return scalars


def _note_on_savings(cost: StepCost) -> str:
    executed, model = cost.executed_flops_per_device, cost.model_flops_per_device
    if executed is None or not model or not cost.removed_flops_per_device:
        return ""
    runs, saved = float(executed / Fraction(model)), cost.removed_flops_per_device / Fraction(model)
    if runs > 1 - TOLERANCE:
        return ""
    return (
        f"MFU is above HFU: the program runs {runs:.1%} of the model's FLOPs, because the compiler "
        f"saves {float(saved):.1%}; usually shards or processes do the same work on the same data, "
        f"which it merges; the FLOPs ledger names that work"
    )


def _shortest(work: int | Fraction | None, peak: float | None) -> float | None:
    """Seconds; None if either is unknown."""
    return None if work is None or peak is None else float(work / Fraction(peak))


def _divided(amount: float | Fraction, parts: int | Fraction) -> Any:
    """An exact amount stays exact."""
    if isinstance(amount, float):
        return float(amount / parts)
    exact = Fraction(amount) / parts
    return exact.numerator if exact.denominator == 1 else exact


def _plain(number: float) -> int | float:
    return number if isinstance(number, int) else float(number)


def add_costs(costs: Iterable[StepCost]) -> StepCost:
    """The cost of several programs run one after the other on one device.

    A field that is unknown in any of them is unknown in the sum.

    >>> one = StepCost(model_flops_per_device=300, peak_flops_per_sec=1000.0)
    >>> add_costs([one, one, one]).model_flops_per_device
    900
    """
    parts = list(costs)
    if len(parts) == 1:
        return parts[0]

    def total(field: str) -> Any:
        values = [getattr(part, field) for part in parts]
        return None if None in values else sum(values)

    names = [field.name for field in dataclasses.fields(StepCost)]
    same_peak = len({part.peak_flops_per_sec for part in parts}) == 1
    return StepCost(
        **{name: total(name) for name in names if not name.startswith(("peak", "optimal"))},
        peak_flops_per_sec=parts[0].peak_flops_per_sec if same_peak else None,
        optimal_model_seconds=total("model_seconds") or None,
        optimal_executed_seconds=total("executed_seconds") or None,
        peak_bytes_per_sec=parts[0].peak_bytes_per_sec,
    )


def diagnose(cost: StepCost, scalars: Mapping[str, float]) -> dict[str, str]:
    """The impossible numbers of one step; most steps have none (`StepRates.may_take`).

    Args:
        cost: the step's work and the device's peaks.
        scalars: the ``perf/`` scalars of the step.

    Returns:
        Flag, which names it in records → its likely causes.
    """
    seconds = scalars["perf/step_time_seconds"]
    if seconds <= 0:
        return {
            "step_time_not_positive": f"the step took {seconds} s; a step takes time; usually "
            f"record() was given the outputs of an earlier step, or the clock stands still"
        }
    findings = {}
    mfu, hfu, mbu = (scalars.get(f"perf/{name}", 0.0) for name in ("mfu", "hfu", "mbu"))
    limit = 1 + TOLERANCE
    if hfu > limit:
        findings["hfu_over_1"] = _too_fast("HFU", hfu, seconds, cost)
    elif mfu > limit:
        findings["mfu_over_1"] = _too_fast("MFU", mfu, seconds, cost)
    if "perf/mfu" in scalars and "perf/hfu" in scalars and cost.runs_too_little:
        findings["hfu_below_mfu"] = _too_little(mfu, hfu, cost)
    if mbu > limit:
        findings["mbu_over_1"] = (
            f"MBU {mbu:.1%} is over 100%; usually bytes that stay in caches or fused values were "
            f"counted as memory traffic, or the bandwidth is of another device"
        )
    return findings


def _too_little(mfu: float, hfu: float, cost: StepCost) -> str:
    executed, model = cost.executed_flops_per_device or 0, cost.model_flops_per_device or 1
    share = float(Fraction(executed) / model)
    return (
        f"HFU {hfu:.1%}, MFU {mfu:.1%}: the program runs {share:.3g} × the model's FLOPs, though "
        f"it must run at least all of them; usually the model count takes attention pairs that the "
        f"kernel skips (convention=dense, or maxtext with a kernel that skips masked blocks), a "
        f"custom kernel has no FLOP count (see the unaccounted list), XLA merges work that shards "
        f"or processes do twice (the ledger's unexplained), or one of the two is of the whole job "
        f"and the other of one device"
    )


def _too_fast(name: str, value: float, seconds: float, cost: StepCost) -> str:
    causes = [
        "the peak is that of a lower precision (f32 where the matmuls run in bf16 or fp8), or of "
        "half a chip",
        "the FLOPs or tokens are of the whole job, not of one device",
        "the step was not waited for (record() was given outputs that it does not compute)",
    ]
    if name == "MFU" and cost.executed_flops_per_device is not None:
        # The hardware's own count is possible, so the peak and the clock are most likely right.
        causes = [
            "the model FLOPs are too high: of the whole job, or of attention pairs that the mask "
            "drops (convention=dense)",
            *causes[:1],
        ]
    elif value > 2:  # few peaks are wrong by that much
        causes = [causes[1], causes[2], causes[0]]
    return (
        f"{name} {value:.1%} is over 100%: {seconds:.6g} s is shorter than the "
        f"{value * seconds:.6g} s that the peak allows; usually {'; or '.join(causes)}; check the "
        f"FLOPs and set peak_tflops_per_device, or measure it with mfu-jax hardware --calibrate"
    )
