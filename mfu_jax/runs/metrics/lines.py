"""One line of a metrics file or log: which step it belongs to, and its values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mfu_jax.names import HARDWARE
from mfu_jax.runs.metrics.step_table import STEP_SECONDS, LoggedStep
from mfu_jax.util.values import convert

# Names in the log lines of MaxText (common/metric_logger.py, 0.2.5) and ours → metric names.
_LOG_NAMES = {
    "seconds": STEP_SECONDS,
    "TFLOP/s/device": "perf/per_device_tflops_per_sec",
    "Tokens/s/device": "perf/per_device_tokens_per_sec",
    "total_weights": "learning/total_weights",
    "loss": "learning/loss",
    "MFU": "perf/mfu",
    "HFU": "perf/hfu",
}
# All that summaries, benchmark tables and pages use; the rest of a record is not kept.
_NAMES = frozenset(
    {
        *_LOG_NAMES.values(),
        *(f"goodput/{use}_seconds" for use in ("data_wait", "eval", "checkpoint", "compile")),
        *("perf/per_device_tflops", "perf/per_device_tokens", "perf/mbu"),
        *("compile/seconds", "memory/peak_bytes_in_use"),
        *("learning/grad_norm", "learning/current_learning_rate", "eval/avg_loss", "eval/loss"),
    }
)
# A step under a picosecond, or over 30 years, would poison every sum and quotient.
_SECONDS = (1e-12, 1e9)
_AMOUNTS = (1e-30, 1e30)
_LIMITS = {
    name: _SECONDS if name == STEP_SECONDS else _AMOUNTS
    for name in sorted(_NAMES)
    if name.startswith("perf/")
}
_LONGEST_NOTE = 500
_LOG_LINE = re.compile(r"completed step: (?P<step>\d+)(?P<rest>[^\"\x1b\n]*)")
_LOG_VALUE = re.compile(r", (?P<name>[A-Za-z/_ ]+): (?P<value>[-+.\w]+)(?P<percent>%?)")
_KIND = re.compile(r"\[(compile|warmup)\]")


def object_of(line: str | bytes) -> dict[str, Any]:
    """The JSON object; empty if it is torn, or another value."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def profile_of(line: str) -> Iterator[tuple[str, float]]:
    """The ``profile/…`` numbers of a record."""
    for name, value in object_of(line).items():
        if name.startswith("profile/") and isinstance(value, int | float):
            yield name, float(value)


def reading_of(line: str) -> Iterator[tuple[str, float]]:
    """A record's step, what was read from its devices, and the MFU at their clock."""
    for name, value in object_of(line).items():
        is_kept = name.startswith(HARDWARE) or name in ("step", "perf/mfu_at_clock")
        if is_kept and isinstance(value, int | float):
            yield name, value


def words_of(record: Mapping[str, Any]) -> str:
    """The notes and flags of a record."""
    return "; ".join((*_words(record.get("notes")), *flags_of(record)))[:_LONGEST_NOTE]


def flags_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a record's impossible numbers."""
    return _words(record.get("flags"))


def _words(part: Any) -> tuple[str, ...]:
    return tuple(map(str, part)) if isinstance(part, list | dict) else ()


def read_line(line: str) -> tuple[str, LoggedStep | None] | None:
    """A line's form and its step; None if not recognised; no step if broken."""
    if line.startswith("{") and '"step"' in line:
        try:
            return _read_json(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return "jsonl", None
    if match := _LOG_LINE.search(line):
        return _read_log(match["step"], match["rest"])
    return None


def _read_json(values: Mapping[str, Any]) -> tuple[str, LoggedStep]:
    kind = values.get("kind")
    if not isinstance(kind, str | None):
        raise TypeError(kind)
    scalars = {k: float(v) for k, v in values.items() if k in _NAMES}  # also parses "NaN"
    return "maxtext" if kind is None else "jsonl", LoggedStep(
        number=_step(values["step"]), kind=kind, scalars=_complete(scalars)
    )


def _read_log(step: str, text: str) -> tuple[str, LoggedStep | None]:
    try:
        number = _step(step)
        scalars = {
            _LOG_NAMES[found["name"]]: float(found["value"]) / (100 if found["percent"] else 1)
            for found in _LOG_VALUE.finditer(text)
            if found["name"] in _LOG_NAMES and found["value"] != "n"  # n/a
        }
        scalars = _complete(scalars)
    except ValueError:
        return "log", None
    kind = _KIND.search(text)
    # Our own lines mark the steps that are not measured, so all others are measured.
    known = kind[1] if kind else "step" if "perf/mfu" in scalars else None
    return "log", LoggedStep(number=number, kind=known, scalars=scalars)


def _step(value: Any) -> int:
    """A step number: a whole, non-negative 64-bit number; MaxText writes 7.0."""
    number: int = value if type(value) is int else convert(value, int)
    if not 0 <= number < 2**63:
        raise ValueError(number)
    return number


def _complete(scalars: dict[str, float]) -> dict[str, float]:
    """Adds the amounts per step; a log line has only rates.

    Raises:
        ValueError: the step time or an amount is invalid: negative, not finite, or absurd.
    """
    seconds = scalars.get(STEP_SECONDS, 0.0)
    for name, (least, most) in _LIMITS.items():
        value = scalars.get(name, 0.0)
        if not (value == 0 or least <= value <= most):
            raise ValueError(value)
    for amount in ("perf/per_device_tflops", "perf/per_device_tokens"):
        scalars.setdefault(amount, scalars.get(f"{amount}_per_sec", 0.0) * seconds)
    return scalars
