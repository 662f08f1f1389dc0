"""Traces of accelerators that are not here, written by hand: three steps of 100 µs.

Of each step, in µs: an elementwise fusion from 0 to 8, an all-gather that it hides until then, and
that is waited for until 18; two equal matmuls, one of which recomputes the other, until 48 and 78;
nothing until 100, while the host sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mfu_jax.dumps import ModelFlops, ProgramDump, Topology, write
from tests.support.xspace import Plane, space

US = 10**6  # picoseconds
STEPS = 3
M, K, N = 512, 1024, 2048
MATMUL_FLOPS = 2 * M * K * N
NORM_BYTES = 3 * 2 * M * K

_TEXT = """HloModule jit_step, num_partitions=4

%matmul (a: bf16[512,1024], b: bf16[1024,2048]) -> bf16[512,2048] {
  %a = bf16[512,1024] parameter(0)
  %b = bf16[1024,2048] parameter(1)
  ROOT %d = bf16[512,2048] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, FORWARD
}

%again (c: bf16[512,1024], e: bf16[1024,2048]) -> bf16[512,2048] {
  %c = bf16[512,1024] parameter(0)
  %e = bf16[1024,2048] parameter(1)
  ROOT %f = bf16[512,2048] dot(%c, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}, AGAIN
}

%scaled (g: bf16[512,1024], h: bf16[512,1024]) -> bf16[512,1024] {
  %g = bf16[512,1024] parameter(0)
  %h = bf16[512,1024] parameter(1)
  ROOT %m = bf16[512,1024] multiply(%g, %h), metadata={op_name="jit(step)/jvp(norm)/mul"}
}

ENTRY %main (x: bf16[512,1024], y: bf16[512,1024], s: bf16[512,2048]) -> bf16[512,2048] {
  %x = bf16[512,1024] parameter(0)
  %y = bf16[512,1024] parameter(1)
  %s = bf16[512,2048] parameter(2)
  %gather-start.1 = (bf16[512,2048], bf16[1024,2048]) all-gather-start(%s), GATHER
  %fusion.3 = bf16[512,1024] fusion(%x, %y), kind=kLoop, calls=%scaled, metadata={op_name="jit(step)/jvp(norm)/mul"}
  %gather-done.1 = bf16[1024,2048] all-gather-done(%gather-start.1)
  %fusion.1 = bf16[512,2048] fusion(%fusion.3, %gather-done.1), kind=kOutput, calls=%matmul
  %fusion.2 = bf16[512,2048] fusion(%fusion.3, %gather-done.1), kind=kOutput, calls=%again
  ROOT %sum = bf16[512,2048] add(%fusion.1, %fusion.2)
}
"""  # noqa: E501

TEXT = (
    _TEXT.replace("FORWARD", 'metadata={op_name="jit(step)/jvp(mlp)/dot_general"}')
    .replace("AGAIN", 'metadata={op_name="jit(step)/rematted_computation/mlp/dot_general"}')
    .replace("GATHER", "replica_groups={{0,1},{2,3}}, dimensions={0}")
)

OPS = (
    ("gather-start.1", 0, 0),
    ("fusion.3", 0, 8),
    ("gather-done.1", 8, 18),
    ("fusion.1", 18, 48),
    ("fusion.2", 48, 78),
)


def write_program(folder: Path, kind: str) -> None:
    write(
        ProgramDump(
            text=TEXT,
            topology=Topology(device_kind=kind, devices=4, mesh={"data": 2, "model": 2}),
            model=ModelFlops(per_device=MATMUL_FLOPS, convention="exact"),
        ),
        folder / "programs" / "step.mfu",
    )


def host() -> Plane:
    plane = Plane("/host:CPU")
    events = []
    for number in range(STEPS):
        begin = number * 100 * US
        events.append(("train", begin - (5 * US if number else 0), 5 * US, {"step_num": number}))
        events.append(("$loader.py:3 sleep", begin + 70 * US, 25 * US, {}))
    plane.line("python", events)
    return plane


def tpu(number: int = 0, *, late: int = 0, ops: Sequence[tuple[str, int, int]] = OPS) -> Plane:
    """A device whose steps begin `late` µs later, and run these ops."""
    plane = Plane(f"/device:TPU:{number}", device_type_string="TPU v5 lite")
    starts = [(late + 100 * step) * US for step in range(STEPS)]
    plane.line("Steps", [(str(i), start, 78 * US, {}) for i, start in enumerate(starts)])
    plane.line("XLA Modules", [("jit_step(77)", start, 78 * US, {}) for start in starts])
    for op, *_ in ops:
        plane.event_id(f"%{op} = bf16[] {op.partition('.')[0]}(%p)")
    plane.line(
        "XLA Ops",
        [
            (f"%{op} = bf16[] {op.partition('.')[0]}(%p)", start + a * US, (b - a) * US, {})
            for start in starts
            for op, a, b in ops
        ],
    )
    gather = "%gather-start.1 = (bf16[]) all-gather-start(%s)"
    plane.line("Async XLA Ops", [(gather, start, 18 * US, {}) for start in starts])
    return plane


def gpu(number: int = 0, *, gemm: Sequence[str] = ("fusion_1",)) -> Plane:
    """Kernels of a command buffer have no ``hlo_op``; the collective has a stream of its own.

    `gemm` are the names of the first matmul's kernels.
    """
    plane = Plane(f"/device:GPU:{number}", gpu_device_name="NVIDIA H100 80GB HBM3")
    compute, nccl = [], []
    for step in range(STEPS):
        start = 100 * step * US
        of = {"hlo_module": "jit_step", "program_id": 77}
        compute += [
            ("loop_multiply_fusion", start, 8 * US, {**of, "hlo_op": "fusion.3"}),
            *(
                (name, start + 18 * US + i * 30 * US // len(gemm), 30 * US // len(gemm), {})
                for i, name in enumerate(gemm)
            ),
            ("gemm_f16_kernel", start + 48 * US, 30 * US, {**of, "hlo_op": "fusion.2"}),
        ]
        nccl.append(
            ("ncclDevKernel_AllGather_RING", start + 2 * US, 16 * US,
             {**of, "hlo_op": "gather-start.1"})
        )  # fmt: skip
    plane.line("Stream #7(Compute)", compute)
    plane.line("Stream #9(Compute)", nccl)
    return plane


def write_trace(folder: Path, *planes: Plane, name: str = "host0") -> None:
    session = folder / "plugins" / "profile" / "2026_01_01_00_00_00"
    session.mkdir(parents=True, exist_ok=True)
    (session / f"{name}.xplane.pb").write_bytes(space(*planes))
