"""Training time, chips, MFU or cost, each from the others.

usage: mfu-jax project key=value … [--json]

Give three of tokens, chips, time and throughput to solve for the fourth.

  tokens=15e12           tokens to train on (15T works too)
  chips=16384            accelerators; a TPU7x or MI250X chip is two JAX devices
  days=54                time; or hours=…, seconds=…
  mfu=0.4                throughput, as a fraction of the peak; or
    tokens_per_sec_per_device=…, or step_time_seconds=… with tokens_per_step=…

  model=llama3-8b        a bundled model, MaxText YAML or config.json, for the FLOPs per token; or
    params=8e9 (6N)
    max_target_length=8192  convention=maxtext
  hardware=h100          the peak, in dtype=bf16; or peak_tflops_per_device=989
  price=2.5              of one chip-hour

example: mfu-jax project tokens=1T chips=64 mfu=0.4 hardware=h100 params=8B"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.runs.projection import Projection, project
from mfu_jax.util.arguments import MODEL, PEAK, parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.values import convert

_NUMBERS = (
    "tokens",
    "chips",
    "days",
    "hours",
    "seconds",
    "mfu",
    "tokens_per_sec_per_device",
    "step_time_seconds",
    "tokens_per_step",
    "params",
    "max_target_length",
    PEAK,
    "price",
)
_WORDS = (MODEL, "convention", "hardware", "dtype")
_GIVEN = ("tokens", "chips", "mfu", "step_time_seconds", "tokens_per_step")
_SECONDS = {"days": 86400, "hours": 3600, "seconds": 1}
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=(*_NUMBERS, *_WORDS), flags=("--json",))
    if arguments.names:
        raise UserError(f"{arguments.names[0]!r}: expected key=value, as in tokens=15T")
    values = arguments.values
    numbers = {key: _number(key, values[key]) for key in _NUMBERS if key in values}
    words = {key: values[key] for key in _WORDS if key in values}
    seconds = _seconds(numbers)
    flops_per_token, model_text = _flops_per_token(numbers, words)
    peak, devices_per_chip, chip_text = _peak_per_chip(numbers, words)
    rate = numbers.get("tokens_per_sec_per_device")
    run = project(
        **{key: numbers[key] for key in _GIVEN if key in numbers},
        seconds=seconds,
        tokens_per_sec_per_chip=None if rate is None else rate * devices_per_chip,
        flops_per_token=flops_per_token,
        peak_flops_per_sec_per_chip=peak,
        price_per_chip_hour=numbers.get("price"),
    )
    if arguments.flags:
        print(json_text({**dataclasses.asdict(run), "model": model_text, "hardware": chip_text}))
    else:
        print(_render(run, model_text, chip_text))
    return 0


def _seconds(numbers: Mapping[str, float]) -> float | None:
    times = [name for name in _SECONDS if name in numbers]
    if len(times) > 1:
        raise UserError(
            f"time is given as {' and '.join(times)}; expected one",
            hint=f"usually left over from an earlier call; drop {times[-1]}=…",
        )
    return numbers[times[0]] * _SECONDS[times[0]] if times else None


def _number(key: str, text: str) -> float:
    """A number, optionally followed by K, M, B or T.

    >>> _number("tokens", "15T"), _number("tokens", "1.5e13")
    (15000000000000.0, 15000000000000.0)
    """
    digits = text.strip().replace("_", "").replace(",", "")
    scale = _SUFFIXES.get(digits[-1:], 1.0)
    try:
        return scale * convert(digits[:-1] if scale > 1 else digits, float)
    except ValueError:
        example = "0.4, not percent" if key == "mfu" else "15e12 or 15T"
        raise UserError(
            f"{key}={text!r} is not a number; expected one such as {example}",
            hint=f"usually a typo; pass {key}=… again",
        ) from None


def _flops_per_token(
    numbers: Mapping[str, float], words: Mapping[str, str]
) -> tuple[float | None, str]:
    """Model FLOPs per token, forward and backward, and their source in words."""
    if "model" in words and "params" in numbers:
        raise UserError(
            "model=… and params=… are both given; expected one; params is for models without "
            "a config",
            hint="drop one of them",
        )
    if "params" in numbers:
        return 6 * numbers["params"], f"{numbers['params']:g} parameters, 6N (no attention)"
    if "model" not in words:
        return None, ""
    from mfu_jax.flops.analytic.inputs.overrides import load_model_config
    from mfu_jax.flops.analytic.totals import calculate_tokens_per_device, model_flops_per_device

    overrides: dict[str, Any] = {"per_device_batch_size": 1}
    if "max_target_length" in numbers:
        overrides["max_target_length"] = _whole(numbers["max_target_length"])
    config = load_model_config(words["model"], overrides)
    convention = words.get("convention", "maxtext")
    flops = model_flops_per_device(config, convention).training
    text = f"{words['model']}, sequences of {config.step.max_target_length} tokens, {convention}"
    return float(flops / calculate_tokens_per_device(config)), text


def _whole(length: float) -> int:
    if not length.is_integer():
        raise UserError(f"max_target_length={length:g}: expected a whole number of tokens, as 8192")
    return int(length)


def _peak_per_chip(
    numbers: Mapping[str, float], words: Mapping[str, str]
) -> tuple[float | None, int, str]:
    """Peak FLOP/s of a chip, its number of JAX devices, and a description of the peak."""
    flag = numbers.get("peak_tflops_per_device")
    name = words.get("hardware")
    if flag is None and name is None:
        return None, 1, ""
    peak = hardware.resolve_peak(
        None, words.get("dtype", "bf16"), peak_tflops_per_device=flag, hardware=name
    )
    devices = hardware.named(name).devices_per_chip if name else 1
    text = f"{peak.tflops_per_sec:g} TFLOP/s a device ({peak.source})"
    if devices > 1:
        text += f", {devices} devices a chip"
    return peak.flops_per_sec * devices, devices, text


def _render(run: Projection, model: str, chip: str) -> str:
    per_token = "" if run.flops_per_token is None else f"{run.flops_per_token:.5g} ({model})"
    mfu = "" if run.mfu is None else f"{run.mfu:.2%}"
    if run.mfu is not None and run.mfu > 1:
        mfu += "  impossible: more than the peak; more chips, more time or fewer tokens are needed"
    rows = {
        "tokens": f"{run.tokens:.5g}",
        "chips": f"{run.chips:,.0f}" if run.chips == round(run.chips) else f"{run.chips:,.1f}",
        "training time": _duration(run.seconds),
        "MFU": mfu,
        "tokens/s/chip": f"{run.tokens_per_sec_per_chip:,.1f}",
        "FLOPs per token": per_token,
        "FLOPs in all": "" if run.total_flops is None else f"{run.total_flops:.5g}",
        "peak": chip,
        "steps": ""
        if run.steps is None
        else f"{run.steps:,.0f} of {run.step_time_seconds:.4g} s each",
        "chip-hours": f"{run.chip_hours:,.0f}",
        "cost": "" if run.cost is None else f"{run.cost:,.0f}",
    }
    return "\n".join(f"{name:<16} {text}" for name, text in rows.items() if text)


def _duration(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.2f} days"
    return f"{seconds / 3600:,.2f} hours" if seconds >= 7200 else f"{seconds:,.1f} s"
