"""`mfu-jax hardware`: one chip, or all of the table."""

from __future__ import annotations

import json

import pytest

from mfu_jax.cli import main
from tests.support.messages import is_told


def test_the_command_prints_a_named_chip_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["hardware", "v5p", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] == "TPU v5p"
    assert answer["memory_bytes"] == 95 * 2**30
    assert answer["memory_bandwidth_bytes_per_sec"] == 2765e9
    assert answer["sources"]


@pytest.mark.parametrize(
    ("chip", "memory"),
    [
        # libtpu's limit is 95.74 GiB; Google's table has 95.
        ("v5p", "95.74 GiB usable (95 published), 2765 GB/s"),
        ("v6e", "32 GiB (31.25 usable), "),
    ],
)
def test_what_is_usable_is_no_part_of_less(
    chip: str, memory: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["hardware", chip]) == 0
    assert f"  memory            {memory}" in capsys.readouterr().out


def test_the_command_lists_every_chip(capsys: pytest.CaptureFixture[str]):
    assert main(["hardware", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 125


@pytest.mark.parametrize("arguments", [["b400"], ["--lst"], ["RTX", "4090"], ["--dtype=bool"]])
def test_the_command_answers_bad_input_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["hardware", *arguments]) == 2
    assert is_told(capsys.readouterr().err, hint=True)
