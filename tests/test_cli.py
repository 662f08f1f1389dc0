"""`mfu-jax`: commands are found in their folder, and their docstrings are their manuals."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax import cli, commands

NAMES = cli.command_names()


def test_every_module_of_the_folder_is_a_command() -> None:
    assert NAMES == [
        "compare",
        "flops",
        "hardware",
        "project",
        "published",
        "replay",
        "report",
        "train",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_manual_is_the_docstring_and_begins_with_one_line(name: str) -> None:
    module = importlib.import_module(f"mfu_jax.commands.{name}")
    text = cli.manual(name)
    assert text == (module.__doc__ or "").rstrip()
    summary, blank, usage = text.splitlines()[:3]
    assert (blank, summary[-1]) == ("", ".")
    assert usage.startswith(f"usage: mfu-jax {name}")


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"], []])
def test_help_lists_every_command_with_its_first_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == (0 if argv else 2)
    lines = capsys.readouterr().out.splitlines()
    for name in NAMES:
        first = cli.manual(name).splitlines()[0].rstrip(".")
        assert any(line.split(maxsplit=1) == [name, first] for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_is_its_manual(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "anything", "--help"]) == 0
    assert capsys.readouterr().out == cli.manual(name) + "\n"


@pytest.mark.parametrize("name", ["flop", "../cli", "__init__", ""])
def test_an_unknown_command_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    error = capsys.readouterr().err
    assert "the commands are: compare, flops" in error
    assert error.count("\n") == 1


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from mfu_jax.cli import main; main(['--help']); main(['train', '--help']);"
        "sys.exit(any(name.startswith(('jax', 'mfu_jax.commands.')) for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0


def test_a_new_file_is_a_new_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        '"""Greets.\n\nusage: mfu-jax greet NAME"""\n\ndef main(argv):\n    print("hello", *argv)\n'
    )
    (tmp_path / "greet.py").write_text(source)
    monkeypatch.setattr(cli, "_FOLDER", tmp_path)
    monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
    assert cli.main(["--help"]) == 0
    assert "  greet  Greets\n" in capsys.readouterr().out
    assert cli.main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
