"""`dump_program=` stores every program of a step, and hurts nothing if it cannot."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import mfu_jax
from mfu_jax.dumps import load
from mfu_jax.errors import UserError
from tests.support.instrumented import PEAK, STEP_FLOPS, batch, make_state, run, train_step


@pytest.mark.full
def test_the_step_is_dumped_with_its_model_flops(tmp_path: Path) -> None:
    path = tmp_path / "step.mfu"
    lengths = {"group_sizes": (3, 0), "sequence_lengths": (64,)}
    step = mfu_jax.instrument(
        jax.jit(train_step), dump_program=str(path), sinks=[], **lengths, **PEAK
    )
    with step:
        run(step)
    dump = load(path)
    assert dump.lengths.named == lengths
    assert dump.name == "jit_train_step"
    assert dump.model is not None
    assert dump.model.per_device == STEP_FLOPS


def test_another_program_of_the_step_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "step.mfu")
    step = mfu_jax.instrument(jax.jit(train_step), dump_program=path, sinks=[], **PEAK)
    with step:
        for rows in (4, 4, 8, 4):
            step(make_state(), batch(rows))
    models = [load(tmp_path / name).model for name in ("step.mfu", "step.2.mfu")]
    assert [model.per_device for model in models if model] == [STEP_FLOPS, 2 * STEP_FLOPS]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dump_that_cannot_be_written_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "step.mfu")
    step = mfu_jax.instrument(jax.jit(train_step), dump_program=path, sinks=[], **PEAK)
    with step:
        run(step)
    (line,) = [r.getMessage() for r in caplog.records if "is not dumped" in r.getMessage()]
    assert "cannot be written" in line
    assert step.flops is not None


def test_a_name_that_compare_does_not_know_is_refused_at_once() -> None:
    with pytest.raises(
        UserError, match=r"(?s)dump_program 'step.hlo': expected a name.*step.hlo.mfu"
    ):
        mfu_jax.instrument(train_step, dump_program="step.hlo")
