"""`mfu-jax`: commands are found in their folder, and their docstrings are their manuals."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mfu_jax import cli, commands
from tests.support.messages import is_told

NAMES = cli.command_names()


def test_every_module_of_the_folder_is_a_command() -> None:
    assert NAMES == [
        "compare",
        "doctor",
        "dump",
        "flops",
        "gate",
        "hardware",
        "plan",
        "profile",
        "project",
        "published",
        "replay",
        "report",
        "train",
        "tune",
        "watch",
    ]


def test_help_is_grouped_with_an_example_each_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line for line in lines if line and not line.startswith((" ", "usage", "mfu-jax"))] == [
        *("Begin", "Count FLOPs", "Run", "Judge", "Plan"),
    ]
    examples = [line.split()[1] for line in lines if line.startswith(f"{'':13}mfu-jax ")]
    assert sorted(examples) == NAMES


def test_the_version_and_a_misspelt_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"mfu-jax \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    assert cli.main(["reprot"]) == 2
    assert "unknown command 'reprot'\nhint: did you mean 'report'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_manual_is_the_docstring_and_begins_with_one_line(name: str) -> None:
    module = importlib.import_module(cli.module_of(name))
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
    assert "the commands are: compare, doctor, dump" in error
    assert is_told(error, hint=True)


@pytest.mark.full
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
    assert "\nOthers\n  greet      Greets\n" in capsys.readouterr().out
    assert cli.main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a command `try` of some code."""

    def make(code: str) -> None:
        source = f'"""Tries.\n\nusage: mfu-jax try"""\n\ndef main(argv):\n    {code}\n'
        (tmp_path / "try.py").write_text(source)
        monkeypatch.setattr(cli, "_FOLDER", tmp_path)
        monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "mfu_jax.commands.try", raising=False)
        importlib.invalidate_caches()

    return make


@pytest.mark.parametrize(
    ("code", "returns", "says"),
    [
        (
            "raise RuntimeError(\"Unable to initialize backend 'tpu': NOT_FOUND\")",
            1,
            r"mfu-jax try: Unable to initialize backend 'tpu'.*\nhint: usually JAX_PLATFORMS .*",
        ),
        ("1 / 0", 1, r"mfu-jax try: a bug of mfu_jax: ZeroDivisionError: .*\nhint: .* in (\S+)"),
        ("raise MemoryError", 1, "mfu-jax try: memory ran out\nhint: pass a smaller input"),
        (
            "raise OSError(28, 'No space left on device')",
            1,
            "mfu-jax try: .*No space left on device.*\nhint: .*",
        ),
        (
            "raise PermissionError(13, 'Permission denied')",
            1,
            "mfu-jax try: .*Permission denied.*\nhint: ask its owner to let you read it",
        ),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_no_exception_is_a_traceback(
    code: str,
    returns: int,
    says: str,
    command: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command(code)
    assert cli.main(["try"]) == returns
    match = re.fullmatch(says, capsys.readouterr().err.rstrip("\n"))
    assert match
    if match.groups():
        assert "ZeroDivisionError: division by zero" in Path(match[1]).read_text()


def test_a_message_is_one_printable_line_of_1500_characters_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["flops", "llama3-8b", "\x1b[31m\n" + "\udcff" * 9000 + "=1"]) == 2
    error, hint = capsys.readouterr().err.splitlines(keepends=True)
    assert hint == "hint: mfu-jax flops --help shows what it takes\n"
    assert error.startswith(r"mfu-jax flops: unknown key '\x1b[31m\n\udcff\udcff")
    assert error.endswith("\n")
    assert len(error) == 1501 - 1  # both halves are cut before the dots
    assert error[:-1].isprintable()


@pytest.mark.full
def test_an_answer_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mfu_jax.cli", "flops", "llama3-8b"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert is_told(done.stderr, hint=True)
    assert "No space left on device" in done.stderr


@pytest.mark.full
def test_a_list_that_nobody_reads_to_its_end_is_no_traceback() -> None:
    for command in ("-m mfu_jax.settings", "-m mfu_jax.cli --help"):
        done = subprocess.run(
            f"{sys.executable} {command} | head -0", shell=True, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.full
def test_a_terminal_without_unicode_gets_the_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mfu_jax.cli", "published", "palm-540b"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"6144 \xd7 TPU v4" in done.stdout
