"""How long a training run takes, how many chips and what MFU it needs, what it costs.

One relation between four numbers, three of which are given (MaxText's page on performance metrics
writes the time in these three ways):

    time = step time × steps
         = tokens / (tokens per second per chip × chips)
         = FLOPs per token × tokens / (MFU × chips × peak of a chip)

No jax, no numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mfu_jax.errors import UserError

_QUANTITIES = {
    "tokens": "tokens=…",
    "chips": "chips=…",
    "seconds": "days=… (or hours, seconds)",
    "tokens_per_sec_per_chip": "mfu=… (or tokens_per_sec_per_device, step_time_seconds)",
}
_FACTORS = ("tokens_per_sec_per_chip", "chips", "seconds")  # of the tokens
_SMALLEST, _LARGEST = 1e-60, 1e60  # so that every product and quotient is a float, too
_TOLERANCE = 1e-9  # two derivations of a number may differ by rounding


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A training run: the given numbers and everything that follows from them.

    Attributes:
        tokens: of the whole training run.
        chips: may be a fraction if solved for.
        seconds: wall time of training.
        tokens_per_sec_per_chip: measured or implied throughput.
        flops_per_token: model FLOPs, forward and backward; None: unknown, and so is the MFU.
        peak_flops_per_sec_per_chip: dense peak of all JAX devices of a chip; None: unknown.
        tokens_per_step: global batch in tokens; None: unknown, and so are the steps.
        price_per_chip_hour: in any currency; None: unknown, and so is the cost.
        mfu: tokens/s over tokens/s at the peak.
        chip_hours: chips × hours.
        cost: chip-hours × price.
        total_flops: model FLOPs of the whole run.
        steps: optimizer steps.
        step_time_seconds: of one of them.
    """

    tokens: float
    chips: float
    seconds: float
    tokens_per_sec_per_chip: float
    flops_per_token: float | None
    peak_flops_per_sec_per_chip: float | None
    tokens_per_step: float | None
    price_per_chip_hour: float | None
    mfu: float | None
    chip_hours: float
    cost: float | None
    total_flops: float | None
    steps: float | None
    step_time_seconds: float | None


def project(
    *,
    tokens: float | None = None,
    chips: float | None = None,
    seconds: float | None = None,
    mfu: float | None = None,
    tokens_per_sec_per_chip: float | None = None,
    step_time_seconds: float | None = None,
    flops_per_token: float | None = None,
    peak_flops_per_sec_per_chip: float | None = None,
    tokens_per_step: float | None = None,
    price_per_chip_hour: float | None = None,
) -> Projection:
    """Solves for the missing one of tokens, chips, time and throughput.

    Throughput is given as `mfu` (with `flops_per_token` and the peak), as tokens per second, or as
    `step_time_seconds` (with `tokens_per_step` and `chips`).

    Raises:
        UserError: a number makes no sense, too few are given, or two are inconsistent.

    >>> run = project(tokens=1.5e13, chips=16384, mfu=0.4, flops_per_token=6 * 405e9,
    ...     peak_flops_per_sec_per_chip=989.4e12)
    >>> round(run.seconds / 86400, 1)
    65.1
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _refuse_impossible(given)
    known = {name: given[name] for name in _QUANTITIES if name in given}
    if mfu is not None:
        _learn(known, "tokens_per_sec_per_chip", _rate(mfu, given))
    _apply_rules(known, step_time_seconds, tokens_per_step)
    missing = [text for name, text in _QUANTITIES.items() if name not in known]
    if missing:
        raise UserError(
            "too little is given to solve for the rest; expected three of tokens, chips, time "
            f"and throughput; unknown: {', '.join(missing)}",
            hint="pass one more of them",
        )
    peak, rate = peak_flops_per_sec_per_chip, known["tokens_per_sec_per_chip"]
    chip_hours = known["chips"] * known["seconds"] / 3600
    steps = tokens_per_step and known["tokens"] / tokens_per_step
    return Projection(
        **known,
        flops_per_token=flops_per_token,
        peak_flops_per_sec_per_chip=peak,
        tokens_per_step=tokens_per_step,
        price_per_chip_hour=price_per_chip_hour,
        mfu=rate * flops_per_token / peak if flops_per_token and peak else None,
        chip_hours=chip_hours,
        cost=price_per_chip_hour and price_per_chip_hour * chip_hours,
        total_flops=flops_per_token and flops_per_token * known["tokens"],
        steps=steps,
        step_time_seconds=steps and known["seconds"] / steps,
    )


def _refuse_impossible(given: dict[str, float]) -> None:
    """Rejects numbers that make no sense, alone or without their partner."""
    for name, value in given.items():
        if not _SMALLEST < value < _LARGEST:
            raise UserError(
                f"{name}={value:g} is impossible; expected a number above 0 and below {_LARGEST:g}",
                hint="usually a typo; leave it out to solve for it",
            )
    if (mfu := given.get("mfu", 0.0)) > 1:
        raise UserError(
            f"mfu={mfu:g} is above 1; expected a fraction of the peak",
            hint=f"usually percent; pass mfu={mfu / 100:g}",
        )
    if "step_time_seconds" in given and "tokens_per_step" not in given:
        raise UserError(
            "step_time_seconds=… is given without tokens_per_step=…; expected both; the step "
            "time alone says nothing about tokens",
            hint="pass the global batch size × sequence length",
        )


def _rate(mfu: float, given: dict[str, float]) -> float:
    """Tokens per second per chip: MFU × peak / FLOPs per token."""
    for name, text in (
        ("flops_per_token", "the model: model=llama3-8b or params=8e9"),
        ("peak_flops_per_sec_per_chip", "the chip: hardware=h100, or peak_tflops_per_device=…"),
    ):
        if name not in given:
            raise UserError(
                f"mfu=… is given, but {name} is not; expected both; an MFU is a share of a "
                "peak for a model",
                hint=f"pass {text}",
            )
    return mfu * given["peak_flops_per_sec_per_chip"] / given["flops_per_token"]


def _apply_rules(
    known: dict[str, float], step_time_seconds: float | None, tokens_per_step: float | None
) -> None:
    """Derives everything that follows; a number derived in two ways must agree."""
    if step_time_seconds and tokens_per_step:
        per_second = tokens_per_step / step_time_seconds
        if "chips" in known:
            _learn(known, "tokens_per_sec_per_chip", per_second / known["chips"])
        elif "tokens_per_sec_per_chip" in known:
            _learn(known, "chips", per_second / known["tokens_per_sec_per_chip"])
        if "tokens" in known:
            _learn(known, "seconds", known["tokens"] / per_second)
        elif "seconds" in known:
            _learn(known, "tokens", known["seconds"] * per_second)
    given = [known[name] for name in _FACTORS if name in known]
    missing = [name for name in _FACTORS if name not in known]
    if not missing:
        _learn(known, "tokens", math.prod(given))
    elif len(missing) == 1 and "tokens" in known:
        _learn(known, missing[0], known["tokens"] / given[0] / given[1])


def _learn(known: dict[str, float], name: str, value: float) -> None:
    if name in known and not math.isclose(known[name], value, rel_tol=_TOLERANCE):
        raise UserError(
            f"the input contradicts itself: {name} would be both {known[name]:g} and "
            f"{value:g}; one is too many",
            hint=f"leave out, for example, {_QUANTITIES[name]}",
        )
    known.setdefault(name, value)
