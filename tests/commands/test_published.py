"""`mfu-jax published`: the printed numbers beside the recomputed ones."""

from __future__ import annotations

import json

import pytest

from mfu_jax.cli import main
from mfu_jax.runs.published import published_runs


def test_the_command_prints_all_three_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["published", "palm-540b"]) == 0
    printed = capsys.readouterr().out
    assert "published 46.2" in printed
    assert "recomputed 46.2289" in printed
    assert "+0.063%" in printed
    assert "arXiv 2204.02311" in printed


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]):
    assert main(["published", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in runs] == [run.id for run in published_runs()]
    assert [len(run["checks"]) for run in runs] == [len(run.checks) for run in published_runs()]


@pytest.mark.parametrize("arguments", [["palm-541b"], ["--jsno"]])
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["published", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
