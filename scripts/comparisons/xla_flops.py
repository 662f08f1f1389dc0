"""Compares model, executed and XLA-reported FLOPs of the reference model's train step.

    python -m scripts.comparisons.xla_flops [FILE.yml] [key=value …]
        [--variant="key=value …"] [--json]
    python -m scripts.comparisons.xla_flops --topology=v5e:2x4 dtype=bfloat16 attention=splash

Run it from the repository root. Every variant is one row; --variant may be repeated. Without it:
layers scanned and unrolled, with and without full rematerialisation. The step is compiled for the
attached devices or, with --topology, for TPUs that need not be attached (needs ``pip install
'jax[tpu]'``). `mfu-jax compare` explains one row line by line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from typing import TYPE_CHECKING

from mfu_jax.util.formatting import columns
from scripts.records.absent_devices import TPU_ENVIRONMENT, devices

if TYPE_CHECKING:
    from mfu_jax.flops.ledger import Ledger

_VARIANTS = [
    f"scan_layers={scan} remat_policy={remat}"
    for scan, remat in itertools.product(("true", "false"), ("none", "full"))
]


def main() -> None:
    """Prints the table, or the ledgers as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="*", help="a YAML file and key=value, for all variants")
    parser.add_argument("--variant", action="append", help="keys of one row")
    parser.add_argument("--topology", help="TPUs to compile for, such as v5e:2x4")
    parser.add_argument("--json", action="store_true", help="the ledgers as one JSON array")
    arguments = parser.parse_args()
    if arguments.topology:
        os.environ.update({**TPU_ENVIRONMENT, **os.environ})

    from mfu_jax.commands.compare import ledger_of_config

    absent = devices("tpu", arguments.topology) if arguments.topology else None
    variants = _VARIANTS if arguments.variant is None else arguments.variant
    ledgers = {
        variant: ledger_of_config([*arguments.config, *variant.split()], absent)
        for variant in variants
    }
    if arguments.json:
        print(json.dumps([{"variant": v, **ledger.to_json()} for v, ledger in ledgers.items()]))
    else:
        print(render(ledgers))


def render(ledgers: dict[str, Ledger]) -> str:
    """The table: FLOPs per step per device."""
    (convention,) = {ledger.convention for ledger in ledgers.values()} or {""}
    head = ("variant", f"model ({convention})", "executed", "XLA-reported", "of executed")
    rows = [head]
    for variant, ledger in ledgers.items():
        reported, factor = ledger.xla_reported, ledger.xla_factor
        numbers = (ledger.model, ledger.executed, "-" if reported is None else reported)
        shown = (n if isinstance(n, str) else f"{n:,}" for n in numbers)
        rows.append((variant, *shown, "-" if factor is None else f"{factor:.3f}"))  # type: ignore[arg-type]
    lines = columns(rows)
    unexplained = [f"{v}: {led.residual:,}" for v, led in ledgers.items() if led.residual]
    lines.append(f"residuals: {', '.join(unexplained) or 'none, every executed FLOP is explained'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
