"""Two metrics files side by side: what decides, and what is said."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.runs.comparison.runs import RunComparison, compare_with_runs
from mfu_jax.runs.metrics.files import read_metrics
from tests.support.metrics_lines import line, write_run
from tests.support.run_noise import KINDS, step_times


def pair(folder: Path, *, mean: float, steps: int = 300, **of_b: float) -> RunComparison:
    rng = random.Random(11)
    a, b = (step_times(KINDS["remembering"], steps, rng, mean=m) for m in (1.0, mean))
    files = [write_run(folder / "a.jsonl", a), write_run(folder / "b.jsonl", b, **of_b)]
    baseline, run = map(read_metrics, files)
    return compare_with_runs([baseline], run, warmup_steps=0)


def test_a_faster_run_is_told_by_how_much(tmp_path: Path) -> None:
    found = pair(tmp_path, mean=1 / 1.05)
    answer = found.to_json()
    assert answer["result"] == "faster"
    assert answer["faster"] == pytest.approx(0.05, abs=0.01)
    half = 50 * (answer["faster_high"] - answer["faster_low"])  # half of it, in percent
    said = f"B is {100 * answer['faster']:.1f}% ± {half:.2f}% faster"
    assert found.verdict == said
    assert found.verdict in found.render()
    assert answer["metrics"]["mfu"]["change"] == pytest.approx(answer["faster"], abs=1e-3)
    assert answer["metrics"]["step_time_seconds"]["change"] == pytest.approx(-0.0476, abs=0.01)


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (
            3.7,
            "takes",
        ),
        (1 / 3.7, "is"),
    ],
)
def test_a_large_difference_is_a_ratio(mean: float, words: str, tmp_path: Path) -> None:
    found = pair(tmp_path, mean=mean)
    ending = "long" if words == "takes" else "fast"
    match = re.fullmatch(rf"B {words} (.*) times as {ending} \((.*) to (.*)\)", found.verdict)
    assert match is not None
    ratio, low, high = map(float, match.groups())
    assert low <= ratio <= high
    assert ratio == pytest.approx(3.7, abs=0.1)


def test_a_very_large_ratio_has_no_exponent(tmp_path: Path) -> None:
    assert "e+" not in (words := pair(tmp_path, mean=1340.0).verdict)
    assert re.match(r"B takes 1,[34]\d\d times as long \(1,[23]\d\d to 1,[34]\d\d\)", words)


def test_less_than_one_percent_is_shown_and_not_called(tmp_path: Path) -> None:
    found = pair(tmp_path, mean=1.007, steps=4000)
    answer = found.to_json()
    assert answer["result"] == "same"
    assert answer["faster_high"] < 0  # chance is excluded all the same
    assert "less than repeats of one run may differ (1%)" in found.verdict


def test_steps_of_another_size_are_compared_by_tokens(tmp_path: Path) -> None:
    found = pair(tmp_path, mean=1.9, tokens=2048.0)  # 1,024 of A: 2 × the tokens in 1.9 × the time
    assert found.decisive.metric.title == "tokens/s/device"
    assert found.to_json()["faster"] == pytest.approx(2 / 1.9 - 1, abs=0.01)
    assert "a step of A has 1,024 tokens per device, one of B 2,048" in found.notes[0]


def test_another_model_is_noted(tmp_path: Path) -> None:
    found = pair(tmp_path, mean=1.0, tflops=3.0)
    assert found.notes == (
        "a step of A has 2.000 model TFLOP per device, one of B 3.000: another model or convention",
    )


def test_a_step_without_a_wait_waited_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    waits = [{}, {"goodput/data_wait_seconds": 0.5}] * 20
    path.write_text("".join(line(n, 1.0, **waited) for n, waited in enumerate(waits)))
    rows = compare_with_runs([read_metrics(path)], read_metrics(path), warmup_steps=0).to_json()
    # The mean logarithm of the middle three fifths: half of them 1 s, half 1.5 s.
    found = rows["metrics"]["step_time_and_data_wait_seconds"]["a"]
    assert found == pytest.approx(1.5**0.5)


def test_too_few_steps_are_told(tmp_path: Path) -> None:
    found = pair(tmp_path, mean=1.1, steps=3)
    assert found.to_json()["result"] == "unknown"
    assert found.to_json()["faster_low"] is None
    assert "3 and 3 measured steps; expected at least 4" in found.verdict
    json.dumps(found.to_json(), allow_nan=False)


def log(path: Path, seconds: float, spread: float, rng: random.Random) -> Path:
    """MaxText's log lines, whose times have three decimals."""
    times = [rng.gauss(seconds, spread) for _ in range(200)]
    path.write_text(
        "".join(f"completed step: {n}, seconds: {t:.3f}\n" for n, t in enumerate(times))
    )
    return path


def test_what_a_log_rounds_is_no_difference(tmp_path: Path) -> None:
    """12.45 ms and 12.55 ms are 12 and 13 ms in a log: 8%, of which 7% are rounding."""
    rng = random.Random(4)

    def compared(a: float, b: float, spread: float) -> RunComparison:
        runs = [read_metrics(log(tmp_path / f"{t}.log", t, spread, rng)) for t in (a, b)]
        return compare_with_runs(runs[:1], runs[1], warmup_steps=0)

    assert compared(0.01245, 0.01255, 1e-5).to_json()["result"] == "same"
    assert compared(0.0120, 0.0150, 1e-5).to_json()["result"] == "slower"
    scattered = compared(0.0120, 0.0125, 1e-3).decisive.difference  # which averages rounding out
    assert scattered.is_real
    assert scattered.change == pytest.approx(0.042, abs=0.02)


def test_a_run_of_warm_up_only_is_an_error(tmp_path: Path) -> None:
    run = read_metrics(write_run(tmp_path / "a.jsonl", [1.0, 1.0], kind=None))
    with pytest.raises(UserError, match=r"holds 2 steps, none with a measured time"):
        compare_with_runs([run], run, warmup_steps=3)


def test_the_difference_of_the_steps_is_split(tmp_path: Path) -> None:
    """Into the step, with the bars of both profiles, and what is beside it."""
    pause = {"goodput/eval_seconds": 0.25}
    bars = {"profile/mfu": 0.5, "profile/waterfall/idle": 0.1, "profile/waterfall/MFU": 0.5}
    slower = bars | {"profile/waterfall/idle": 0.4, "profile/waterfall/loop overhead": 0.001}
    a = write_run(tmp_path / "a.jsonl", [1.0] * 20, **bars)
    b = write_run(tmp_path / "b.jsonl", [1.5] * 20, **pause, **slower)
    found = compare_with_runs([read_metrics(a)], read_metrics(b), warmup_steps=0)
    assert found.to_json()["split"] == pytest.approx({"step": 0.5, "eval": 0.25})
    assert found.to_json()["in_step"]["idle"] == pytest.approx(0.3)
    text = (
        "a step of B beside one of A: in the step +500 ms (by profiles: idle +300 ms), eval +250 ms"
    )
    assert found.split_text == text
    assert text in " ".join(found.render().split())
    assert "beside" not in found.verdict  # the step's difference is the largest
    same = compare_with_runs([read_metrics(a)], read_metrics(a), warmup_steps=0)
    assert not same.split_text


def test_the_verdict_names_what_differs_more_than_the_steps(tmp_path: Path) -> None:
    a = read_metrics(write_run(tmp_path / "a.jsonl", [1.0, 1.01] * 20))
    waits = {"goodput/data_wait_seconds": 0.5}
    b = read_metrics(write_run(tmp_path / "b.jsonl", [1.0, 1.01] * 20, **waits))
    found = compare_with_runs([a], b, warmup_steps=0)
    assert found.verdict.startswith("B is as fast as A")
    assert found.verdict.endswith(", in its steps alone; beside them, data wait +500 ms")
    assert not compare_with_runs([a], a, warmup_steps=0).verdict.endswith("ms")
