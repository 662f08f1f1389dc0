"""Plans of compiled steps: what of a run's settings and of the user's they take."""

from __future__ import annotations

import lzma
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning import step_sources
from mfu_jax.planning.compilation.compiling import PROFILE_FLAG, Compiled, Limits
from mfu_jax.planning.targets import parse_target
from tests.support.fake_compiler import TEXT
from tests.support.paths import RECORDED


@pytest.mark.parametrize(
    ("run_flags", "flags", "said"),
    [
        (None, (), "the times hold at --xla_tpu_dvfs_p_state=7"),
        (None, ("--xla_tpu_dvfs_p_state=3",), "clock state is --xla_tpu_dvfs_p_state=3"),
        ((), (), "clock state is default"),
        ((), ("--xla_tpu_dvfs_p_state=7",), ""),
        (("--xla_tpu_dvfs_p_state=7",), ("--xla_tpu_dvfs_p_state=3",), "p_state=3"),
    ],
)
def test_a_given_clock_state_is_the_plans_in_place_of_a_runs_too(
    run_flags: tuple[str, ...] | None,
    flags: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def compiled(request: Any, **_: Any) -> Compiled:
        asked.append(request.flags)
        return Compiled(ProgramDump(text=TEXT))

    monkeypatch.setattr(step_sources.cache, "compile_cached", compiled)
    source: Any = SimpleNamespace(
        module="", python=sys.executable, words=list, identity=dict, named=str
    )
    source.work = lambda values: None
    plan = step_sources.compiled_plan(
        source,
        parse_target(topology="tpu7x:2x2x1"),
        {},
        limits=Limits(),
        folder=None,
        flags=flags,
        run_flags=run_flags,
    )
    assert asked == [(*(run_flags or ()), *flags)]
    assert plan.compiled_by.startswith(f"jax {jax.__version__}")
    notes = [note for note in plan.notes if "p_state" in note]
    assert [said in note for note in notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("hardware", "path", "profiles"),
    [
        ({"hardware": "h100", "devices": 8}, "lhs_pbtxt/70b.pbtxt", [False, True]),
        ({"hardware": "h100", "devices": 8}, __file__, [False]),  # XLA reads it
        ({"topology": "v6e-8"}, "70b.pbtxt", [False]),
    ],
)
def test_a_gpu_run_scheduled_by_a_profile_is_planned_with_the_plans_own(
    hardware: dict[str, Any], path: str, profiles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def compiled(request: Any, **_: Any) -> Compiled:
        asked.append(request)
        return Compiled(ProgramDump(text=TEXT))

    monkeypatch.setattr(step_sources.cache, "compile_cached", compiled)
    source: Any = SimpleNamespace(
        module="", python=sys.executable, words=list, identity=dict, named=str
    )
    source.work = lambda values: None
    flag = f"--{PROFILE_FLAG}={path}"
    plan = step_sources.compiled_plan(
        source, parse_target(**hardware), {}, limits=Limits(), folder=None, run_flags=(flag,)
    )
    assert [bool(request.profile) for request in asked] == profiles
    assert [request.flags == (flag,) for request in asked] == [len(profiles) == 1] * len(profiles)
    assert any("the run's profile" in note for note in plan.notes) == (len(profiles) > 1)


def test_a_flag_given_without_a_run_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_tpu_scheduler_percent_shared_memory_limit=100"
    text = lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()
    memory = {"peak_memory_in_bytes": 91 * 2**30, "argument_size_in_bytes": 2**30}
    found = Compiled(ProgramDump(text=text, memory=memory))
    monkeypatch.setattr(step_sources.cache, "compile_cached", lambda request, **_: found)
    source: Any = SimpleNamespace(
        module="", python=sys.executable, words=list, identity=dict, named=str
    )
    source.work = lambda values: None
    target = parse_target(topology="v5p:8x8x8")

    def proposes(*flags: str) -> bool:
        plan = step_sources.compiled_plan(
            source, target, {}, limits=Limits(), folder=None, flags=flags
        )
        return any(flag in change.change for change in plan.changes)

    assert proposes()
    assert not proposes(flag)
