"""`mfu-jax dump`: programs are stored, shown, and read by `mfu-jax compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.dumps import ModelFlops, ProgramDump, load, write
from tests.support.messages import is_told

# 2 · 4 · 8 · 16 = 1024 FLOPs.
TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SMALL = ("emb_dim=16", "mlp_dim=32", "num_decoder_layers=1", "num_query_heads=2", "head_dim=8")
TINY = (*SMALL, "num_kv_heads=2", "vocab_size=32", "max_target_length=8", "per_device_batch_size=1")


@pytest.fixture
def dump(tmp_path: Path) -> str:
    path = tmp_path / "step.mfu"
    overheads = {"pipeline bubble": 14}
    model = ModelFlops(per_device=1000, convention="exact", dense=1010, overheads=overheads)
    write(ProgramDump(text=TEXT, cost={"flops": 2048.0}, model=model), path)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_compare_takes_the_numbers_of_a_dump(dump: str, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = printed(capsys, "compare", dump)
    assert (ledger["executed"], ledger["model"], ledger["xla_reported"]) == (1024, 1000, 2048)
    assert ledger["convention"] == "exact"
    lines = {line["label"]: line["flops"] for line in ledger["lines"]}
    assert (lines["masked pairs"], lines["pipeline bubble"], ledger["residual"]) == (10, 14, 0)


def test_numbers_that_are_given_win(dump: str, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = printed(capsys, "compare", dump, "model_flops=900", "xla=5")
    assert (ledger["model"], ledger["convention"], ledger["xla_reported"]) == (900, "maxtext", 5)
    assert [line["label"] for line in ledger["lines"]][1] != "masked pairs"


def test_a_dump_is_shown(dump: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", dump]) == 0
    shown = capsys.readouterr().out
    assert "jit_f" in shown
    assert f"{len(TEXT)} characters, complete" in shown
    assert "1,000 per device, convention exact" in shown
    assert printed(capsys, "dump", dump)["model"]["dense"] == 1010


def test_a_text_of_xla_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elided = TEXT.replace(
        "ENTRY", "%f () -> s32[20] {\n  ROOT %c = s32[20] constant({...})\n}\n\nENTRY"
    )
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations.txt").write_text(elided)
    out = tmp_path / "out.mfu"
    assert main(["dump", str(out), f"xla={tmp_path}"]) == 0
    assert "1 large constants are left out" in capsys.readouterr().out
    assert load(out).text == elided


@pytest.mark.full
def test_the_step_of_a_config_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "step.mfu")
    assert main(["dump", out, *TINY]) == 0
    capsys.readouterr()
    assert printed(capsys, "compare", out) == printed(capsys, "compare", *TINY)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected a file that ends with .mfu"),
        (["step.hlo"], "expected a file that ends with .mfu"),
        (["none.mfu"], "cannot be read"),
        (["a.mfu", "b.mfu"], "b.mfu"),
        (["a.mfu", "stesp=3"], "did you mean 'steps'?"),
        (["a.mfu", "xla=nowhere"], "cannot be read"),
        (["a.mfu", "xla=.", "modle=x"], "did you mean 'module'?"),
        (["a.mfu", "b", "xla=."], "expected one file to write"),
        (["a.mfu", "xla=."], "no optimised program"),
        (["a.mfu", "--jsno"], "did you mean '--json'?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dump", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert is_told(error, hint=True)
    assert not list(tmp_path.iterdir())
