"""A step of two programs: one waterfall for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.dumps import ModelFlops, ProgramDump, write
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.page import page
from mfu_jax.profiling.report.text import render
from tests.support import html_pages
from tests.support.accelerator_traces import write_trace
from tests.support.xspace import Plane

US = 10**6  # picoseconds
STEPS = 3
PEAK = 197e12  # dense bf16 FLOP/s of a TPU v5e, by its data sheet
RUNS = ((0, 10, "rollout(1)"), (12, 10, "rollout(1)"), (40, 40, "update(2)"))
FLOPS = {"rollout": 2 * 256 * 512 * 512, "update": 2 * 1024 * 512 * 512}


def program(name: str) -> str:
    rows = FLOPS[name] // (2 * 512 * 512)
    return f"""HloModule jit_{name}

ENTRY %main (x: bf16[{rows},512], w: bf16[512,512]) -> bf16[{rows},512] {{
  %x = bf16[{rows},512] parameter(0)
  %w = bf16[512,512] parameter(1)
  ROOT %dot.1 = bf16[{rows},512] dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit({name})/jvp({name}_scope)/dot_general"}}
}}
"""  # noqa: E501


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Of each 100 µs: two rollouts of 10 µs, the second from 12 on; then an update from 40 to 80.

    The ops of a rollout take 8 of its 10 µs, that of the update all of its 40.
    """
    for name, flops in FLOPS.items():
        model = ModelFlops(per_device=flops, convention="exact")
        write(ProgramDump(text=program(name), model=model), tmp_path / f"programs/{name}.mfu")
    plane = Plane("/device:TPU:0", device_type_string="TPU v5 lite")
    modules, ops = [], []
    for step in range(STEPS):
        for start, length, module in (
            (0, 10, "rollout(1)"),
            (12, 10, "rollout(1)"),
            (40, 40, "update(2)"),
        ):
            begin = (100 * step + start) * US
            modules.append((f"jit_{module}", begin, length * US, {}))
            busy = 8 if length == 10 else 40
            ops.append(("%dot.1 = bf16[] dot(%x, %w)", begin, busy * US, {}))
    plane.line("XLA Modules", modules)
    plane.line("XLA Ops", ops)
    write_trace(tmp_path, plane)
    return read_profile(tmp_path)


def test_each_program_has_a_waterfall(profile: Profile) -> None:
    update, rollout = profile.programs
    assert (update.name, rollout.name) == ("jit_update", "jit_rollout")
    assert (update.executions, rollout.executions) == (1, 2)
    assert (update.seconds, rollout.seconds) == pytest.approx((40e-6, 20e-6))
    assert update.mfu == pytest.approx(FLOPS["update"] / PEAK / 40e-6)
    assert rollout.mfu == pytest.approx(2 * FLOPS["rollout"] / PEAK / 20e-6)
    bars = {bar.name: bar for bar in rollout.waterfall}
    assert bars["idle: within the program"].seconds == pytest.approx(4e-6)
    assert list(bars["MFU"].scopes) == ["rollout_scope"]
    for program in profile.programs:
        assert sum(bar.seconds for bar in program.waterfall) == pytest.approx(program.seconds)
        assert sum(bar.mfu_points for bar in program.waterfall) == pytest.approx(100)


def test_the_step_has_the_model_of_its_main_program(profile: Profile) -> None:
    bars = {bar.name: bar for bar in profile.waterfall}
    assert profile.measured.step_seconds == pytest.approx(100e-6)
    assert list(bars["MFU"].scopes) == ["update_scope"]
    others = bars["matmuls of other programs"].seconds
    assert others == pytest.approx(2 * FLOPS["rollout"] / PEAK)


def test_the_json_and_the_terminal_have_them(profile: Profile) -> None:
    rows = profile.to_json()["programs"]
    assert [row["name"] for row in rows] == ["jit_update", "jit_rollout"]
    assert rows[1]["waterfall"][-1]["name"] == "MFU"
    text = render(profile, by=["program"])
    assert "jit_rollout: 20.000 µs of a step in 2 executions" in text
    scopes = render(profile, by=["scope"])
    assert "jit_rollout" not in scopes
    assert "a step runs 2 programs; by=program shows each alone" in scopes


def test_the_page_has_a_waterfall_for_each(profile: Profile) -> None:
    text = page(profile)
    programs = [
        e.attributes["data-program"]
        for e in html_pages.elements(text)
        if "data-program" in e.attributes
    ]
    assert programs == ["jit_update", "jit_rollout"]
    parts = text.split("data-program=")[1:]
    for part, seconds in zip(parts, (40e-6, 20e-6), strict=True):
        chart = part.partition("</section>")[0]
        shown = [float(p.partition('"')[0]) for p in chart.split('data-seconds="')[1:]]
        assert sum(shown) == pytest.approx(seconds)


def test_given_model_flops_are_those_of_the_main_program(tmp_path: Path, profile: Profile) -> None:
    given = read_profile(tmp_path, model_flops=1000)
    update, rollout = given.programs
    assert update.mfu == pytest.approx(1000 / PEAK / 40e-6)
    assert rollout.mfu == profile.programs[1].mfu
