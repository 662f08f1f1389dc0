import dataclasses
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mfu_jax.util.formatting import json_text
from mfu_jax.verdict import LikeRuns, NextStep, TimeLoss, Verdict

NEXT = (NextStep(text="remat_policy=minimal", gain_fraction=0.118),)
FULL = Verdict(
    kind="report",
    mfu=0.2024,
    convention="maxtext",
    peak="989.4 TFLOP/s bf16",
    losses=(TimeLoss(name="compile", fraction=0.24, of="wall clock"),),
    next_steps=NEXT,
    like_runs=LikeRuns(
        like="dense models of 4B to 16B on H100", low_mfu=0.4, high_mfu=0.55, runs=("a", "b")
    ),
    bound_mfu=0.61,
)


def test_a_sentence_has_the_number_the_loss_the_next_step_and_how_good_it_is() -> None:
    assert FULL.sentence == (
        "20.2% MFU (maxtext FLOPs, peak 989.4 TFLOP/s bf16); below what dense models of 4B to 16B "
        "on H100 reach, 40.0% to 55.0% (2 published runs); its plan's bound is 61.0%; largest "
        "loss: compile, 24.0% of the wall clock; next: remat_policy=minimal (saves 11.8% of the "
        "step)"
    )
    lines = FULL.render().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "next: remat_policy=minimal (saves 11.8% of the step)"  # it can be pasted


@pytest.mark.parametrize(
    ("mfu", "place"),
    [(0.39, "below"), (0.4, "within"), (0.5, "within"), (0.55, "within"), (0.551, "above")],
)
def test_an_mfu_is_placed_among_runs_like_it(mfu: float, place: str) -> None:
    assert f"; {place} what dense models" in dataclasses.replace(FULL, mfu=mfu).sentence


def test_a_users_own_flops_are_named_as_such() -> None:
    given = dataclasses.replace(FULL, convention="as given", peak="")
    assert given.sentence.startswith("20.2% MFU (FLOPs as given); ")


def test_a_plans_bound_is_its_own() -> None:
    assert "; its bound is 61.0%; " in dataclasses.replace(FULL, kind="plan").sentence


def test_a_run_like_none_says_so() -> None:
    alone = dataclasses.replace(FULL, like_runs=None)
    assert "; no published run is like it; " in alone.sentence
    assert "published" not in dataclasses.replace(alone, mfu=None).sentence


def test_the_schema_gives_the_verdict_back() -> None:
    for verdict in (FULL, Verdict(kind="gate", next_steps=NEXT)):
        text = json_text(verdict.to_json())
        newer = json.loads(text)
        for part in (newer, *newer["losses"], *newer["next_steps"], newer["like_runs"] or {}):
            part["newer"] = 1
        assert json_text(Verdict.of_json(newer).to_json()) == text


def test_a_loss_and_a_saving_are_the_same_share_and_seconds() -> None:
    loss = TimeLoss(name="idle", fraction=0.195, seconds=0.344)
    step = NextStep(text="log_period=100", gain_fraction=0.195, gain_seconds=0.344)
    assert str(loss) == "idle, 19.5% of the step, 344 ms"
    assert str(step) == "log_period=100 (saves 19.5% of the step, 344 ms)"


def test_small_losses_and_unknown_numbers_are_said() -> None:
    small = (TimeLoss(name="wait for data", fraction=0.012),)
    verdict = Verdict(kind="gate", finding="passed: no regression", losses=small, next_steps=NEXT)
    assert verdict.sentence.startswith(
        "passed: no regression; MFU not known; no loss above 2% found; next: "
    )


def test_the_schema_is_documented_field_by_field() -> None:
    answer = json.loads(json_text(FULL.to_json()))
    assert answer["schema"] == 1
    assert answer["losses"] == [
        {"name": "compile", "fraction": 0.24, "of": "wall clock", "seconds": None}
    ]
    assert answer["next_steps"][0]["gain_fraction"] == 0.118
    page = (Path(__file__).parents[1] / "docs" / "verdict.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(answer) == {"schema", "sentence", *(f.name for f in fields(Verdict))}
