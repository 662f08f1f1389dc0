"""Times parsing and counting of HLO, compared with compiling it and with the length of the text.

    python -m scripts.benchmarks.counting [--megabytes=100] [--layers=48] [--write]

Run it from the repository root. The unrolled model has layers of width 1024 over 1024 tokens;
with libtpu installed it is also compiled for a TPU v5e. The long programs repeat the body of a
recorded one, so that every line is real.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import time

from mfu_jax.flops.executed.counting import executed_flops
from scripts import results
from scripts.records.absent_devices import ROOT, TPU_ENVIRONMENT, devices

PROGRAMS = ROOT / "tests" / "programs"


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--layers", type=int, default=48)
    results.add_write(parser)
    arguments = parser.parse_args()
    os.environ.update({**TPU_ENVIRONMENT, **os.environ})
    platforms = ("cpu", "v5e") if importlib.util.find_spec("libtpu") else ("cpu",)
    compiled = [_unrolled(platform, arguments.layers) for platform in platforms]
    index = json.loads((PROGRAMS / "index.json").read_text())
    compiled += [
        _row(name, _recorded(name), index[name]["compile_seconds"])
        for name in ("v5p_llama70b", "v5e_resnet50", "h100_resnet50")
    ]
    long: list[results.Row] = []
    size = 1
    while size <= arguments.megabytes:
        text = _repeated("v5e_unrolled_full", size * 10**6)
        seconds = _seconds(text)
        rate = len(text) / 1e6 / seconds
        shown = {"text": f"{len(text) / 1e6:.1f} MB", "parse and count": f"{seconds:.2f} s"}
        long.append({**shown, "rate": f"{rate:.1f} MB/s"})
        size *= 10
    measured = {"parsing and counting, against compiling": compiled, "long programs": long}
    results.publish("counting", measured, is_written=arguments.write)


def _unrolled(platform: str, layers: int) -> results.Row:
    import jax

    from tests.support import program_list
    from tests.support.reference_model import Shape

    shape = Shape(
        B=8,
        S=1024,
        D=1024,
        F=4096,
        V=32768,
        H=16,
        K=16,
        L=layers,
        scan=False,
        remat="full",
        dtype="bfloat16",
    )
    program = program_list.transformer(platform, shape)
    function, shapes = program.build(devices(platform))
    lowered = jax.jit(function).lower(*shapes)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    name = f"{layers} layers unrolled, full remat, {platform}"
    return _row(name, compiled.as_text() or "", seconds)


def _row(name: str, text: str, compile_seconds: float) -> results.Row:
    seconds = _seconds(text)
    return {
        "program": name,
        "text": f"{len(text) / 1e6:.2f} MB",
        "compile": f"{compile_seconds:.1f} s",
        "parse and count": f"{seconds:.3f} s",
        "of the compile time": f"{seconds / compile_seconds:.2%}",
    }


def _seconds(text: str) -> float:
    """The best of three: other processes only ever add time."""
    times = []
    for _ in range(3 if len(text) < 20e6 else 1):
        started = time.perf_counter()
        executed_flops(text)
        times.append(time.perf_counter() - started)
    return min(times)


def _recorded(name: str) -> str:
    return lzma.decompress((PROGRAMS / f"{name}.hlo.xz").read_bytes()).decode()


def _repeated(name: str, length: int) -> str:
    """A program whose ENTRY is called many times; every copy has its own computations."""
    text = _recorded(name)
    start = text.index("\n%") + 1
    header, body = text[:start], text[start:]
    entry = body[body.index("\nENTRY %") + len("\nENTRY %") :].split(" ", 1)[0]
    body = body.replace("\nENTRY %", "\n%")
    copies = max(1, length // len(body))
    parts = [header]
    calls = []
    for copy in range(copies):
        # `%name` → `%cN_name` gives each copy its own names, for definitions and uses alike.
        parts.append(body.replace("%", f"%c{copy}_"))
        calls.append(f"  %call.{copy} = s32[] call(), to_apply=%c{copy}_{entry}")
    parts.append("\nENTRY %all () -> s32[] {\n" + "\n".join(calls))
    parts.append("\n  ROOT %zero = s32[] constant(0)\n}\n")
    return "".join(parts)


if __name__ == "__main__":
    main()
