"""Published MFUs, throughputs and FLOP counts, recomputed from the config and the measurement.

``published.yml`` holds the rows. A number is reproduced if the recomputed one is within half a unit
of its last printed digit. Differences that rounded measurements explain have their own status.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.conventions import CONVENTIONS
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import flops_breakdown
from mfu_jax.hardware.chips import named
from mfu_jax.util.yaml_files import read_mapping
from mfu_jax.verdict import LikeRuns

_FILE = Path(__file__).with_name("published.yml")
_CLASS = 3.0  # FLOPs per token of models of one class differ by less

Status = Literal["reproduces", "within input rounding", "differs"]


class _RoundedValue(NamedTuple):
    """A number and the relative error that its printed rounding allows."""

    value: float
    rounding: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published run: a row of published.yml."""

    id: str
    config: Mapping[str, Any]
    hardware: str
    dtype: str
    devices: int
    peak_tflops: float
    convention: str
    source: str
    checks: tuple[Mapping[str, Any], ...]
    parameters: float = 0.0
    tokens_per_step: float = 0.0
    throughput: Mapping[str, float] | None = None
    step_time: Mapping[str, float] | None = None
    tflops_per_sec_per_device: float = 0.0
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the speed in tokens is published."""
        return bool(self.throughput or self.step_time)

    @property
    def dtype_bits(self) -> int:
        """Width of the dtype of its matmuls, which the peak is of."""
        return 8 if "8" in self.dtype else 16

    def flops_per_token(self, convention: str) -> float:
        """Model FLOPs per token as a convention counts them; ``maxtext`` for an unknown one."""
        convention = convention if convention in CONVENTIONS else "maxtext"
        return sum(_per_token(self.config, convention).values())

    def mfu(self, convention: str, peak_flops_per_sec: float) -> float:
        """MFU in another convention, relative to another peak of one device."""
        return self.rate.value * self.flops_per_token(convention) / peak_flops_per_sec

    @functools.cached_property
    def weight_flops_per_token(self) -> float:
        """6 × the weights used in matmuls, output head included."""
        return _per_token(self.config, "dense")["weight"]

    @functools.cached_property
    def attention_flops_per_token(self) -> float:
        """Scores and their product with the values over all S² pairs: 12·L·H·Q·T where uniform."""
        return _per_token(self.config, "dense")["attention"]

    @property
    def causal_attention_flops_per_token(self) -> float:
        """The same with S²/2 pairs."""
        return _per_token(self.config, "maxtext")["attention"]

    @property
    def embedding_parameters(self) -> float:
        """Rows × width of one vocabulary table."""
        return float(self.config["vocab_size"] * self.config["emb_dim"])

    @property
    def rate(self) -> _RoundedValue:
        """Tokens per second per device: as published, else from the step time."""
        given = dict(self.throughput or {})
        if not given:
            return self.rate_by_step_time
        half_ulp = given.pop("half_ulp")
        ((name, printed),) = given.items()
        divisor = {
            "tokens_per_sec_per_device": 1,
            "tokens_per_sec": self.devices,
            "tokens_per_day": 86400 * self.devices,
        }[name]
        return _RoundedValue(printed / divisor, half_ulp / printed)

    @property
    def rate_by_step_time(self) -> _RoundedValue:
        """Tokens per second per device from the printed step time."""
        step = self.step_time or {}
        value = self.tokens_per_step / step["seconds"] / self.devices
        return _RoundedValue(value, step["half_ulp"] / step["seconds"])


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """A published number and its recomputation, in the published unit."""

    run: PublishedRun
    quantity: str
    published: float
    recomputed: float
    half_ulp: float
    status: Status
    why: str

    @property
    def relative_difference(self) -> float:
        """(recomputed − published) / published."""
        return self.recomputed / self.published - 1


# FLOPs per token as publishers count them. N is their stated parameter count.
FORMULAS: Mapping[str, Callable[[PublishedRun], float]] = {
    # Kaplan et al. 2020: no attention
    "6n": lambda run: 6 * run.parameters,
    # Chowdhery et al. 2022, appendix B: 6N + 12·L·H·Q·T
    "palm": lambda run: 6 * run.parameters + run.attention_flops_per_token,
    # ibid.: all attention forward FLOPs and 75 % of the others are recomputed
    "palm_remat": lambda run: (
        6 * run.parameters * (1 + 0.75 / 3) + run.attention_flops_per_token * 4 / 3
    ),
    # MosaicML: one more forward pass with activation checkpointing
    "palm_full_remat": lambda run: 4 / 3 * FORMULAS["palm"](run),
    # torchtitan: the input embedding is a lookup
    "palm_without_embedding": lambda run: (
        6 * (run.parameters - run.embedding_parameters) + run.attention_flops_per_token
    ),
    # every matmul of the model, all attention pairs; Megatron's 72·B·L·s·h²·(1 + s/6h + V/12hL)
    "matmuls": lambda run: run.weight_flops_per_token + run.attention_flops_per_token,
    # the same with half of the pairs: MaxText and Megatron today
    "matmuls_causal": lambda run: run.weight_flops_per_token + run.causal_attention_flops_per_token,
    # Korthikanti et al. 2022, eq. 8: s/3h where eq. 7 has s/6h
    "megatron_selective": lambda run: (
        run.weight_flops_per_token + 2 * run.attention_flops_per_token
    ),
    # axlearn: 6N with both tables and without attention
    "6n_matmul_and_embedding": lambda run: (
        run.weight_flops_per_token + 6 * run.embedding_parameters
    ),
}


def _scaled(rate: _RoundedValue, factor: float) -> _RoundedValue:
    return _RoundedValue(rate.value * factor, rate.rounding)


# Each published quantity, from the run, the formula's FLOPs per token, and the check itself.
VALUES: Mapping[str, Callable[[PublishedRun, float, Mapping[str, Any]], _RoundedValue]] = {
    "utilisation_percent": lambda run, flops, _: _scaled(run.rate, 100 * flops / _peak(run)),
    "percent_of_peak": lambda run, *_: _RoundedValue(
        100 * run.tflops_per_sec_per_device * 1e12 / _peak(run)
    ),
    "tflops_per_sec_per_device": lambda run, flops, _: _scaled(run.rate, flops / 1e12),
    "tokens_per_sec_per_device": lambda run, *_: run.rate_by_step_time,
    "aggregate_pflops": lambda run, *_: _RoundedValue(
        run.tflops_per_sec_per_device * run.devices / 1e3
    ),
    "tflops_per_token": lambda run, flops, _: _RoundedValue(flops / 1e12),
    "tflops_per_device_per_step": lambda run, flops, _: _RoundedValue(
        flops * run.tokens_per_step / run.devices / 1e12
    ),
    "train_flops": lambda run, flops, check: _RoundedValue(flops * check["tokens"]),
    "matmul_parameters_billion": lambda run, *_: _RoundedValue(run.weight_flops_per_token / 6e9),
    "parameters_billion": lambda run, *_: _RoundedValue(count_parameters(run.config).total / 1e9),
}


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """The rows of published.yml."""
    rows = read_mapping(_FILE)["runs"]
    return tuple(PublishedRun(**{**row, "checks": tuple(row["checks"])}) for row in rows)


def like_runs(
    *,
    chip: str,
    dtype: str,
    peak_flops_per_sec: float,
    flops_per_token: float | None,
    convention: str,
    has_experts: bool | None = None,
) -> LikeRuns | None:
    """The published runs of the same model class on a chip, in one convention.

    The class is given by the FLOPs per token, within a factor of three, and experts. Where there is
    none, or no FLOPs per token are known, all runs on that chip.

    Args:
        chip: a name of the hardware table.
        dtype: of the peak.
        peak_flops_per_sec: of one device.
        flops_per_token: model FLOPs by `convention`; None: not known.
        convention: see `PublishedRun.flops_per_token`.
        has_experts: whether the model is a mixture of experts; None: not known.

    Returns:
        None if no published run is on this chip.
    """
    bits = next((bits for bits in (8, 32) if str(bits) in dtype), 16)
    on_chip = [
        run
        for run in published_runs()
        if run.is_measured and run.dtype_bits == bits and named(run.hardware).name == chip
    ]
    near = [
        run
        for run in on_chip
        if flops_per_token
        and has_experts in (None, "num_experts" in run.config)
        and 1 / _CLASS <= run.flops_per_token(convention) / flops_per_token <= _CLASS
    ]
    found = near or on_chip
    if not found:
        return None
    mfus = [run.mfu(convention, peak_flops_per_sec) for run in found]
    sizes = sorted(run.weight_flops_per_token / 6e9 for run in found)
    span = f"{sizes[0]:.2g}B" + (f" to {sizes[-1]:.2g}B" if len(sizes) > 1 else "")
    which = "other models" if flops_per_token else "models of any size"
    return LikeRuns(
        like=f"{'models like this' if near else which} ({span} active) on {chip}",
        low_mfu=min(mfus),
        high_mfu=max(mfus),
        runs=tuple(run.id for run in found),
    )


def recompute(run: PublishedRun) -> list[Recomputed]:
    """Recomputes every published number of `run`."""
    return [_check(run, check) for check in run.checks]


def find_run(name: str) -> PublishedRun:
    """The row whose id is `name`.

    Raises:
        UserError: the name is unknown.
    """
    runs = {run.id: run for run in published_runs()}
    if name not in runs:
        raise UserError(
            f"published run {name!r} is not known; expected one of {', '.join(runs)}",
            hint=f"{nearest(name, runs)}usually a misspelling; run mfu-jax published for all "
            "of them",
        )
    return runs[name]


def _check(run: PublishedRun, check: Mapping[str, Any]) -> Recomputed:
    formula = check.get("formula")
    flops_per_token = FORMULAS[formula](run) if formula else 0.0
    recomputed, rounding = VALUES[check["value"]](run, flops_per_token, check)
    difference = abs(recomputed - check["published"])
    status: Status = "differs"
    if difference <= check["half_ulp"]:
        status = "reproduces"
    elif difference <= check["half_ulp"] + recomputed * rounding:
        status = "within input rounding"
    return Recomputed(
        run=run,
        quantity=check["quantity"],
        published=check["published"],
        recomputed=recomputed,
        half_ulp=check["half_ulp"],
        status=status,
        why=check.get("why", ""),
    )


def _peak(run: PublishedRun) -> float:
    return run.peak_tflops * 1e12


def _per_token(config: Mapping[str, Any], convention: str) -> Counter[str]:
    """Training FLOPs per token by kind, for one sequence."""
    flops = Counter[str]()
    for row in flops_breakdown({**config, "per_device_batch_size": 1}, convention):
        flops[row.kind] += row.training_flops / config["max_target_length"]
    return flops
