"""How layers are cut into the stages of a pipeline, and what cannot be cut."""

import dataclasses
import re
from fractions import Fraction

import jax
import pytest
from mfu_jax.layers.building import Inputs
from mfu_jax.layers.families import model_spec
from mfu_jax.layers.stack.pipeline import OF_ROWS, PipelineSchedule, schedule_of

from mfu_jax.trainer.config import pyconfig
from tests.campaigns.shardings import trainer_program


def schedule(*words: str) -> PipelineSchedule | None:
    config = pyconfig.load(["configs/base.yml", *words])
    return schedule_of(config, model_spec(config).layers)


@pytest.mark.parametrize(
    ("words", "passes", "turns", "bubble"),
    [
        # 8 layers: stages 4, one layer each, twice around; microbatches as many as stages.
        (["pipeline=4"], 2, 4 * 2 + 3, Fraction(3, 11)),
        (["pipeline=4", "num_pipeline_microbatches=16"], 2, 16 * 2 + 3, Fraction(3, 35)),
        (["pipeline=4", "num_layers_per_pipeline_stage=2"], 1, 4 + 3, Fraction(3, 7)),
        (["pipeline=2", "dcn_pipeline_parallelism=2"], 2, 4 * 2 + 3, Fraction(3, 11)),
    ],
)
def test_turns_and_bubble(words: list[str], passes: int, turns: int, bubble: Fraction) -> None:
    made = schedule("num_decoder_layers=8", *words)
    assert made is not None
    assert (made.repeats, made.turns, made.bubble) == (passes, turns, bubble)


def test_a_pattern_of_several_layers_stays_in_one_stage() -> None:
    made = schedule("model_name=gpt-oss-20b", "pipeline=4", "num_layers_per_pipeline_stage=2")
    assert made == PipelineSchedule(stages=4, repeats=3, chunk=1, microbatches=4)  # 24 layers


def test_a_microbatch_has_all_that_rows_have() -> None:
    of_layers = {"kept", "per_layer", "notes", "deep"}  # layers with these cannot be cut
    assert {field.name for field in dataclasses.fields(Inputs)} == {*OF_ROWS, *of_layers}


@pytest.mark.full
def test_microbatches_are_gathered_before_the_turns_and_not_in_each() -> None:
    text = trainer_program("dense", "pipeline", jax.devices()[:8]).as_text()
    gathers = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    assert gathers
    assert not [line for line in gathers if "while/body" in line]


def test_one_stage_is_no_pipeline() -> None:
    assert schedule("pipeline=1") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline=3"], "num_decoder_layers=4 cannot be cut into pipeline=3 stages"),
        (["pipeline=2", "num_layers_per_pipeline_stage=4"], "expected a multiple of 2 × 4"),
        (["pipeline=2", "model_name=gpt-oss-20b"], "the pattern's 2 layers"),
        (["pipeline=2", "model_name=deepseek3-671b"], "repeat one pattern"),
        (["pipeline=2", "mtp_num_layers=1"], "multi-token prediction"),
    ],
)
def test_what_cannot_be_cut_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*words)
