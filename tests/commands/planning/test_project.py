"""`mfu-jax project`: one of tokens, chips, time and throughput from the other three."""

from __future__ import annotations

import json

import pytest

from mfu_jax.cli import main
from tests.support.messages import is_told


def test_the_command_answers_by_6n(capsys: pytest.CaptureFixture[str]):
    arguments = "tokens=15T chips=16384 hardware=h100 mfu=0.4 params=405B price=2 --json"
    assert main(["project", *arguments.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    # 6 × 405e9 × 15e12 / (0.4 × 16384 × 989.4e12)
    assert answer["seconds"] == pytest.approx(5_621_415.6, rel=1e-8)
    assert answer["cost"] == pytest.approx(5_621_415.6 / 3600 * 16384 * 2, rel=1e-8)
    assert "H100 SXM" in answer["hardware"]


def test_a_chip_of_two_devices_has_twice_the_peak(capsys: pytest.CaptureFixture[str]):
    arguments = "tokens=1T chips=2 hardware=v7x mfu=0.5 params=1B --json"
    assert main(["project", *arguments.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_flops_per_sec_per_chip"] == 2307e12  # Google's number is of the chip


def test_a_model_has_its_flops_per_token_at_the_sequence_length(
    capsys: pytest.CaptureFixture[str],
):
    arguments = "model=llama2-7b max_target_length=4096 tokens=2T chips=64 hardware=v5p mfu=0.5"
    assert main(["project", *arguments.split(), "convention=dense", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    # 6 × matmul weights (layers × (4 h² + 3 h f) + h V) + 12 × layers × h × length
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert answer["flops_per_token"] == 6 * weights + 12 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    "arguments",
    [
        "tokens=many chips=1 mfu=0.4",
        "tokns=1",
        "tokens=1 days=1 hours=1",
        "tokens=1T chips=1 mfu=0.4 params=1B hardware=h1000",
        "tokens=1T chips=1 mfu=0.4 params=1B model=llama2-7b",
        "tokens=1T chips=1 mfu=0.4 params=1B hardware=h100 dtype=bool",
        "tokens=1T chips=1 mfu=0.4 model=no-such-model hardware=h100",
        "tokens=1T chips=1 mfu=0.4 model=llama2-7b hardware=h100 max_target_length=inf",
        "tokens=1T chips=1 mfu=0.4 model=llama2-7b hardware=h100 max_target_length=nan",
        "tokens=1T chips=1 mfu=0.4 model=llama2-7b hardware=h100 max_target_length=0.5",
        "tokens=1e-300 chips=1e300 mfu=1e-300 params=1e300 peak_tflops_per_device=1e-300",
    ],
)
def test_bad_input_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]):
    assert main(["project", *arguments.split()]) == 2
    assert is_told(capsys.readouterr().err, hint=True)
