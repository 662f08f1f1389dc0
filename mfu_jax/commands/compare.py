"""`mfu-jax compare`: the ledger of a compiled step, from a config or from HLO text."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mfu_jax.errors import UserError, nearest

if TYPE_CHECKING:
    import jax

    from mfu_jax.flops.ledger import Ledger

_USAGE = """usage: mfu-jax compare [FILE.yml] [key=value …] [--json]
       mfu-jax compare PROGRAM.hlo[.gz|.xz] [model=N] [dense=N] [attention=N] [xla=N] [--json]

Explains executed FLOPs by model FLOPs, and XLA's own report by executed FLOPs, line by line, all
of one step on one device.

The first form compiles the reference model's train step for the attached devices; keys are those
of configs/base.yml. The second reads compiled.as_text() of any program:
  model=N          model FLOPs of the step on one device, by convention=… (default maxtext)
  dense=N          the same with every attention pair, where the program computes them all
  attention=N      the attention FLOPs in model=, where the program does attention in kernels
  xla=N            compiled.cost_analysis()["flops"]
  --json           one JSON object on stdout"""

_OPENERS: dict[str, Callable[[Path], bytes]] = {
    ".hlo": Path.read_bytes,
    ".txt": Path.read_bytes,
    ".gz": lambda path: gzip.decompress(path.read_bytes()),
    ".xz": lambda path: lzma.decompress(path.read_bytes()),
}
_NUMBERS = ("model", "dense", "attention", "xla")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
        return 0
    arguments = [argument for argument in argv if argument != "--json"]
    if arguments and Path(arguments[0]).suffix in _OPENERS:
        ledger = _of_text(Path(arguments[0]), arguments[1:])
    else:
        ledger = ledger_of_config(arguments)
    print(json.dumps(ledger.to_json(), indent=1) if "--json" in argv else ledger.render())
    return 0


def ledger_of_config(
    arguments: Sequence[str], devices: Sequence[jax.Device] | None = None
) -> Ledger:
    """Compiles the reference model's train step and explains its FLOPs.

    Args:
        arguments: a YAML file and ``key=value``, as the trainer takes them.
        devices: those to compile for, also absent ones; by default the attached ones.

    Raises:
        UserError: the config is not understood, or does not fit the devices.
    """
    from mfu_jax.trainer.mesh import make_mesh
    from mfu_jax.trainer.metrics import count_step
    from mfu_jax.trainer.pyconfig import load
    from mfu_jax.trainer.state import abstract_state, resolve_attention
    from mfu_jax.trainer.step import compile_train_step

    config = load(arguments)
    mesh = make_mesh(config, devices)
    config = resolve_attention(config, mesh)
    return count_step(config, compile_train_step(config, mesh, abstract_state(config, mesh))).ledger


def _of_text(path: Path, arguments: Sequence[str]) -> Ledger:
    from mfu_jax.flops.executed.counting import executed_flops
    from mfu_jax.flops.ledger import compare_flops

    numbers: dict[str, int] = {}
    convention = "maxtext"
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "convention" and value:
            convention = value
        elif equals and key in _NUMBERS:
            numbers[key] = _integer(key, value)
        else:
            known = (*_NUMBERS, "convention")
            raise UserError(
                f"unknown argument {argument!r}{nearest(key, known)}; expected key=value with one "
                f"of {', '.join(known)}; usually a config key, which goes with a YAML file and not "
                "with HLO text; see mfu-jax compare --help"
            )
    return compare_flops(
        model=numbers.get("model", 0),
        convention=convention if "model" in numbers else "none: pass model=…",
        dense=numbers.get("dense"),
        attention=numbers.get("attention"),
        xla_reported=numbers.get("xla"),
        executed=executed_flops(_read(path)),
    )


def _read(path: Path) -> str:
    try:
        return _OPENERS[path.suffix](path).decode()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); expected HLO text, as it is or in gzip or xz; "
            "usually a wrong path or a file cut short; write compiled.as_text() to it again"
        ) from None


def _integer(key: str, value: str) -> int:
    try:
        number = float(value)
        return int(value) if value.isdecimal() else int(number)
    except (ValueError, OverflowError):
        raise UserError(
            f"{key}={value} is not a number; expected FLOPs of one device in one step; usually a "
            f"unit was left on it; write {key}=1.5e12, say"
        ) from None
