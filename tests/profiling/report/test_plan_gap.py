"""A plan beside recorded H100 traces, in which a cause of lost time is planted."""

from __future__ import annotations

import dataclasses
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mfu_jax import cli
from mfu_jax.dumps import load
from mfu_jax.errors import UserError
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import parse_target
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.join.ops import JoinedOp, work_by_name
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.plan_gap import PlanGap, plan_gap
from mfu_jax.profiling.timeline.devices import OpName, Program

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop's whole trace (h100_loops.tar.xz), and the trainer's GPT-2."""
    folder = tmp_path_factory.mktemp("traces")
    with tarfile.open(DATA / "h100_loops.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    trace = folder / "gpt2" / "plugins" / "profile" / "1" / "gpu.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(lzma.decompress((DATA / "h100_gpt2.xplane.pb.xz").read_bytes()))
    (folder / "gpt2" / "programs").mkdir()
    shutil.copy(DATA / "h100_gpt2.mfu", folder / "gpt2" / "programs" / "step.mfu")
    return folder


@cache
def planned(folder: Path) -> tuple[Profile, dict[str, Any]]:
    """A trace, and what `mfu-jax plan --json` prints of its program."""
    (program,) = (folder / "programs").iterdir()
    plan = make_plan(load(program), parse_target(hardware="h100", devices=1))
    return read_profile(folder), json.loads(json.dumps(plan.to_json()))


def planted(profile: Profile, change: Callable[[OpTime], float], *more: OpTime) -> Profile:
    """The profile with each op this many times as long, and more ops."""
    measured = profile.measured
    ops = [dataclasses.replace(op, seconds=op.seconds * change(op)) for op in measured.ops]
    ops = sorted([*ops, *more], key=lambda op: -op.seconds)
    added = sum(op.seconds for op in ops) - measured.busy_seconds
    step = measured.step_seconds + added
    changed = dataclasses.replace(measured, ops=tuple(ops), step_seconds=step)
    return dataclasses.replace(profile, measured=changed)


def unnamed(name: str, seconds: float) -> OpTime:
    joined = JoinedOp(OpName(Program("jit_step"), name), None, None, *work_by_name(name))
    return OpTime(op=joined, seconds=seconds, self_seconds=seconds, runs=1.0)


def late(profile: Profile, seconds: float) -> Profile:
    measured = profile.measured
    idle = {**measured.idle, "late": seconds}
    step = measured.step_seconds + seconds
    changed = dataclasses.replace(measured, idle=idle, step_seconds=step)
    return dataclasses.replace(profile, measured=changed)


def same(op: OpTime) -> float:
    return 1.0


def slow_matmul(op: OpTime) -> float:
    largest = "gemm_fusion_dot_general.1", "__cublas$gemm.dw"
    record = op.op.record
    is_it = record is not None and (record.name in largest or record.scope.endswith("mlp/wi_0"))
    return 1.8 if is_it else 1.0


def slow_vector(op: OpTime) -> float:
    record = op.op.record
    return 3.0 if record is not None and not record.flops and "fusion" in record.name else 1.0


PLANTED: dict[str, tuple[Callable[[Profile], Profile], str]] = {
    "a slower matmul": (lambda p: planted(p, slow_matmul), "slower kernel"),
    "slower elementwise kernels": (lambda p: planted(p, slow_vector), "slower kernel"),
    "a clock of 70%": (lambda p: planted(p, lambda op: 1 / 0.7), "lower clock"),
    "a clock of 70%, not of the memory's": (
        lambda p: planted(p, lambda op: 1 / 0.7 if op.op.record and op.op.record.flops else 1.0),
        "lower clock",
    ),
    "an added copy": (
        lambda p: planted(p, same, unnamed("MemcpyD2D", 0.2 * p.measured.step_seconds)),
        "extra op",
    ),
    "an added op": (
        lambda p: planted(p, same, unnamed("transpose.9", 0.2 * p.measured.step_seconds)),
        "extra op",
    ),
    "an exposed collective": (
        lambda p: planted(
            p,
            same,
            unnamed("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0.2 * p.measured.step_seconds),
        ),
        "exposed transfer",
    ),
    "a late host": (lambda p: late(p, 0.2 * p.measured.step_seconds), "waiting host"),
}


def gap_of(profile: Profile, plan: dict[str, Any]) -> PlanGap:
    gap = plan_gap(profile, plan, "plan.json")
    more = gap.measured_seconds - gap.planned_seconds
    assert sum(change.seconds for change in gap.changes) == pytest.approx(more, rel=1e-3)
    assert sum(gap.by_reason().values()) == pytest.approx(more, rel=1e-3)
    return gap


@pytest.mark.parametrize("trace", ["healthy", "gpt2"])
@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_comes_first_and_all_sum_to_the_difference(
    traces: Path, trace: str, cause: str
) -> None:
    profile, plan = planned(traces / trace)
    plant, expected = PLANTED[cause]
    assert next(iter(gap_of(plant(profile), plan).by_reason())) == expected


def test_a_healthy_step_is_as_planned(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    gap = gap_of(profile, plan)
    assert abs(gap.measured_seconds / gap.planned_seconds - 1) < 0.05
    assert {"lower clock", "extra op", "op that did not run"}.isdisjoint(gap.by_reason())


def test_what_a_loop_really_waited_for(traces: Path) -> None:
    _, plan = planned(traces / "healthy")
    host = gap_of(planned(traces / "sync_host")[0], plan).by_reason()
    assert next(iter(host)) == "waiting host"
    copied = gap_of(planned(traces / "host_transfer")[0], plan).by_reason()
    assert list(copied)[:2] == ["waiting host", "exposed transfer"]
    assert copied["exposed transfer"] == pytest.approx(2.486e-3, abs=1e-6)


def test_the_command_prints_the_gap_in_text_json_and_page(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = traces / "host_transfer", tmp_path / "plan.json"
    file.write_text(json.dumps(planned(traces / "healthy")[1]))
    assert cli.main(["profile", str(folder), "--plan", str(file)]) == 0
    assert "gap to the plan for 1 × H100 SXM: planned 6.7" in capsys.readouterr().out
    assert cli.main(["profile", str(folder), f"plan={file}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["plan"]
    assert sum(row["seconds"] for row in answer["changes"]) == pytest.approx(answer["seconds"])
    page = tmp_path / "page.html"
    assert cli.main(["profile", str(folder), f"plan={file}", "--html", str(page)]) == 0
    assert "Gap to the plan" in page.read_text(encoding="utf-8")


def test_a_plan_without_ops_is_one_line(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    with pytest.raises(UserError, match="has no times by op"):
        plan_gap(profile, {key: plan[key] for key in plan if key != "ops"}, "plan.json")
