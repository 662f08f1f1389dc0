"""The verdict on a run: losses on one scale, what to do, and published runs like it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.logger.records.summary import Summary
from mfu_jax.published import find_run, like_runs
from mfu_jax.runs.report.setup import Setup
from mfu_jax.runs.report.verdict import run_verdict
from mfu_jax.verdict import Verdict

ON_V5P = Setup(
    values={
        "devices": "64 × TPU v5 (16 processes)",
        "peak of one device": "459 TFLOP/s/device in bf16 (table: TPU v5p, bf16)",
        "model TFLOP per device per step": "10 (maxtext: weights 9, attention 1)",
    }
)
SUMMARY = Summary(
    steps=40,
    mean_seconds=2.0,
    mfu=0.20,
    hfu=0.26,
    tflops_per_sec_per_device=0.20 * 459,
    tokens_per_sec_per_device=0.20 * 459e12 / 250e9,
)
WALL = {"train": 60.0, "compile": 24.0, "data_wait": 16.0}


def judged(
    wall: dict[str, float] | None = None,
    profile: dict[str, float] | None = None,
    setup: Setup = ON_V5P,
    summary: Summary = SUMMARY,
    path: str = "runs/a/metrics.jsonl",
    steps: range = range(0),
) -> Verdict:
    return run_verdict(path, summary, setup, wall=wall or {}, profile=profile or {}, steps=steps)


def test_losses_of_steps_and_of_the_wall_clock_are_compared_by_the_wall_clock() -> None:
    verdict = judged(WALL)
    assert [(loss.name, loss.of, round(loss.fraction, 6)) for loss in verdict.losses] == [
        ("inside steps, not yet profiled", "step", 0.74),  # 44 of 100 s
        ("compilation", "wall clock", 0.24),
        ("wait for data", "wall clock", 0.16),
        ("extra FLOPs, such as recomputation", "step", 0.06),
    ]
    assert verdict.sentence.startswith("20.0% MFU (maxtext FLOPs, peak 459 TFLOP/s bf16); ")
    assert "; largest loss: inside steps" in verdict.sentence
    assert [str(step) for step in verdict.next_steps] == [
        "profile_steps=10-12 profile_dir=runs/a/profile, then mfu-jax profile runs/a/profile",
        "mfu-jax report runs/a --html=report.html",
    ]


def test_commands_with_a_blank_in_the_runs_name_can_be_pasted() -> None:
    assert [str(step) for step in judged(path="my runs/a/metrics.jsonl").next_steps] == [
        "profile_steps=10-12 profile_dir='my runs/a/profile', then "
        "mfu-jax profile 'my runs/a/profile'",
        "mfu-jax report 'my runs/a' --html=report.html",
    ]


@pytest.mark.parametrize(
    ("steps", "config", "advice"),
    [
        (range(100), {}, "profile_steps=10-12"),
        (range(13), {}, "profile_steps=10-12"),
        # Of a short run the last ones: the first two warm up, and the first one compiles.
        (range(8), {}, "profile_steps=5-7"),
        (range(6), {}, "profile_steps=3-5"),
        (range(5), {}, "profile_steps=10-12 in a run of at least 13 steps"),
        # A rerun goes on after the last step.
        (range(200, 300), {}, "profile_steps=310-312 in a run of at least 313 steps"),
        (
            range(300),
            {"enable_checkpointing": "true", "steps": "300"},
            "profile_steps=310-312 in a run of at least 313 steps",
        ),
        (range(300), {"enable_checkpointing": "true", "steps": "320"}, "profile_steps=310-312"),
        (range(300), {"enable_checkpointing": "true", "steps": "308"}, "profile_steps=305-307"),
        (range(300), {"enable_checkpointing": "false", "steps": "300"}, "profile_steps=10-12"),
    ],
)
def test_the_steps_to_profile_are_ones_that_the_next_run_has(
    steps: range, config: dict[str, str], advice: str
) -> None:
    setup = dataclasses.replace(ON_V5P, config={"run_name": "a", **config})
    found = judged(steps=steps, setup=setup).next_steps[0].text
    assert found == f"{advice}, then mfu-jax profile runs/a/profile"


def test_a_log_has_its_profiles_beside_it() -> None:
    for path, folder in (("k2.log", "profile"), ("runs/k2.log", "runs/profile")):
        assert judged(path=path).next_steps[0].text == (
            f"profile_steps=10-12 profile_dir={folder}, then mfu-jax profile {folder}"
        )


def test_a_run_whose_profile_is_there_is_not_told_to_profile(tmp_path: Path) -> None:
    """A short run ends before its trace is read."""
    (tmp_path / "profile" / "plugins").mkdir(parents=True)
    verdict = judged(WALL, path=f"{tmp_path}/metrics.jsonl")
    assert str(verdict.next_steps[0]) == f"mfu-jax profile {tmp_path}"


def test_the_next_step_is_of_the_largest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    verdict = judged({"train": 1.0, "compile": 9.0})
    assert "largest loss: compilation, 90.0% of the wall clock" in verdict.sentence
    assert verdict.next_steps[0].text == "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax"


def test_the_time_of_one_process_is_not_called_the_wall_clock_of_the_job() -> None:
    """A report has the start-up, too, and the restarts: other totals than the logger's."""
    wall = {"train": 1.0, "compile": 9.0}
    path = "runs/a/metrics.jsonl"
    seen = run_verdict(path, SUMMARY, ON_V5P, wall=wall, profile={}, is_of_process=True)
    assert "largest loss: compilation, 90.0% of the process, 9 s" in seen.sentence
    assert seen.losses[0].of == "process"
    assert seen.next_steps[0].text == judged(wall).next_steps[0].text


def test_advice_is_what_this_run_can_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def first(wall: dict[str, float], **setup: Any) -> str:
        found = judged({"train": 1.0, **wall}, setup=Setup(**setup))
        return found.next_steps[0].text

    config = {"eval_interval": "5", "checkpoint_period": "9"}
    # Evaluations that take nine times as long as all else would take 2% of the time at 450 times
    # the interval: 9 × 98 / 2 = 441.
    assert first({"eval": 9.0}) == "evaluate 450 times less often"
    assert first({"eval": 9.0}, config=config) == "eval_interval=2300"
    assert first({"checkpoint": 1.0}, config=config) == (
        "checkpoint_period=450, or asynchronous checkpoints"
    )
    assert first({"data_wait": 2.5}).endswith("such as grain's worker_count=4")  # 1 s + 2.5 s
    assert first({"lost_steps": 9.0}) == "save checkpoints twice as often"
    assert first({"lost_steps": 9.0}, config=config) == "checkpoint_period=4"
    then = ", then mfu-jax profile runs/a/profile"
    values = {"step function": "train_step"}
    in_python = f'profile_steps="10-12", profile_dir="runs/a/profile"{then}'
    assert first({"startup": 9.0}, values=values) == in_python
    assert first({"startup": 9.0}, config=config) == f"profile_steps=10-12{then}"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    assert first({"compile": 9.0}, values=values) == in_python
    (tmp_path / "tensorboard").mkdir()  # of run_dir
    found = run_verdict(
        f"{tmp_path}/metrics.jsonl", SUMMARY, Setup(values=values), wall={}, profile={}
    )
    assert found.next_steps[0].text == (
        f'profile_steps="10-12", then mfu-jax profile {tmp_path}/profile'
    )


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"mfu": 7.4, "hfu": 7.5}, "impossible numbers (more than the peak); 740.0% MFU ("),
        (
            {"flags": {"hfu_over_1": 3, "mfu_over_1": 1}},
            "impossible numbers (hfu_over_1 in 3 steps, mfu_over_1 in 1 step); 20.0% MFU (",
        ),
        ({"mfu": 1.004, "hfu": 1.004}, "100.4% MFU ("),  # within the tolerance of a flag
    ],
)
def test_impossible_numbers_come_first(changes: dict[str, Any], start: str) -> None:
    assert judged(summary=dataclasses.replace(SUMMARY, **changes)).sentence.startswith(start)


def test_a_profile_splits_the_steps() -> None:
    profile = {
        "profile/step_time_seconds": 2.0,
        "profile/waterfall/idle": 0.5,
        "profile/waterfall/matmuls below peak": 1.1,
        "profile/waterfall/MFU": 0.4,
    }
    verdict = judged(profile=profile)
    assert [(loss.name, loss.fraction) for loss in verdict.losses] == [
        ("matmuls below peak", pytest.approx(0.55)),
        ("idle", pytest.approx(0.25)),
    ]
    assert verdict.next_steps[0].text == "mfu-jax profile runs/a"
    verdict = judged(path="runs/a.jsonl", profile=profile)  # its trace is elsewhere
    assert verdict.next_steps[0].text == "mfu-jax profile DIR, its profile_dir"


@pytest.mark.parametrize(
    ("step_seconds", "config", "start"),
    [
        (8.0, {"profile_steps": "0-1"}, "profiled steps 0-1 took 8 s on average, the run's 2 s; "),
        (1.25, {}, "profiled steps took 1.25 s on average, the run's 2 s; "),
        (2.9, {}, "20.0% MFU ("),
        (1.4, {}, "20.0% MFU ("),
    ],
)
def test_profiled_steps_unlike_the_runs_are_said_to_be(
    step_seconds: float, config: dict[str, str], start: str
) -> None:
    """Their losses are of other steps than those whose mean stands beside them: 1.5 times."""
    profile = {"profile/step_time_seconds": step_seconds, "profile/waterfall/idle": 0.5}
    found = judged(profile=profile, setup=dataclasses.replace(ON_V5P, config=config))
    assert found.sentence.startswith(start)


def test_a_run_is_placed_among_published_ones_in_its_own_convention_and_peak() -> None:
    found = judged().like_runs
    run = find_run("maxtext-docs-deepseek2-16b-v5p")
    assert run.mfu("maxtext", 459e12) == pytest.approx(0.294, abs=5e-4), "as printed"
    assert found is not None
    assert found.like == "models like this (7.5B to 37B active) on TPU v5p"
    assert found.runs == ("tpu-recipes-v5p-llama3.1-8b-256k", "maxtext-v5p-512-deepseek3-671b")
    assert (found.low_mfu, found.high_mfu) == pytest.approx((0.333, 0.6816), abs=1e-4)
    experts = dataclasses.replace(ON_V5P, config={"num_experts": "64"})
    found = judged(setup=experts).like_runs
    assert found is not None
    assert found.runs == ("maxtext-v5p-512-deepseek3-671b",)


def test_without_a_like_model_all_runs_on_the_chip_are_named_as_others() -> None:
    found = like_runs(
        chip="TPU v5p",
        dtype="bf16",
        peak_flops_per_sec=459e12,
        flops_per_token=60e9,
        convention="maxtext",
    )
    assert found is not None
    assert found.like.startswith("other models (2.5B to 37B active)")
    assert (found.low_mfu, found.high_mfu) == pytest.approx((0.294, 0.682), abs=1e-3)
    assert (
        like_runs(
            chip="TPU v3",
            dtype="bf16",
            peak_flops_per_sec=1e12,
            flops_per_token=1.0,
            convention="maxtext",
        )
        is None
    )


def test_an_unknown_mfu_names_what_would_make_it_known() -> None:
    unknown = Summary(steps=4, mean_seconds=1.0)
    verdict = judged(setup=Setup(), summary=unknown)
    assert verdict.sentence == ("MFU not known; next: mfu-jax report runs/a hardware=NAME")
