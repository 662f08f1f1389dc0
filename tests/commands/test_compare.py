"""`mfu-jax compare` on the text of a compiled program."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.commands import compare
from mfu_jax.dumps import ProgramDump, write
from mfu_jax.flops.lengths import Lengths
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.messages import is_told
from tests.support.paths import RECORDED

# 2 · 4 · 8 · 16 = 1024 FLOPs.
PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.hlo"
    path.write_text(PROGRAM)
    return path


def test_the_ledger_of_a_text_as_json(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["model_flops=1e3", "--dense=1010", "xla=2048"]
    assert main(["compare", str(program), *numbers, "convention=exact", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert (ledger["executed"], ledger["model"], ledger["xla_reported"]) == (1024, 1000, 2048)
    assert ledger["convention"] == "exact"
    assert {"masked pairs": 10}.items() <= {
        line["label"]: line["flops"] for line in ledger["lines"]
    }.items()


@reads_recorded_kernels
def test_the_rows_of_each_group_are_given_or_in_the_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = RECORDED / "v6e_megablox.hlo.xz"
    visit = 2 * programs.TILE * programs.WIDTH * programs.HIDDEN  # a tile of rows, three times
    assert main(["compare", str(recorded), "group_sizes=100,200,0,212", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["executed"] == 3 * 6 * visit
    text, sizes = lzma.decompress(recorded.read_bytes()).decode(), (128, 128, 0, 1)
    write(ProgramDump(text=text, lengths=Lengths(group_sizes=sizes)), tmp_path / "step.mfu")
    assert main(["compare", str(tmp_path / "step.mfu"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["executed"] == 3 * 3 * visit
    assert main(["compare", str(recorded), "group_sizes=many"]) == 2
    assert "group_sizes" in capsys.readouterr().err


def test_without_model_flops_the_convention_says_so(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(program)]) == 0
    assert "none: pass model_flops=…" in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_texts_are_read(
    suffix: str, compress, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = program.with_suffix(f".hlo{suffix}")
    path.write_bytes(compress(PROGRAM.encode()))
    assert main(["compare", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["executed"] == 1024


TINY = (
    "num_decoder_layers=2 emb_dim=32 num_query_heads=2 num_kv_heads=2 head_dim=16 mlp_dim=64 "
    "max_target_length=16 per_device_batch_size=1"
).split()


@pytest.mark.full
def test_the_trainers_step_is_compiled_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    ledgers = []
    for scan in ("true", "false"):
        assert main(["compare", *TINY, f"scan_layers={scan}", "--json"]) == 0
        ledgers.append(json.loads(capsys.readouterr().out))
    scanned, unrolled = ledgers
    # Per layer 4 projections of 32 × 32 and 3 matrices of 32 × 64, the head of 32 × 256; 16 tokens;
    # 2 FLOPs, 3 passes. Attention: 2 matmuls over 16² pairs of width 32.
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 256
    attention = 2 * 2 * 16 * 16 * 32
    for ledger in ledgers:
        assert ledger["executed"] == 3 * 2 * (16 * weights + attention)
        assert ledger["model"] == 3 * 2 * (16 * weights + attention // 2)
        assert ledger["residual"] == 0
    assert scanned["xla_reported"] < scanned["executed"] < unrolled["xla_reported"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["program.hlo", "modle_flops=3"], "did you mean 'model_flops'?"),
        (["program.hlo", "emb_dim=3"], "belongs with a YAML file, not with HLO text"),
        (["program.hlo", "model_flops=2GFLOP"], "usually a unit was left on it"),
        (["program.hlo", "other.hlo"], "expected one file with HLO text"),
        (["torn.hlo.xz"], "cannot be read"),
        (["nowhere.hlo"], "cannot be read"),
        (["bomb.hlo.gz"], "cannot be read (1 MiB, more than 1)"),
        (["sparse.hlo"], "cannot be read (1,024 MiB, more than 1)"),
        (["fifo.hlo"], "cannot be read (not a regular file)"),
        (["nowhere.yml"], "nowhere.yml"),
        (["stesp=3"], "did you mean 'steps'?"),
        (["steps=9e18"], "steps=9000000000000000000: expected a number below 2^31"),
        (["per_device_batch_size=1e12"], "expected at most 2^56"),
        (["max_target_length=1e9"], "expected at most 2^56"),
        (["emb_dim=2e9", "mlp_dim=2e9"], "expected at most 2^56"),
        (["--jsno"], "did you mean '--json'?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    says: str,
    program: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(program.parent)
    Path("torn.hlo.xz").write_bytes(lzma.compress(PROGRAM.encode())[:40])
    Path("bomb.hlo.gz").write_bytes(gzip.compress(bytes(2**24)))
    Path("sparse.hlo").touch()
    os.truncate("sparse.hlo", 2**30)
    os.mkfifo("fifo.hlo")
    monkeypatch.setattr(compare, "_MOST_BYTES", 2**20)
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert is_told(error, hint=True)
