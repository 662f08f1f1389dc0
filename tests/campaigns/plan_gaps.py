"""Plants causes of lost time, and asks for the gap to the plan: is the cause first, at its price?

    python -m tests.campaigns.plan_gaps [--only gpt2,cpu] [--write]

On a GPU: two steps that an H100 ran (tests/data), beside the plans of their programs for an H100.
The recorded traces are edited (tests/support/edited_traces.py): kernels are stretched, put in or
taken out, gaps are made; `recorded` are loops and a step that really were slow on it. On a TPU: a
collective that the plan hides, in the trace of a schedule that does not. On this machine's CPU,
for which there are no plans, really changed steps run, and the plan is what the healthy step took.

The price found is what the cause has more than in the gap of the healthy step. Exits 1 if fewer
than ten of twelve are named first, a price is off by over 10% (a clock's: 30%), or a gap's rows
miss the difference of measured and planned time by over 1% of it.
"""

from __future__ import annotations

import argparse
import functools
import lzma
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfu_jax.dumps.files import load
from mfu_jax.dumps.program import ProgramDump, Topology
from mfu_jax.flops.executed.mesh_axes import kind_of
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import Target, parse_target
from mfu_jax.profiling.capture import profile as traced
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.plan_gap import PlanGap, plan_gap
from mfu_jax.util.formatting import columns
from scripts import results
from tests.campaigns.planted.scheduled_trace import write_scheduled
from tests.support.archives import unpack
from tests.support.edited_traces import EditedTrace, Kernel

_DATA = Path(__file__).parents[1] / "data"
_WITHIN, _CLOCK_WITHIN = 0.1, 0.3
_ENOUGH = 10 / 12
_SUM = 0.01
_OPPOSITES = {"slower kernel": "faster kernel"}  # netted in a gap
_HEAD = ("case", "cause", "first", "planted", "found", "off", "gap", "rows off")


class Case(NamedTuple):
    """A planted cause, and the gap that was found.

    Attributes:
        name: of the case.
        cause: that was planted.
        seconds: by which it made a step longer; None: not known.
        gap: to the plan.
        healthy: the gap of the step without it.
    """

    name: str
    cause: str
    seconds: float | None
    gap: PlanGap
    healthy: PlanGap

    @property
    def is_first(self) -> bool:
        """Whether the cause is named first."""
        return next(iter(self.gap.by_reason())) == self.cause

    @property
    def price(self) -> float:
        """Seconds that the cause has more than without it."""
        names = self.cause, _OPPOSITES.get(self.cause, "")
        with_it, without = (
            sum(gap.by_reason().get(name, 0.0) for name in names)
            for gap in (self.gap, self.healthy)
        )
        return with_it - without

    @property
    def off(self) -> float:
        """By how much the price is off, as a share of it."""
        return self.price / self.seconds - 1 if self.seconds else 0.0

    @property
    def is_priced(self) -> bool:
        """Whether the price is right: a clock's is inferred from a plan that errs."""
        return abs(self.off) <= (_CLOCK_WITHIN if self.cause == "lower clock" else _WITHIN)

    @property
    def missed(self) -> float:
        """What the rows miss of the gap, as a share of it."""
        rows = math.fsum(row.seconds for row in self.gap.changes)
        causes = math.fsum(self.gap.by_reason().values())
        return max(abs(total / self.gap.seconds - 1) for total in (rows, causes))

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        seconds = "" if self.seconds is None else _ms(self.seconds)
        off = "" if self.seconds is None else f"{self.off:+.0%}"
        return (
            *(self.name, self.cause, next(iter(self.gap.by_reason()))),
            *(seconds, _ms(self.price), off, _ms(self.gap.seconds), f"{self.missed:.0e}"),
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"of {', '.join(_KINDS)}, joined by commas")
    results.add_write(parser)
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",") if arguments.only else list(_KINDS)
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in chosen:
            for case in _KINDS[kind](Path(scratch)):
                print("  ".join(case.cells), file=sys.stderr, flush=True)
                cases.append(case)
    rows = [case.cells for case in cases]
    first = sum(case.is_first for case in cases)
    print("\n".join(columns([_HEAD, *rows], "<<<>>>>>")))
    print(f"{first} of {len(cases)} causes named first")
    if arguments.write:
        found = [dict(zip(_HEAD, row, strict=True)) for row in rows]
        results.write("plan_gaps", "planted causes of a gap to the plan", found)
    is_wrong = any(not case.is_priced or case.missed > _SUM for case in cases)
    return int(first < _ENOUGH * len(cases) or is_wrong)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


# On a GPU.


@dataclass(frozen=True)
class Recorded:
    """A trace of an H100 to plant causes in.

    Attributes:
        folder: of the trace and its program.
        matmul: a kernel's name.
        vector: the name of an elementwise one.
    """

    folder: Path
    matmul: str
    vector: str

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """Of its program."""
        (program,) = (self.folder / "programs").iterdir()
        return make_plan(load(program), parse_target(hardware="h100", devices=1)).to_json()

    @functools.cached_property
    def healthy(self) -> PlanGap:
        """The gap as recorded."""
        return plan_gap(read_profile(self.folder), self.plan, "plan.json")

    @functools.cached_property
    def step(self) -> float:
        """Seconds of a step."""
        return self.healthy.measured_seconds

    @property
    def file(self) -> Path:
        """The trace."""
        return next(self.folder.rglob("*.xplane.pb"))

    def gap(self, plant: Callable[[EditedTrace], None]) -> PlanGap:
        """The gap of the trace with a cause planted."""
        trace, recorded = EditedTrace(self.file), self.file.read_bytes()
        plant(trace)
        trace.write(self.file)
        try:
            return plan_gap(read_profile(self.folder), self.plan, "plan.json")
        finally:
            self.file.write_bytes(recorded)


def begins(trace: EditedTrace) -> list[float]:
    """When each step's first kernel begins."""
    first, *rest = trace.kernels
    return [kernel.start for kernel in (first, *rest) if kernel.name == first.name]


def quiet(trace: EditedTrace) -> list[float]:
    """When a kernel begins and no other runs, within steps."""
    found, until = [], math.inf
    first, *rest = trace.kernels
    for kernel in (first, *rest):
        if kernel.start >= until and kernel.name != first.name:
            found.append(kernel.start)
        until = max(kernel.end, 0.0 if math.isinf(until) else until)
    return found


def within(trace: EditedTrace) -> list[float]:
    """A moment within each step in which nothing runs."""
    found = quiet(trace)
    return [found[np.searchsorted(found, begin) + 10] for begin in begins(trace)[:-1]]


def edits(recorded: Recorded) -> Iterator[tuple[str, str, Callable[[EditedTrace], None]]]:
    """Cases, the cause that each plants, and how; each adds about a fifth of a step."""
    much = 0.2 * recorded.step

    def longer(kernel: str, trace: EditedTrace) -> None:
        own = sum(k.end - k.start for k in trace.kernels if k.name == kernel)
        factor = 1 + much * len(begins(trace)) / own
        trace.stretch(lambda k: factor if k.name == kernel else 1.0)

    def slow(is_it: Callable[[Kernel], bool], trace: EditedTrace) -> None:
        trace.stretch(lambda k: 1 / 0.7 if is_it(k) else 1.0)

    def added(kernel: str, trace: EditedTrace, stream: str = "") -> None:
        trace.insert(kernel, within(trace), much, stream=stream)

    def gaps(trace: EditedTrace) -> None:
        many = quiet(trace)
        trace.delay(many, much * len(begins(trace)) / len(many))

    def matmul(kernel: Kernel) -> bool:
        return any(part in kernel.name for part in ("gemm", "nvjet", "sdpa"))

    reduced = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    yield "a slower matmul", "slower kernel", functools.partial(longer, recorded.matmul)
    yield "a slower elementwise op", "slower kernel", functools.partial(longer, recorded.vector)
    yield "a clock of 70%", "lower clock", functools.partial(slow, lambda kernel: True)
    yield "a clock of 70%, not the memory's", "lower clock", functools.partial(slow, matmul)
    yield "a copy on the device", "extra op", functools.partial(added, "MemcpyD2D")
    yield "a transpose", "extra op", functools.partial(added, "input_transpose_fusion_77")
    yield "an array from the host", "exposed transfer", functools.partial(added, "MemcpyH2D")
    yield (
        "an all-reduce",
        "exposed transfer",
        lambda trace: added(reduced, trace, "Stream #99"),
    )
    yield "a late host", "waiting host", lambda trace: trace.delay(begins(trace)[1:], much)
    yield "slow launches", "gaps between kernels", gaps


def edited(recorded: Recorded) -> Iterator[Case]:
    """Causes planted in a recorded trace."""
    for name, cause, plant in edits(recorded):
        gap = recorded.gap(plant)
        planted = gap.measured_seconds - recorded.step
        yield Case(f"{recorded.folder.name}: {name}", cause, planted, gap, recorded.healthy)


def loops(scratch: Path) -> Recorded:
    """A loop of four layers, with its host."""
    unpack("h100_loops.tar.xz", scratch)
    gemm, vector = "gemm_fusion_dot_general_1", "loop_multiply_fusion"
    return Recorded(scratch / "healthy", gemm, vector)


def gpt2(scratch: Path) -> Recorded:
    """The reference trainer's GPT-2 124M."""
    folder = scratch / "gpt2"
    trace = folder / "plugins" / "profile" / "1" / "gpu.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(lzma.decompress((_DATA / "h100_gpt2.xplane.pb.xz").read_bytes()))
    (folder / "programs").mkdir()
    (folder / "programs" / "step.mfu").write_bytes((_DATA / "h100_gpt2.mfu").read_bytes())
    gemm, vector = "gemm_fusion_dot_21", "input_add_multiply_reduce_fusion"
    return Recorded(folder, gemm, vector)


def _recorded(scratch: Path) -> Iterator[Case]:
    """Loops and steps that really were slow; each beside the plan of the healthy one."""
    healthy = loops(scratch)
    for name in ("sync_host", "host_transfer"):
        gap = plan_gap(read_profile(scratch / name), healthy.plan, "plan.json")
        planted = gap.measured_seconds - healthy.step
        cause = "waiting host"
        if name == "host_transfer":  # the copy itself is 2.49 ms, the host's preparation the rest
            planted -= 2.486e-3
        yield Case(f"recorded: {name}", cause, planted, gap, healthy.healthy)
    unpack("h100_faults.tar.xz", scratch / "faults")
    for step in (scratch / "faults").glob("*/step"):
        (step.parent / "programs").mkdir()
        packed = lzma.compress(step.read_bytes(), preset=0)
        (step.parent / "programs" / "train_step.mfu").write_bytes(packed)
    none = Recorded(scratch / "faults" / "none", "", "")
    # The planted seconds are what removing the fault brought (BROUGHT, test_on_an_h100.py). The
    # embedding's gradient takes 10 ms longer than planned in them: more than the attention does.
    for name, cause, planted in (
        ("float32", "slower kernel", 89.21e-3),
        ("chain", "extra op", 1.88e-3),
        ("attention", "more work", 6.46e-3),
    ):
        gap = plan_gap(read_profile(scratch / "faults" / name), none.plan, "plan.json")
        yield Case(f"recorded: {name}", cause, planted, gap, none.healthy)


# On a TPU.

_GATHERED = """\
HloModule jit_step, num_partitions=8

ENTRY %main (p: bf16[8192,8192], s: bf16[1024,8192]) -> bf16[8192,8192] {
  %p = bf16[8192,8192] parameter(0)
  %s = bf16[1024,8192] parameter(1)
BODY
}
"""
_ALL = (
    "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true"
)
_DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_START = (
    "%all-gather-start.1 = (bf16[1024,8192], bf16[8192,8192]) all-gather-start(%s), "
    f'{_ALL}, metadata={{op_name="jit(step)/jvp(mlp)/all_gather"}}'
)
_DOT = (
    f"%dot.1 = bf16[8192,8192] dot(%p, %p), {_DIMS}, "
    'metadata={op_name="jit(step)/jvp(mlp)/dot_general"}'
)
_DONE = (
    "%all-gather-done.1 = bf16[8192,8192] all-gather-done(%all-gather-start.1), "
    'metadata={op_name="jit(step)/jvp(mlp)/all_gather"}'
)
_LAST = (
    f"ROOT %dot.2 = bf16[8192,8192] dot(%dot.1, %all-gather-done.1), {_DIMS}, "
    'metadata={op_name="jit(step)/jvp(mlp)/dot_general"}'
)


def _gathered(target: Target, *lines: str) -> ProgramDump:
    text = _GATHERED.replace("BODY", "\n".join(lines))
    return ProgramDump(
        text=text, topology=Topology(device_kind=target.chip.device_kinds[0], devices=8)
    )


def collective(scratch: Path) -> Iterator[Case]:
    """An all-gather that the plan hides behind a matmul, and the trace does not."""
    target = parse_target(topology="v5e-8")
    hidden = _gathered(target, _START, _DOT, _DONE, _LAST)
    exposed = _gathered(target, _START, _DONE, _DOT, _LAST)
    plan, gaps = make_plan(hidden, target).to_json(), []
    for name, program in (("hidden", hidden), ("exposed", exposed)):
        write_scheduled(scratch / name, program, target)
        gaps.append(plan_gap(read_profile(scratch / name), plan, "plan.json"))
    planted = gaps[1].measured_seconds - gaps[0].measured_seconds
    yield Case("v5e-8: an all-gather not hidden", "exposed transfer", planted, gaps[1], gaps[0])


# On this machine's CPU.

Step = Callable[[Any, Any], tuple[Any, Any]]
_N = 768
_NAP = 0.25  # seconds
_TURNS = 3


def _step(
    head: Callable[[Any], Any] = lambda x: x, first: Callable[[Any, Any], Any] = jnp.matmul
) -> Step:
    """A step of three layers; `head` is applied to what goes in, `first` is a layer's matmul."""

    def loss_of(weights: Any, batch: Any) -> Any:
        with jax.named_scope("head"):
            x = head(batch)
        for number, matmul in enumerate((first, jnp.matmul, jnp.matmul)):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(matmul(x, weights[number]))
        return (x * x).sum()

    def step(weights: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(weights, batch)
        return weights - 1e-6 * grads, loss

    return step


def _napping(x: Any) -> Any:
    """A callback that sleeps."""

    def nap(y: Any) -> np.ndarray[Any, Any]:
        time.sleep(_NAP)
        return np.asarray(y)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + 0 * jax.pure_callback(nap, shape, jax.lax.stop_gradient(x))


def _sorted(x: Any) -> Any:
    for _ in range(4):
        x = x + 1e-9 * jax.lax.stop_gradient(jnp.sort(x))
    return x


def _more(x: Any) -> Any:
    y = jax.lax.stop_gradient(x)
    for _ in range(6):
        y = y @ jnp.ones((_N, _N))
    return x + 1e-20 * y


def _narrow(x: Any, w: Any) -> Any:
    """The same FLOPs in slices of one row, which no blocked kernel helps."""
    return jax.lax.map(lambda row: row @ w, x.reshape(_N, 1, _N)).reshape(_N, _N)


def _run(folder: Path, step: Step, *, nap: float = 0.0) -> Profile:
    """The fastest of several profiles: other processes make some slower."""
    weights, batch = jnp.full((3, _N, _N), 1e-3), jnp.ones((_N, _N))
    compiled = jax.jit(step).lower(weights, batch).compile()
    jax.block_until_ready(compiled(weights, batch))
    found = []
    for turn in range(_TURNS):
        with traced(folder / str(turn), compiled):
            for number in range(6):
                with jax.profiler.StepTraceAnnotation("train", step_num=number):
                    weights, loss = compiled(weights, batch)
                jax.block_until_ready(loss)
                time.sleep(nap)
        found.append(read_profile(folder / str(turn), peak_tflops_per_device=0.1))
    return min(found, key=lambda profile: profile.measured.step_seconds)


def as_plan(profile: Profile) -> Mapping[str, Any]:
    """A plan that predicts what was measured: there is none for CPUs."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for op in profile.measured.ops:
        if (record := op.op.record) is None or record.is_control:
            continue
        key = record.scope, record.phase, kind_of(record, {})
        none = {"seconds": 0.0, "runs": 0.0, "flops": 0.0, "hbm_bytes": 0.0, "instructions": {}}
        row = rows.setdefault(key, none)
        row["instructions"][record.name] = op.seconds
        for name, value in (
            ("seconds", op.seconds),
            ("runs", op.runs),
            ("flops", record.flops * op.runs),
            ("hbm_bytes", record.hbm_bytes * op.runs),
        ):
            row[name] += value
    ops = [dict(zip(("scope", "phase", "kind"), key, strict=True)) | rows[key] for key in rows]
    seconds = sum(row["seconds"] for row in ops)
    return {"target": "this machine", "step_time_seconds": seconds, "ops": ops}


def _on_cpu(scratch: Path) -> Iterator[Case]:
    """Each changed step right after the healthy one, as the machine's speed changes."""
    for number, (name, cause, step, nap, seconds) in enumerate(
        (
            ("a sleep in the loop", "waiting host", _step(), _NAP, _NAP),
            ("a callback that sleeps", "waiting host", _step(_napping), 0.0, _NAP),
            ("four sorts", "extra op", _step(_sorted), 0.0, None),
            ("six matmuls more", "extra op", _step(_more), 0.0, None),
            ("a layer row by row", "slower kernel", _step(first=_narrow), 0.0, None),
        )
    ):
        healthy = _run(scratch / f"cpu{number}", _step())
        plan = as_plan(healthy)
        gap = plan_gap(_run(scratch / f"cpu{number}_changed", step, nap=nap), plan, "plan.json")
        yield Case(f"CPU: {name}", cause, seconds, gap, plan_gap(healthy, plan, "plan.json"))


_KINDS: Mapping[str, Callable[[Path], Iterator[Case]]] = {
    "loop": lambda scratch: edited(loops(scratch)),
    "gpt2": lambda scratch: edited(gpt2(scratch)),
    "recorded": _recorded,
    "tpu": collective,
    "cpu": _on_cpu,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
