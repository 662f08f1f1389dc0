"""Our train step and MaxText's, compiled for chips that are not attached: memory, cycles, bytes.

    python -m scripts.comparisons.maxtext_step [--maxtext-python=FILE] [--cache=FOLDER] [REGEX]

Each case is one set of MaxText's keys; ours are the same keys under the reference trainer's names,
as `mfu-jax plan --run` reads them, except for what the trainer does better by default. Both
steps compile for the same chips, each in a child process: ours with this interpreter, MaxText's
with the other one, which needs the same jax and the same compilers (libtpu; the CUDA plugin with
cuDNN). Cases are named "model on chips"; with ", saving" appended, they are the same step with
one more key, or without one of our savings. REGEX selects cases. A case takes minutes; with
``--code-seconds=0`` half a minute, without cycles. ``--json=FILE`` saves the exact numbers.

Columns: the compiler's bytes of temporaries, and total bytes at the peak; XLA's estimated cycles
(TPU programs only), with loops multiplied out; bytes read from and written to HBM; bytes of
collectives; executed matmul FLOPs and all-gathers; and the planner's seconds, which include what
has no cycles: attention and grouped kernels, and collectives that nothing hides.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.compilation.cache import compile_cached, installed_versions
from mfu_jax.planning.compilation.compiling import Limits, TooLarge
from mfu_jax.planning.measured_runs import read_run
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.step_sources import MaxTextStep, StepSource, request_for
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.planned.planned_run import reference_keys
from mfu_jax.trainer.planned.planned_step import TrainerStep

_CODE_SECONDS = 1800.0  # cycles come with the machine code
_GIB = 2**30
# Full remat, weights over all devices, one sequence per device: MaxText's default behaviour.
_COMMON = {"per_device_batch_size": 1, "remat_policy": "full"}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3.1-8b": {"model_name": "llama3.1-8b", "max_target_length": 8192},
    "qwen3-8b": {"model_name": "qwen3-8b", "max_target_length": 8192},
    "mixtral-8x7b": {
        "devices": 64,  # eight hold its weights, but no step
        "model_name": "mixtral-8x7b",
        "max_target_length": 4096,
        "other_flags": {"megablox": False, "sparse_matmul": False, "capacity_factor": 1.25},
    },
    "llama3-70b": {"devices": 128, "model_name": "llama3-70b", "max_target_length": 8192},
    "deepseek3-671b": {
        "devices": 512,
        "model_name": "deepseek3-671b",
        "max_target_length": 4096,
        "mesh": {"ici_fsdp_parallelism": 64, "ici_expert_parallelism": 8},
    },
}
CHIPS: Mapping[str, Mapping[str, Any]] = {
    "v5p": {"hardware": "v5p", "attention": "flash"},
    "v6e": {"hardware": "v6e", "attention": "flash"},
    "tpu7x": {"hardware": "tpu7x", "attention": "flash", "devices_of_a_chip": 2},
    "h100": {"hardware": "h100", "attention": "cudnn_flash_jax"},
}
_DEVICES = 8
# What saves memory or time in one step, each one separately: further keys of both steps.
_ONE_STEP = "llama3.1-8b on 8 v6e"
_TO_HOST = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj")
SAVINGS: Mapping[str, Mapping[str, Any]] = {
    "cross-entropy in chunks": {"other_flags": {"num_vocab_tiling": 8}},
    "saved names on the host": {
        "remat_policy": "custom",
        "remat_tensors": dict.fromkeys(_TO_HOST, "offload"),
    },
}
# Keys of our step only: its own defaults in place of MaxText's, and one saving less.
_OURS = {"weight_gathers": "auto", "norm_gradients": "auto"}
_WITHOUT: Mapping[str, Mapping[str, str]] = {
    "collective matmuls": {"weight_gathers": "xla"},
    "fused norm gradients": {"norm_gradients": "fused"},
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The result of compiling a step, for one device.

    Attributes:
        temporaries: bytes; None if the compiler refused the program.
        peak: maximum bytes in use at once.
        cycles: XLA's estimate per step; None on GPUs.
        hbm_bytes: per step.
        collective_bytes: per step.
        executed_flops: per step.
        all_gathers: per step.
        seconds: the plan's step time.
    """

    temporaries: int | None
    peak: int | None
    cycles: int | None
    hbm_bytes: int
    collective_bytes: int
    executed_flops: int
    all_gathers: int
    seconds: float


COLUMNS = tuple(field.name for field in dataclasses.fields(Figures))
_UNITS = {
    **{"temporaries": (_GIB, "GiB"), "peak": (_GIB, "GiB"), "cycles": (1e9, "10⁹")},
    **{"hbm_bytes": (1e9, "GB"), "collective_bytes": (1e9, "GB")},
    **{"executed_flops": (1e12, "TFLOP"), "all_gathers": (1.0, "times"), "seconds": (1.0, "s")},
}


def figures(program: ProgramDump, target: Target) -> Figures:
    """The figures of a program, compiled or only scheduled."""
    costs = instruction_costs(program)
    plan, memory = make_plan(program, target), program.memory or {}
    records = costs.records.values()
    exchanges = [(r.runs, r.collective) for r in records if r.collective]
    return Figures(
        temporaries=memory.get("temp_size_in_bytes"),
        peak=plan.memory_peak_bytes,
        cycles=_cycles(costs),
        hbm_bytes=sum(record.runs * record.hbm_bytes for record in records),
        collective_bytes=sum(runs * collective.bytes for runs, collective in exchanges),
        executed_flops=plan.executed_flops or 0,
        all_gathers=sum(runs for runs, one in exchanges if one.kind == "all-gather"),
        seconds=plan.step_time_seconds or 0.0,
    )


def _cycles(costs: ProgramCosts) -> int | None:
    """The program's cycles; None if no instruction has any."""
    known = [r for r in costs.records.values() if r.estimated_cycles is not None]
    return sum(r.runs * (r.estimated_cycles or 0) for r in known) if known else None


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the cases whose name matches, and prints one row per case."""
    arguments = _arguments(argv)
    rows = []
    _say_versions(sys.executable, arguments.maxtext_python)
    print(header())
    for name, run, without in _cases():
        if re.search(arguments.pattern, name):
            found = compare(run, without, arguments)
            rows.append({"case": name, **found})
            print(row(name, found["ours"], found["maxtext"]), flush=True)
    if arguments.json:
        text = json.dumps(rows, indent=1, default=dataclasses.asdict)
        arguments.json.write_text(text, encoding="utf-8")


def _cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, keys of both steps, and which of `_WITHOUT` our step lacks, or empty."""
    for model, keys in MODELS.items():
        devices = keys.get("devices", _DEVICES)
        for chips, hardware in CHIPS.items():
            name = f"{model} on {devices} {chips}"
            size = {
                "chips": devices // hardware.get("devices_of_a_chip", 1),
                "mesh": keys.get("mesh", {"ici_fsdp_parallelism": devices}),
            }
            run = {**_COMMON, **keys, **hardware, **size}
            yield name, run, ""
            if name == _ONE_STEP:
                for saving, more in SAVINGS.items():
                    yield f"{name}, {saving}", {**run, **more}, ""
                for saving in _WITHOUT:
                    yield f"{name}, {saving}", run, saving


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--maxtext-python", default=sys.executable)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--code-seconds", type=float, default=_CODE_SECONDS)
    parser.add_argument("pattern", nargs="?", default="")
    return parser.parse_args(argv)


def _say_versions(*pythons: str) -> None:
    for python in dict.fromkeys(pythons):
        found = ", ".join(
            f"{name} {version}" for name, version in installed_versions(python).items()
        )
        print(f"{python}: {found}", file=sys.stderr, flush=True)


def compare(
    keys: Mapping[str, Any], without: str, arguments: argparse.Namespace
) -> dict[str, Figures | None]:
    """Compiles both steps of one case.

    None for a step that the compiler refused unscheduled, and for MaxText's if only ours changes.
    """
    run = read_run(keys)
    nearest = reference_keys(run)
    for lost in nearest.lost:
        print(f"  ours: not followed: {lost.setting}", file=sys.stderr, flush=True)
    ours = {**nearest.keys, **_OURS, **_WITHOUT.get(without, {})}
    theirs = MaxTextStep(arguments.maxtext_python)
    return {
        "ours": _compiled(TrainerStep(run.target), ours, run.target, arguments),
        "maxtext": None if without else _compiled(theirs, run.keys, run.target, arguments),
    }


def _compiled(
    source: StepSource, keys: Mapping[str, str], target: Target, arguments: argparse.Namespace
) -> Figures | None:
    request = request_for(source, target, keys)
    limits = Limits(seconds=2 * _CODE_SECONDS, code_seconds=arguments.code_seconds)
    program, notes, _ = compile_cached(request, folder=arguments.cache, limits=limits)
    for note in notes:
        print(f"  {source.module}: {note}", file=sys.stderr, flush=True)
    if not isinstance(program, TooLarge):
        return figures(program, target)
    print(f"  {source.module}: does not fit: {program.message}", file=sys.stderr, flush=True)
    if program.program is None:
        return None
    scheduled = figures(program.program, target)
    return dataclasses.replace(scheduled, peak=program.used_bytes)


def header() -> str:
    """The two header lines of a Markdown table."""
    heads = [f"{name.replace('_', ' ')}, {_UNITS[name][1]}" for name in COLUMNS]
    return f"| step | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}"


def row(name: str, ours: Figures | None, theirs: Figures | None) -> str:
    """Ours, MaxText's and their ratio in each column."""
    cells = [_cell(column, ours, theirs) for column in COLUMNS]
    return f"| {name} | {' | '.join(cells)} |"


def _cell(column: str, ours: Figures | None, theirs: Figures | None) -> str:
    unit, _ = _UNITS[column]
    our, their = (None if f is None else getattr(f, column) for f in (ours, theirs))
    texts = ["–" if value is None else f"{value / unit:,.4g}" for value in (our, their)]
    if not (our and their):
        return " / ".join(texts) if our or their else "–"
    return f"{' / '.join(texts)} = {our / their:.3f}"


if __name__ == "__main__":
    main()
