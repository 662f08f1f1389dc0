"""Where the time of a step went: the waterfall from the peak to MFU, and tables, from a trace.

usage: mfu-jax profile DIR [key=value …] [--json]

DIR is the folder of a device trace: of mfu_jax.profile, profile_steps=, or
jax.profiler.start_trace; or one .xplane.pb file. The newest trace in it is read, of all hosts.
  by=scope,op      tables to print: scope, op, phase, dtype, kernel (default scope,op)
  depth=N          only the first N parts of a scope tell groups apart
  top=N            rows of each table (default 15; 0: all)
  model=N          model FLOPs of one run of the program on one device; by default those stored with
                   the trace, else the program's own forward and backward matmuls
  hardware=NAME    the chip, if the trace does not name it; or calibrate
  peak_tflops=N    dense peak of one JAX device, instead of the table's; CPUs are calibrated
  --json           one JSON object on stdout"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mfu_jax.arguments import parse
from mfu_jax.errors import UserError, nearest
from mfu_jax.formatting import json_text
from mfu_jax.values import typed

_KEYS = ("by", "depth", "top", "model", "hardware", "peak_tflops")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    from mfu_jax.profiling.profile import read_profile
    from mfu_jax.profiling.render import render

    arguments = parse(argv, keys=_KEYS, flags=("--json",))
    values = arguments.values
    by = _tables(values.get("by", "scope,op"))
    depth, top = _count("depth", values.get("depth", "0")), _count("top", values.get("top", "15"))
    peak, model = values.get("peak_tflops"), values.get("model")
    profile = read_profile(
        arguments.one_name("folder with a trace"),
        peak_tflops_per_device=None if peak is None else float(typed("peak_tflops", peak, float)),
        hardware=values.get("hardware", ""),
        model_flops=None if model is None else int(typed("model", model, int | Fraction)),
    )
    if arguments.flags:
        print(json_text(profile.to_json(depth=depth)))
    else:
        print(render(profile, by=by, depth=depth, top=top))
    return 0


def _tables(text: str) -> list[str]:
    from mfu_jax.profiling.tables import KEYS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KEYS:
            raise UserError(
                f"by={text}: unknown table {name!r}{nearest(name, KEYS)}; expected some of "
                f"{', '.join(KEYS)}"
            )
    return names


def _count(key: str, text: str) -> int:
    number = int(typed(key, text, int))
    if number < 0:
        raise UserError(f"{key}={number}: expected 0 or more")
    return number
