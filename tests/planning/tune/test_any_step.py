"""`mfu_jax.tune`: a user's own step, in this process and in child processes."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.errors import UserError


def make_step(size, mode="plain"):
    if mode == "crash":
        print("the last line of a crash", file=sys.stderr, flush=True)
        os._exit(7)
    if mode == "memory":
        raise MemoryError("no room")

    @jax.jit
    def step(state, batch):
        return state + (batch @ batch).sum(), {"loss": batch.sum()}

    return step, jnp.zeros(()), jnp.ones((size, size))


def donating(size):
    step = jax.jit(lambda state: (state + 1, state.sum()), donate_argnums=0)
    return step, jnp.zeros((size,))


def test_the_speed_is_items_per_second():
    result = mfu_jax.tune(
        make_step,
        {"size": [4, 700]},
        items=lambda size: size**3,
        in_process=True,
    )
    assert result.unit == "items/s"
    assert result.settings == {"size": 700}
    assert result.gain_fraction > 1
    assert result.rows[0].memory_peak_bytes > 0
    assert "size=700" in str(result)
    assert "items/s" in str(result).splitlines()[2]
    assert "tokens" not in str(result)


def test_a_donated_state_is_replaced_by_the_new_one():
    result = mfu_jax.tune(donating, {"size": [4, 8]}, in_process=True)
    assert {row.source for row in result.rows} == {"measured"}


def test_memory_and_errors_are_answers():
    def fails(size):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory") if size == 8 else ValueError("bad")

    result = mfu_jax.tune(fails, {"size": [4, 8]}, in_process=True)
    found = {row.values["size"]: row for row in result.rows}
    assert found["8"].fits is False
    assert found["4"].source == "failed"
    assert found["4"].note == "ValueError: bad"
    assert result.winner is None
    assert "no point fits" in str(result)


def test_a_value_without_brackets_is_refused():
    with pytest.raises(UserError, match="expected a list of values") as caught:
        mfu_jax.tune(lambda size: None, {"size": 4}, in_process=True)
    assert "[4]" in caught.value.hint


def test_what_a_child_cannot_import_is_refused():
    with pytest.raises(UserError, match="cannot be imported by a child process") as caught:
        mfu_jax.tune(lambda size: None, {"size": [1, 2]})
    assert "in_process=True" in caught.value.hint


def test_a_start_outside_the_values_is_refused():
    with pytest.raises(UserError, match="with start"):
        mfu_jax.tune(make_step, {"size": [1, 2]}, start={"size": 3}, in_process=True)


@pytest.mark.full
def test_a_crash_of_a_child_is_an_answer_with_its_last_line(tmp_path):
    modes = {"size": [64], "mode": ["plain", "crash", "memory"]}
    path = tmp_path / "evidence.jsonl"
    result = mfu_jax.tune(make_step, modes, evidence=path)
    found = {row.values["mode"]: row for row in result.rows}
    assert result.settings["mode"] == "plain"
    assert found["crash"].note == "exit code 7: the last line of a crash"
    assert found["memory"].fits is False
    assert len(path.read_text().splitlines()) == 4

    again = mfu_jax.tune(make_step, modes, evidence=path)
    assert again.winner.step_time_seconds == result.winner.step_time_seconds
    assert len(path.read_text().splitlines()) == 4
