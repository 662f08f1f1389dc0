"""Compiles steps of full-size models for TPUs that are not attached, and counts executed FLOPs.

    python -m scripts.comparisons.full_size_steps [--cache=FOLDER] [--code-seconds=0] [REGEX]

For each case: FLOPs of all devices, executed and from the config, and every ledger line between. A
program is read as scheduled: generating machine code changes no instruction. Needs libtpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.ledger import Ledger
from mfu_jax.flops.lengths import Lengths
from mfu_jax.instrumentation.counts import count_program
from mfu_jax.planning.compilation.cache import compile_cached
from mfu_jax.planning.compilation.compiling import Limits, Request, TooLarge
from mfu_jax.planning.targets import parse_target
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.planned.planned_step import TrainerStep
from mfu_jax.trainer.run.run_logger import model_of

_COMMON = {"dtype": "bfloat16", "remat_policy": "full", "per_device_batch_size": "1"}
_OVER_NEIGHBOURS = "rows of other devices' experts"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and its chips."""

    topology: str
    keys: Mapping[str, str]


CASES = {
    "mixtral-8x7b": Case(
        topology="v6e-64",
        keys={"model_name": "mixtral-8x7b", "max_target_length": "4096", "fsdp": "64"},
    ),
    "mixtral-8x7b, expert": Case(
        topology="v6e-64",
        keys={
            "model_name": "mixtral-8x7b",
            "max_target_length": "4096",
            "fsdp": "16",
            "expert": "4",
        },
    ),
    "llama3-70b": Case(
        topology="v5p:4x4x8",
        keys={"model_name": "llama3-70b", "max_target_length": "8192", "fsdp": "128"},
    ),
    "qwen3-next-80b-a3b": Case(
        topology="v5p:4x4x4",
        keys={"model_name": "qwen3-next-80b-a3b", "max_target_length": "4096", "fsdp": "64"},
    ),
    "deepseek3-671b": Case(
        topology="v5p:8x8x8",
        keys={
            "model_name": "deepseek3-671b",
            "max_target_length": "4096",
            "fsdp": "64",
            "expert": "8",
        },
    ),
}


def ledger_of(config: Config, program: ProgramDump) -> Ledger:
    """From a device's model FLOPs to executed FLOPs, if experts are chosen equally often."""
    model, lengths = model_of(config), Lengths.of((), ())
    if config.num_experts > 1:
        rows = config.max_target_length * config.per_device_batch_size * config.num_experts_per_tok
        of_expert = round(rows * config.expert / config.num_experts)
        lengths = Lengths.of([of_expert] * (config.num_experts // config.expert), ())
        # With group sizes, the count skips those rows, as the kernels do.
        overheads = {k: v for k, v in model.overheads.items() if k != _OVER_NEIGHBOURS}
        model = dataclasses.replace(model, overheads=overheads)
    return count_program(program, model, lengths=lengths).ledger


def main() -> None:
    """Runs the cases whose name matches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--code-seconds", type=float, default=0.0)
    parser.add_argument("pattern", nargs="?", default="")
    arguments = parser.parse_args()
    for name, case in CASES.items():
        if re.search(arguments.pattern, name):
            limits = Limits(seconds=3600, code_seconds=arguments.code_seconds)
            show(name, case, limits, arguments.cache)


def show(name: str, case: Case, limits: Limits, cache: Path | None) -> None:
    """Compiles one case and prints its ledger."""
    target = parse_target(topology=case.topology)
    step = TrainerStep(target)
    keys = {**_COMMON, **case.keys}
    words = step.words(keys)
    request = Request(
        module=step.module,
        target=target,
        config={"arguments": words},
        identity=step.identity(keys),
    )
    begin = time.perf_counter()
    found = compile_cached(request, folder=cache, limits=limits).program
    seconds = time.perf_counter() - begin
    print(f"{name}: {target}, {' '.join(words)}; {seconds:.0f} s", flush=True)
    if isinstance(found, TooLarge):
        print(f"  does not fit: {found.message}")
    program = found.program if isinstance(found, TooLarge) else found
    if program is None:
        return
    ledger = ledger_of(pyconfig.load(words), program)
    print(ledger.render(), flush=True)
    print(f"  memory {program.memory}")


if __name__ == "__main__":
    main()
