"""Two profiles: every second of the difference has a reason, by arithmetic on traces by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mfu_jax import cli
from mfu_jax.dumps import ModelFlops, ProgramDump, write
from mfu_jax.profiling.profile import read_profile
from mfu_jax.profiling.report.comparison import Comparison, TimeChange, by_reason, by_scope, compare
from mfu_jax.profiling.report.comparison_text import changes_table
from tests.support import accelerator_traces
from tests.support.accelerator_traces import write_trace
from tests.support.xspace import Plane

US = 10**6  # picoseconds
STEPS = 3


def program(rows: int, number: int) -> str:
    """norm, then mlp; XLA numbers them anew in each program."""
    return f"""HloModule jit_step

%matmul (a: bf16[{rows},1024], b: bf16[1024,2048]) -> bf16[{rows},2048] {{
  %a = bf16[{rows},1024] parameter(0)
  %b = bf16[1024,2048] parameter(1)
  ROOT %d = bf16[{rows},2048] dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/jvp(mlp)/dot_general"}}
}}

ENTRY %main (x: bf16[{rows},1024], w: bf16[1024,2048]) -> bf16[{rows},2048] {{
  %x = bf16[{rows},1024] parameter(0)
  %w = bf16[1024,2048] parameter(1)
  %norm.{number} = bf16[{rows},1024] negate(%x), metadata={{op_name="jit(step)/jvp(norm)/neg"}}
  %extra.{number} = bf16[{rows},1024] cosine(%norm.{number}), metadata={{op_name="jit(step)/jvp(extra)/cos"}}
  ROOT %fusion.{number} = bf16[{rows},2048] fusion(%norm.{number}, %w), kind=kOutput, calls=%matmul
}}
"""  # noqa: E501


def write_profile(folder: Path, number: int, rows: int, ops: dict[str, int], length: int) -> Path:
    """Steps of `length` µs, in which ops of so many µs run one after the other."""
    text = program(rows, number)
    model = ModelFlops(per_device=2 * rows * 1024 * 2048, convention="exact")
    write(ProgramDump(text=text, model=model), folder / "programs" / "step.mfu")
    plane = Plane("/device:TPU:0", device_type_string="TPU v5 lite")
    starts = [step * length * US for step in range(STEPS)]
    busy = sum(ops.values()) * US
    plane.line("XLA Modules", [("jit_step(7)", start, busy, {}) for start in starts])
    events = []
    for start in starts:
        for op, time in ops.items():
            events.append((f"%{op}.{number} = bf16[] {op}(%p)", start, time * US, {}))
            start += time * US
    plane.line("XLA Ops", events)
    write_trace(folder, plane)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Twice the rows: norm 8 → 20 µs, mlp 30 → 50 µs; extra is new (5 µs); idle 12 → 25 µs."""
    folder = tmp_path_factory.mktemp("profiles")
    before = write_profile(folder / "a", 1, 512, {"norm": 8, "fusion": 30}, 50)
    ops = {"norm": 20, "extra": 5, "fusion": 50}
    return before, write_profile(folder / "b", 42, 1024, ops, 100)


@pytest.fixture(scope="module")
def comparison(folders: tuple[Path, Path]) -> Comparison:
    return compare(*map(read_profile, folders))


def changes_of(comparison: Comparison) -> dict[str, TimeChange]:
    return {change.scope: change for change in comparison.changes}


def test_every_second_has_a_reason(comparison: Comparison) -> None:
    assert comparison.seconds == pytest.approx(50e-6)
    assert sum(change.seconds for change in comparison.changes) == pytest.approx(50e-6)
    assert sum(by_scope(comparison.changes).values()) == pytest.approx(50e-6)
    assert by_reason(comparison.changes) == pytest.approx(
        {
            "more work": 38e-6,  # twice as many FLOPs, 30 µs, and bytes, 8 µs
            "waiting host": 13e-6,
            "extra op": 5e-6,
            "faster kernel": -6e-6,  # mlp −10 µs of 60 at the old speed, norm +4 of 16
        }
    )


def test_long_scopes_that_differ_in_their_last_part_are_told_apart() -> None:
    parent = "gradient_accumulation/decoder/layers/self_attention/attention_op"
    for name in ("qk_product", "wv_product"):
        change = TimeChange(
            scope=f"{parent}/{name}", phase="forward", kind="dot", before=1.0, after=2.0
        )
        lines = changes_table([change], 0)
        assert any(name in line for line in lines), lines


def test_the_change_of_the_step_is_said_in_words(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """50 µs a step before, 100 µs after."""
    before, after = map(str, folders)
    for pair, words in (
        ([before, after], "a step is 50.000 µs (100.0%) longer"),
        ([after, before], "a step is 50.000 µs (50.0%) shorter"),
        ([before, before], "a step takes the same time"),
    ):
        assert cli.main(["profile", *pair]) == 0
        assert words in capsys.readouterr().out.splitlines()


def test_ops_are_joined_whatever_their_numbers(comparison: Comparison) -> None:
    changes = changes_of(comparison)
    mlp, norm, extra = changes["mlp"], changes["norm"], changes["extra"]
    assert mlp.why == pytest.approx({"more work": 30e-6, "faster kernel": -10e-6})
    assert norm.why == pytest.approx({"more work": 8e-6, "slower kernel": 4e-6})
    assert mlp.flops == (2 * 512 * 1024 * 2048, 2 * 1024 * 1024 * 2048)
    assert (mlp.before, mlp.after) == pytest.approx((30e-6, 50e-6))
    assert norm.hbm_bytes == (2 * 2 * 512 * 1024, 2 * 2 * 1024 * 1024)
    assert (extra.before, extra.runs) == (0, (0, 1))
    assert next(iter(changes)) == "mlp"


def test_rows_fit_a_terminal_and_say_all(comparison: Comparison) -> None:
    mlp = changes_of(comparison)["mlp"]
    scope = "decoder/layers/self_attention/query_projection/einsum/mlp"
    lines = changes_table([replace(mlp, scope=scope, op="a_kernel_of_a_long_name" * 2)], 0)
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert "30.000 µs 50.000 µs +20.000 µs" in text
    assert "more work +30.000 µs, faster kernel -10.000 µs; 2.147 → 4.295 GFLOP, " in text
    assert "".join(text.split()).count("a_kernel_of_a_long_name") == 2
    assert scope in "".join(text.split())


def test_backwards_the_new_op_is_gone(folders: tuple[Path, Path]) -> None:
    back = compare(*map(read_profile, reversed(folders)))
    reasons = by_reason(back.changes)
    assert reasons["missing op"] == pytest.approx(-5e-6)
    assert reasons["less work"] == pytest.approx(-35e-6)  # half of 50 µs, and of 20
    assert sum(reasons.values()) == pytest.approx(-50e-6)


def test_other_hardware_or_another_dtype_is_no_lower_clock(tmp_path: Path) -> None:
    accelerator_traces.write_program(tmp_path, "TPU v5 lite")
    write_trace(tmp_path, accelerator_traces.tpu())
    before = read_profile(tmp_path)
    slow = [replace(op, seconds=2 * op.seconds) for op in before.measured.ops]
    step_seconds = before.measured.step_seconds + before.measured.busy_seconds
    after = replace(before, measured=replace(before.measured, ops=slow, step_seconds=step_seconds))
    assert by_reason(compare(before, after).changes)["lower clock"] > 50e-6

    peak = replace(before.peaks.main, dtype="fp32")
    for other in (
        replace(after, measured=replace(after.measured, kind="TPU v4")),
        replace(after, peaks=replace(before.peaks, main=peak)),
    ):
        reasons = by_reason(compare(before, other).changes)
        assert "lower clock" not in reasons
        assert reasons["slower kernel"] > 50e-6


def test_a_profile_equals_itself(folders: tuple[Path, Path]) -> None:
    same = compare(read_profile(folders[0]), read_profile(folders[0]))
    assert (same.seconds, same.changes, by_reason(same.changes)) == (0, (), {})


def test_the_command(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    names = list(map(str, folders))
    assert cli.main(["profile", *names]) == 0
    text = capsys.readouterr().out
    assert "a step is 50.000 µs (100.0%) longer" in text
    assert "more work +30.000 µs, faster kernel -10.000 µs" in text
    assert cli.main(["profile", *names, "top=1"]) == 0
    assert "and 3 more, +30.000 µs; top=0 shows all" in capsys.readouterr().out
    assert cli.main(["profile", *names, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seconds"] == pytest.approx(50e-6)
    assert sum(answer["by_reason"].values()) == pytest.approx(50e-6)
    assert answer["changes"][0]["scope"] == "mlp"
    for wrong in (["--html", "--json"], ["by=scope"], ["perfetto=x"], [names[0]]):
        assert cli.main(["profile", *names, *wrong]) == 2
