"""A key has three spellings and one meaning in every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax import cli
from mfu_jax.dumps import ModelFlops, ProgramDump, write

PROGRAM = """HloModule p, entry_computation_layout={()->f32[4,16]{1,0}}

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
METRICS = str(Path(__file__).parent.parent / "data" / "maxtext_0.2.5_metrics.jsonl")
# Words of a command, and a key whose wrong value the command names before it does any work.
KEYS = {
    "compare": [(("FILE.hlo",), "xla", "x"), ((), "steps", "x")],
    "dump": [(("new.mfu",), "steps", "x"), (("new.mfu",), "xla", "nowhere")],
    "flops": [(("llama2-7b",), "max_target_length", "x"), (("llama2-7b",), "convention", "mine")],
    "gate": [(("a", "baseline=b"), "threshold", "x")],
    "hardware": [((), "dtype", "bf17")],
    "plan": [(("topology=v6e-8",), "price", "-1"), (("topology=v6e-8",), "emb_dim", "x")],
    "profile": [(("nowhere",), "by", "color"), (("nowhere",), "sort", "size")],
    "project": [(("chips=1",), "tokens", "x")],
    "report": [(("a",), "warmup_steps", "x"), ((METRICS,), "plan", "nowhere")],
    "train": [((), "steps", "x")],
    "tune": [(("topology=v6e-8",), "budget", "soon")],
    "watch": [(("a",), "interval", "0")],
}
WITHOUT_KEYS = {"doctor", "published", "replay"}


def test_every_command_is_in_the_table() -> None:
    assert set(cli.command_names()) == {*KEYS, *WITHOUT_KEYS}


@pytest.mark.parametrize(
    ("name", "words", "key", "wrong"),
    [(name, *row) for name, rows in KEYS.items() for row in rows],
)
def test_a_key_has_three_spellings(
    name: str,
    words: tuple[str, ...],
    key: str,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE.hlo").write_text(PROGRAM)
    said = set()
    for spelling in ([f"{key}={wrong}"], [f"--{key}={wrong}"], [f"--{key}", wrong]):
        assert cli.main([name, *words, *spelling]) == 2
        said.add(capsys.readouterr().err)
    (message,) = said
    assert wrong in message
    assert "unknown" not in message.partition(wrong)[0]


def test_the_model_is_named_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each command names the same model when it is wrong, in every spelling."""
    commands = {
        "compare": (),
        "dump": (str(tmp_path / "new.mfu"),),
        "flops": (),
        "plan": ("topology=v6e-8",),
        "project": ("tokens=1T", "chips=1", "mfu=0.4", "hardware=h100"),
        "report": (METRICS,),
        "train": (),
    }
    for name, words in commands.items():
        for key in ("model", "model_name"):
            for spelling in ([f"{key}=llama2-8x"], [f"--{key}", "llama2-8x"]):
                assert cli.main([name, *words, *spelling]) == 2, (name, spelling)
                assert "llama2-8x" in capsys.readouterr().err.replace("key 'llama2", ""), name


def test_flops_takes_the_model_as_a_key_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = set()
    for words in (["llama2-7b"], ["model=llama2-7b"], ["--model", "llama2-7b"]):
        assert cli.main(["flops", *words, "--json"]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1
    assert cli.main(["flops", "llama2-7b", "model=gemma2-9b"]) == 2
    assert "expected one model name or file" in capsys.readouterr().err


def test_model_flops_are_a_number_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, dump = tmp_path / "p.hlo", tmp_path / "p.mfu"
    program.write_text(PROGRAM)
    write(ProgramDump(text=PROGRAM, model=ModelFlops(per_device=1, convention="exact")), dump)
    for words in (("compare", str(program)), ("plan", str(dump), "topology=v5e:1x1")):
        said = set()
        for spelling in (["model_flops=900"], ["--model_flops", "900"]):
            cli.main([*words, *spelling, "--json"])
            said.add(capsys.readouterr().out)
        assert len(said) == 1
        assert "900" in said.pop()
    assert cli.main(["profile", str(tmp_path), "model_flops=many"]) == 2
    assert "model_flops='many'" in capsys.readouterr().err


def test_the_peak_is_spelt_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    commands = {
        "profile": (str(tmp_path),),
        "project": ("tokens=1T", "chips=1"),
        "report": (METRICS,),
        "train": (),
    }
    for name, words in commands.items():
        for spelling in (["peak_tflops_per_device=x"], ["--peak_tflops_per_device", "x"]):
            assert cli.main([name, *words, *spelling]) == 2
            assert "peak_tflops_per_device" in capsys.readouterr().err
