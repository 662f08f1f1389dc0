"""Executed FLOPs beside a GPU's own counters, kernel by kernel, under Nsight Compute.

    python -m scripts.verify_on_gpu [PROGRAM …] [--write]    # names of `program_silicon`; or
    python -m scripts.verify_on_gpu my_module:my_step        # any function of no arguments that
                                                             # returns a step and its arguments
    python -m scripts.verify_on_gpu --live=30 …              # without Nsight Compute: activity of
                                                             # the tensor cores in 30 s of steps

It needs an NVIDIA GPU of Hopper or later and `ncu`, with the right to read counters. Every program
is compiled into JAX's persistent cache first: compiling under Nsight Compute hangs.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.flops import names
from mfu_jax.flops.count import NOTHING_BEYOND, Beyond
from mfu_jax.flops.executed.formulas.tiles import beyond_library_tile, library_tile
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.profiling.join.ops import kernel_name
from scripts import results

STUDY = "verify_on_gpu"
TENSOR = "sm__ops_path_tensor_src_{}.sum"
SOURCES = ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp8", "fp64", "int8")
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
NCU = (
    "ncu --target-processes application-only --profile-from-start off --clock-control none "
    "--cache-control none --csv --print-units base --metrics "
).split()
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",  # in which ncu sees one kernel
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_SHARED = re.compile(r'%(\S+) = .*deduplicated_name="([^"]+)"')
_CONVOLUTION = re.compile(r"conv|fprop|dgrad|wgrad")
# Kernels of libraries, whose names are not XLA's, and the calls that run them.
_FAMILIES = {
    "attention": (re.compile(r"sdpa|fmha|flash"), re.compile(r"__cudnn\$fmha|te_fused_attn")),
    "convolution": (_CONVOLUTION, re.compile(r"__cudnn\$conv")),
    "matmul": (re.compile(r"nvjet|gemm|cutlass|xmma"), re.compile("")),
}
_LABELS = (names.TILES_STATED, names.TILES_ASSUMED, names.ON_PADDING)


class Launch(NamedTuple):
    """A kernel that ran, and what the counters saw of it."""

    kernel: str
    tensor: int  # FLOPs
    ffma: int  # FLOPs

    @property
    def flops(self) -> int:
        """FLOPs of the tensor cores, or those of the other units if it uses none."""
        return self.tensor or self.ffma


class KernelRow(NamedTuple):
    """What the counters saw of one kernel or a family of them, beside our count."""

    kernel: str
    launches: int
    counter: int
    executed: int
    beyond: int
    reason: str

    @property
    def difference(self) -> int:
        """What neither executed FLOPs nor the rows beyond them explain."""
        return self.counter - self.executed - self.beyond


def read_counters(text: str) -> list[Launch]:
    """The launches in the output of ``ncu --csv``, in order: one line per metric of each."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise SystemExit(f"ncu wrote no table: {text.strip()[-400:]}")
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for line in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        metrics = found.setdefault(line["ID"], (line["Kernel Name"], {}))[1]
        value = line["Metric Value"].replace(",", "")
        metrics[line["Metric Name"]] = int(float(value)) if value[:1].isdigit() else 0
    tensor = [TENSOR.format(source) for source in SOURCES]
    return [
        Launch(kernel, sum(of.get(metric, 0) for metric in tensor), 2 * of.get(FFMA, 0))
        for kernel, of in found.values()
    ]


def compare(
    launches: Sequence[Launch],
    records: Iterable[InstructionRecord],
    shared: Mapping[str, str] | None = None,
) -> list[KernelRow]:
    """Counters beside counts, kernel by kernel.

    XLA names its own kernels after their instructions. A library's kernels are joined with the
    calls of their kind in the program's order, or the largest with the largest if it has loops.

    Args:
        launches: in the order in which they ran.
        records: of the program, in its order.
        shared: instruction → kernel, of those that run another one's: `shared_kernels`.
    """
    ours = [record for record in records if record.flops and record.runs and not record.is_control]
    runs: dict[str, list[InstructionRecord]] = defaultdict(list)
    for record in ours:
        for name in _kernel_names(record, shared or {}):
            runs[name].append(record)
    named: dict[str, list[Launch]] = defaultdict(list)
    others: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        if equal := runs.get(launch.kernel):
            named[equal[0].name].append(launch)  # one instruction may launch several kernels
        elif family := _family(launch):
            others[family].append(launch)
    rows = []
    launched = set()
    for ran in named.values():
        equal = runs[ran[0].kernel]
        launched |= {record.name for record in equal}
        of = [record for record in equal for _ in range(record.runs)]
        rows.append(_row(" = ".join(record.name for record in equal), ran, of))
    calls: dict[str, list[InstructionRecord]] = defaultdict(list)
    for record in ours:
        if record.name not in launched:
            calls[_family_of_call(record)] += [record] * record.runs
    for family in sorted({*others, *calls}):
        rows += _of_family(family, others[family], calls[family])
    return rows


def shared_kernels(text: str) -> dict[str, str]:
    """The kernel of each fusion that XLA found to be equal to an earlier one, which it runs."""
    return {name: kernel_name(other) for name, other in _SHARED.findall(text)}


def _kernel_names(record: InstructionRecord, shared: Mapping[str, str]) -> set[str]:
    """Names under which XLA may launch an instruction."""
    return {shared.get(record.name) or kernel_name(record.name), *record.kernels}


def _family(launch: Launch) -> str:
    """The kind of a library's kernel; empty if it multiplies no matrices."""
    kinds = (kind for kind, (kernel, _) in _FAMILIES.items() if kernel.search(launch.kernel))
    kind = next(kinds, "matmul" if launch.tensor else "")
    return kind if launch.flops else ""


def _family_of_call(record: InstructionRecord) -> str:
    return next(kind for kind, (_, call) in _FAMILIES.items() if call.match(record.shape.target))


def _of_family(
    family: str, launches: Sequence[Launch], calls: Sequence[InstructionRecord]
) -> Iterator[KernelRow]:
    """The rows of a family: pairs of equal kernels and calls, or one row if they do not pair."""
    if any(launch.tensor for launch in launches):
        launches = [launch for launch in launches if launch.tensor]
    if len(launches) != len(calls):
        yield _row(f"{family}: {len(launches)} kernels of {len(calls)} calls", launches, calls)
        return
    if any(record.runs > 1 for record in calls):
        launches = sorted(launches, key=lambda launch: -launch.flops)
        calls = sorted(calls, key=lambda record: -(record.flops + sum(record.beyond)))
    pairs = zip(launches, calls, strict=True)
    for (kernel, name), group in itertools.groupby(pairs, lambda p: (p[0].kernel, p[1].name)):
        ran, of = zip(*group, strict=True)
        yield _row(f"{kernel} ({name})", ran, of)


def _row(title: str, launches: Sequence[Launch], calls: Sequence[InstructionRecord]) -> KernelRow:
    counter = sum(launch.flops for launch in launches)
    executed = sum(record.flops for record in calls)
    parts = [sum(part) for part in zip(*(record.beyond for record in calls), strict=True)]
    beyond = Beyond(*parts) if parts else NOTHING_BEYOND
    is_matmul = bool(launches) and not _CONVOLUTION.search(launches[0].kernel)
    tile = library_tile(launches[0].kernel) if is_matmul else None
    if tile and executed and not sum(beyond):
        kernel = launches[0].kernel
        beyond = Beyond(
            stated=sum(
                beyond_library_tile(kernel, record.shape.matmul, record.shape.is_transposed)
                for record in calls
                if record.shape.matmul
            )
        )
    reasons = [label for label, flops in zip(_LABELS, beyond, strict=True) if flops]
    if tile and beyond.stated:
        reasons[0] = f"tile of {tile[0]} × {tile[1]} in the kernel's name"
    if launches and not any(launch.tensor for launch in launches):
        reasons.append("no tensor cores: FFMA")
    row = KernelRow(title, len(launches), counter, executed, sum(beyond), "")
    if row.difference:
        reasons.append("not explained" if launches and calls else "joined with nothing")
    return row._replace(reason="; ".join(reasons) or "equal")


def table(program: str, rows: Sequence[KernelRow]) -> list[results.Row]:
    """The rows of a program and their sum, as a results file has them."""
    whole = KernelRow(
        "all",
        launches=sum(row.launches for row in rows),
        counter=sum(row.counter for row in rows),
        executed=sum(row.executed for row in rows),
        beyond=sum(row.beyond for row in rows),
        reason="",
    )
    return [
        {
            "program": program,
            "kernel": row.kernel,
            "launches": row.launches,
            "counter": row.counter,
            "executed": row.executed,
            "beyond it": row.beyond,
            "difference": row.difference,
            "reason": row.reason,
        }
        for row in (*rows, whole)
    ]


def program_of(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A standard program by its name, or what a user's ``module:function`` returns."""
    if ":" in name:
        module, _, function = name.partition(":")
        step, arguments = getattr(importlib.import_module(module), function)()
        return step, arguments
    from tests.support.program_silicon import PROGRAMS

    step, arguments, _ = PROGRAMS[name]  # a GPU that is there chooses its tiles itself
    return step, arguments


def _run_here(name: str, text: str) -> None:
    """Compiles, or takes from the cache; writes the text, or runs one step for the profiler."""
    import jax
    import jax.numpy as jnp

    step, arguments = program_of(name)
    arrays = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), arguments)
    compiled = jax.jit(step).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    if text:
        Path(text).write_text(compiled.as_text() or "")
        return
    runtime = _cuda_runtime()
    runtime.cudaProfilerStart()
    jax.block_until_ready(compiled(*arrays))
    runtime.cudaProfilerStop()


def live(name: str, seconds: float) -> results.Row:
    """How active the tensor cores are by NVML's counter and by our count, in steps of a program."""
    import jax
    import jax.numpy as jnp

    from mfu_jax import instrument

    step, arguments = program_of(name)
    arrays = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), arguments)
    run = instrument(step, sinks=[], gpu_period_seconds=1.0)
    for _ in range(4):  # it compiles, and warms up
        run(*arrays)
    assert run.flops  # counted, and a CPU's peak measured, before the time begins
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run(*arrays)
    run.close()
    found = run.summary()
    shares = {
        "HFU": found.hfu,
        "active by counter": found.tensor_active,
        "by count": found.tensor_active_by_count,
    }
    return {
        "program": name,
        "steps": found.steps,
        **{what: "n/a" if share is None else round(share, 4) for what, share in shares.items()},
    }


def _cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that JAX's wheels bring, or the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    found = (str(f) for folder in folders for f in Path(folder).rglob("libcudart.so*"))
    return ctypes.CDLL(next(found, "libcudart.so"))


def _measure(name: str, folder: Path) -> list[results.Row]:
    """The table of one program, which runs twice: to be compiled, and under Nsight Compute."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ENVIRONMENT['XLA_FLAGS']}".strip()
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    environment: Mapping[str, str] = {**os.environ, **ENVIRONMENT, **cache, "XLA_FLAGS": flags}
    text = folder / "program.txt"
    here = [sys.executable, "-m", "scripts.verify_on_gpu", name]
    run = functools.partial(subprocess.run, env=environment, check=True, text=True)
    run([*here, f"--text={text}"])
    metrics = ",".join([*map(TENSOR.format, SOURCES), FFMA])
    done = run([*NCU, metrics, *here, "--profiled"], stdout=subprocess.PIPE)
    program = text.read_text()
    records = instruction_costs(program).records.values()
    return table(name, compare(read_counters(done.stdout), records, shared_kernels(program)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="names, or module:function; default: all")
    parser.add_argument("--write", action="store_true", help="keep as scripts/results")
    parser.add_argument("--live", type=float, default=0.0, help="seconds of steps, without ncu")
    parser.add_argument("--text", default="", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.text or arguments.profiled:
        _run_here(arguments.programs[0], arguments.text)
        return
    from tests.support.program_silicon import PROGRAMS

    programs = arguments.programs or list(PROGRAMS)
    if arguments.live:
        activity = [live(name, arguments.live) for name in programs]
        what = "activity of the tensor cores by NVML's counter and by our count"
        results.publish(STUDY, {what: activity}, is_written=arguments.write)
        return
    rows = []
    for name in programs:
        with tempfile.TemporaryDirectory() as folder:
            rows += _measure(name, Path(folder))
    what = "FLOPs by an NVIDIA GPU's counters and by our count"
    results.publish(STUDY, {what: rows}, is_written=arguments.write)


if __name__ == "__main__":
    main()
