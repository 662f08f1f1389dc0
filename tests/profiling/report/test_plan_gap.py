"""A plan beside recorded H100 traces, in which a cause of lost time is planted."""

from __future__ import annotations

import dataclasses
import json
import lzma
import shutil
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
from tests.support.archives import unpack
from tests.support.metrics_lines import line

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop's whole trace (h100_loops.tar.xz), and the trainer's GPT-2."""
    folder = tmp_path_factory.mktemp("traces")
    unpack("h100_loops.tar.xz", folder)
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


@pytest.mark.parametrize("trace", ["healthy", "sync_host", "gpt2"])
def test_a_plan_of_the_program_that_ran_is_joined_op_by_op(traces: Path, trace: str) -> None:
    profile, plan = planned(traces / trace)
    for row in plan["ops"]:
        assert sum(row["instructions"].values()) == pytest.approx(row["seconds"])
    gap = gap_of(profile, plan)
    rows = [row for row in gap.changes if row.op]
    assert len({(row.scope, row.phase, row.kind, row.op) for row in rows}) == len(rows)
    assert sum(row.after for row in rows) > 0.99 * profile.measured.busy_seconds
    assert gap.notes == ()
    names = {op.op.record.name: op.seconds for op in profile.measured.ops if op.op.record}
    assert all(row.after == pytest.approx(names[row.op]) for row in rows)


def test_a_plan_of_another_program_is_joined_by_scope(traces: Path) -> None:
    gap = gap_of(planned(traces / "gpt2")[0], planned(traces / "healthy")[1])
    assert not any(row.op for row in gap.changes)
    assert any("of another program" in note for note in gap.notes)


def test_the_clock_is_not_blamed_beyond_its_reading(traces: Path) -> None:
    profile, plan = planned(traces / "gpt2")
    slow = planted(profile, lambda op: 1 / 0.7)
    unread, low, full = (plan_gap(slow, plan, "plan.json", share) for share in (None, 0.7, 1.0))
    assert [next(iter(gap.by_reason())) for gap in (unread, low, full)] == [
        *("lower clock", "lower clock", "slower kernel")
    ]
    assert "no reading" in unread.notes[0]
    assert low.notes == ("the clock was read at 70.0% of the one of the peak",)
    assert "lower clock" not in full.by_reason()


def test_more_work_takes_no_more_than_was_measured(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    ops = [{**row, "hbm_bytes": row["hbm_bytes"] / 10**6, "flops": 0} for row in plan["ops"]]
    gap = gap_of(profile, {**plan, "ops": ops})
    assert {why for row in gap.changes for why in row.why} >= {"more work", "faster kernel"}
    for row in gap.changes:
        assert abs(sum(row.why.values()) - row.seconds) < 1e-9
        assert max(row.why.values()) <= row.after


def test_other_hardware_is_no_clock(traces: Path) -> None:
    profile, plan = planned(traces / "gpt2")
    gap = plan_gap(planted(profile, lambda op: 2.0), {**plan, "hardware": "B200"}, "plan.json")
    assert gap.notes[0] == "the plan is for B200, the profile of NVIDIA H100 80GB HBM3: " + (
        "other hardware"
    )
    assert "lower clock" not in gap.by_reason()


def test_ops_that_may_be_the_missing_ones_are_unexplained(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    measured = profile.measured
    ops = [
        op if op.op.record is None or op.op.record.flops else unnamed("kernel", op.seconds)
        for op in measured.ops
    ]
    nameless = dataclasses.replace(profile, measured=dataclasses.replace(measured, ops=tuple(ops)))
    gap = gap_of(nameless, plan)
    assert {"extra op", "missing op"}.isdisjoint(gap.by_reason())
    assert abs(gap.by_reason()["unexplained"]) < 0.05 * gap.measured_seconds
    known = sum(op.seconds for op in measured.ops)
    lost = dataclasses.replace(
        profile, measured=dataclasses.replace(measured, step_seconds=2 * known)
    )
    rest = gap_of(lost, plan).by_reason()
    assert next(iter(rest)) == "unexplained"


def test_a_healthy_step_is_as_planned(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    gap = gap_of(profile, plan)
    assert abs(gap.measured_seconds / gap.planned_seconds - 1) < 0.05
    assert {"lower clock", "extra op", "unexplained"}.isdisjoint(gap.by_reason())
    assert abs(gap.by_reason()["missing op"]) < 0.005 * gap.measured_seconds  # loops' conditions


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
    plan = planned(traces / "healthy")[1]
    file.write_text(json.dumps(plan))
    assert cli.main(["profile", str(folder), "--plan", str(file)]) == 0
    took, seconds = 22.768e-3, plan["step_time_seconds"]
    assert (
        f"{took / seconds:.3g} × the {1e3 * seconds:.3f} ms planned for 1 × H100 SXM: "
        "waiting host 13.7" in capsys.readouterr().out
    )
    assert cli.main(["profile", str(folder), f"plan={file}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["plan"]
    assert sum(row["seconds"] for row in answer["changes"]) == pytest.approx(answer["seconds"])
    page = tmp_path / "page.html"
    assert cli.main(["profile", str(folder), f"plan={file}", "--html", str(page)]) == 0
    assert "Gap to the plan" in page.read_text(encoding="utf-8")


def test_the_clock_is_that_of_the_runs_own_readings(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run", tmp_path / "plan.json"
    shutil.copytree(traces / "healthy", run / "profile")
    (run / "metrics.jsonl").write_text(line(3, 0.1, **{"gpu/sm_clock_mhz": 1281.0}))
    file.write_text(json.dumps(planned(traces / "healthy")[1]))
    for folder in (run, run / "profile"):
        assert cli.main(["profile", str(folder), "--plan", str(file), "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["plan"]["notes"]
        assert notes == ["the clock was read at 70.0% of the one of the peak"]  # 1,830 MHz


def test_a_plan_without_ops_is_one_line(traces: Path) -> None:
    profile, plan = planned(traces / "healthy")
    with pytest.raises(UserError, match="has no times by op"):
        plan_gap(profile, {key: plan[key] for key in plan if key != "ops"}, "plan.json")
