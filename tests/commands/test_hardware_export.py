"""The table for other programs: JSON and a lookup that run without mfu_jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax import hardware
from mfu_jax.cli import main
from mfu_jax.errors import UserError
from mfu_jax.hardware.dtypes import DTYPES, dtype_names


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["hardware", f"--export={tmp_path}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    return tmp_path


def test_the_json_has_every_row_with_its_sources(folder: Path) -> None:
    data = json.loads((folder / "accelerator_peaks.json").read_text(encoding="utf-8"))
    chips = {chip["name"]: chip for chip in data["chips"]}
    assert set(chips) == {chip.name for chip in hardware.table()}
    for chip in hardware.table():
        row = chips[chip.name]
        assert row["dense_tflops"] == dict(chip.peak_tflops)
        assert row["sources"] == list(chip.sources)
        assert row["number_sources"] == {k: list(v) for k, v in chip.number_sources.items()}
        assert set(row["number_sources"]) <= {*row, *row["dense_tflops"]}
        for wrong in ("sparse_tflops", "boost_tflops"):
            assert all(row[wrong][d] > row["dense_tflops"][d] for d in row[wrong]), chip.name
    press = chips["TPU8t"]["number_sources"]["fp4"]
    assert [source.partition(" ")[0] for source in press] == [
        "sipoch.com/en/article/300330021435853"
    ]
    assert not any(source.startswith("vllm") for source in chips["H100 SXM"]["sources"])
    assert chips["TPU7x (Ironwood)"]["clock_state"] == "--xla_tpu_dvfs_p_state=7"


@pytest.mark.full
def test_the_lookup_agrees_for_every_chip_and_dtype_without_mfu_jax(folder: Path) -> None:
    lookup = folder / "accelerator_peaks.py"
    assert len(lookup.read_text(encoding="utf-8").splitlines()) <= 60
    kinds = [kind for chip in hardware.table() for kind in (*chip.device_kinds, chip.name)]
    asked = [(kind, name) for kind in (*kinds, "NVIDIA B400") for name in (*DTYPES, "bfloat16")]
    program = (
        f"import sys, json; sys.path.insert(0, {str(folder)!r})\n"
        "from accelerator_peaks import peak_tflops\n"
        "for kind, name in json.load(sys.stdin):\n"
        "    try: print(peak_tflops(kind, name))\n"
        "    except LookupError: print(None)\n"
        "assert 'mfu_jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(ours(kind, name)) for kind, name in asked]


def ours(kind: str, name: str) -> float | None:
    named = {chip.name: chip for chip in hardware.table()}
    try:
        chip = named.get(kind) or hardware.lookup(kind)
        return chip.peak_flops_per_sec(name) / 1e12
    except UserError:
        return None


def test_dtypes_are_known_by_all_their_names() -> None:
    assert {hardware.canonical_dtype(name) for name in dtype_names()} == set(DTYPES)


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["hardware", f"--export={tmp_path / 'file'}"]) == 2
    assert "give a folder" in capsys.readouterr().err
