"""Real H100 programs, run in command buffers: a kernel has its own name there, and no instruction.

The traces are written from the programs' texts, read here by a few patterns: what runs in which
order, loops as often as XLA notes. Fusions carry the name that XLA gives to their kernel; library
kernels have one of their own. Only what cannot be in a command buffer names its instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mfu_jax.dumps import ProgramDump, write
from mfu_jax.profiling.profile import read_profile
from tests.support.accelerator_traces import write_trace
from tests.support.recorded import text_of
from tests.support.xspace import Plane

KIND = "NVIDIA H100 80GB HBM3"
STEPS, LENGTH = 3, 10**7  # picoseconds of every kernel
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.-]+) = .*?[\])}] ([a-z-]+)\(", re.MULTILINE)
_NO_KERNEL = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier",
}  # fmt: skip
_LIBRARY = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"


def ran(text: str, computation: str) -> Iterator[tuple[str, str]]:
    """Names and opcodes of what a computation launches, in order."""
    body = re.search(rf"^(?:ENTRY )?%{re.escape(computation)} \(.*?^}}", text, re.M | re.S)
    assert body is not None
    for match in _INSTRUCTION.finditer(body[0]):
        name, opcode = match.groups()
        line = body[0][match.start() : body[0].find("\n", match.start())]
        if opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            inner = re.search(r"body=%([\w.-]+)", line)
            assert trips
            assert inner
            for _ in range(int(trips[1])):
                yield from ran(text, inner[1])
        elif opcode not in _NO_KERNEL:
            yield name, opcode


def kernel(name: str, opcode: str, position: int, module: str) -> tuple[str, dict[str, object]]:
    """An event's name, and its stats.

    A copy and a step's first kernel are launched by themselves, unless all is in command buffers:
    then `module` is empty.
    """
    if module and (opcode == "copy" or not position):
        return name, {"hlo_op": name, "hlo_module": module, "program_id": 7}
    if opcode == "custom-call":
        return _LIBRARY, {}
    return re.sub(r"[.-]", "_", name), {}


@pytest.mark.parametrize(
    ("recorded", "some_named"),
    [
        ("h100_scan_full_mixed", True),
        ("h100_unrolled_full_mixed", True),
        ("h100_layers_cudnn", True),
        ("h100_unrolled_full_mixed", False),
    ],
)
def test_kernels_without_an_instruction_are_joined(
    recorded: str, some_named: bool, tmp_path: Path
) -> None:
    text = text_of(recorded)
    module = re.match(r"HloModule ([\w.-]+)", text)
    entry = re.search(r"^ENTRY %([\w.-]+) ", text, re.M)
    assert module
    assert entry
    kernels = list(ran(text, entry[1]))
    assert len(kernels) > 10
    write(ProgramDump(text=text), tmp_path / "programs" / "step.mfu")
    plane = Plane("/device:GPU:0", gpu_device_name=KIND)
    events, at = [], 0
    for _ in range(STEPS):
        for position, (name, opcode) in enumerate(kernels):
            shown, stats = kernel(name, opcode, position, module[1] if some_named else "")
            events.append((shown, at, LENGTH, stats))
            at += LENGTH
        at += LENGTH
    plane.line("Stream #7(Compute)", events)
    write_trace(tmp_path, plane)
    profile = read_profile(tmp_path)
    seconds = LENGTH / 1e12
    assert profile.measured.step_seconds == pytest.approx((len(kernels) + 1) * seconds)
    assert profile.coverage >= 0.95
    assert sum(bar.seconds for bar in profile.waterfall) == pytest.approx(
        profile.measured.step_seconds
    )
    executed = profile.program.costs.executed.total
    assert sum(row.flops for row in profile.table("op")) == executed
