"""`mfu_jax.tune`: a user's own step, in this process and in child processes."""

import functools
import json
import os
import sys
import threading
import time

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
    assert "items/s" in str(result).partition("next: ")[2]
    assert "tokens" not in str(result)


def test_a_donated_state_is_replaced_by_the_new_one():
    result = mfu_jax.tune(donating, {"size": [4, 8]}, in_process=True)
    assert {row.source for row in result.rows} == {"measured"}


def test_the_evidence_is_of_these_devices(tmp_path):
    path = tmp_path / "evidence.jsonl"
    mfu_jax.tune(make_step, {"size": [4, 8]}, in_process=True, evidence=path)
    kind = jax.devices()[0].device_kind
    assert (
        f"{jax.local_device_count()} × {kind}"
        in json.loads(path.read_text().splitlines()[0])["about"].values()
    )


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


def test_what_fails_is_not_said_to_need_less_memory():
    def fails(size):
        raise ValueError("bad")

    result = mfu_jax.tune(fails, {"size": [4, 8]}, in_process=True)
    text = " ".join(str(result).split())
    assert "2 runs of 2 combinations, all failed" in text
    assert "next: the first failure: ValueError: bad" in text
    assert "remat_policy" not in text


def test_a_budget_that_ends_before_the_first_trial_is_said():
    def fails(size):
        raise ValueError("cut off")

    with pytest.raises(UserError, match=r"no trial was done within 0\.5 s"):
        mfu_jax.tune(fails, {"size": [4, 8]}, in_process=True, budget=0.5)


def test_what_a_child_cannot_import_is_refused():
    with pytest.raises(UserError, match="cannot be imported by a child process") as caught:
        mfu_jax.tune(lambda size: None, {"size": [1, 2]})
    assert "in_process=True" in caught.value.hint


def test_a_start_outside_the_values_is_refused():
    with pytest.raises(UserError, match="with start"):
        mfu_jax.tune(make_step, {"size": [1, 2]}, start={"size": 3}, in_process=True)


def test_a_start_of_an_unknown_setting_is_refused():
    with pytest.raises(UserError, match="'sise' is none of the settings"):
        mfu_jax.tune(make_step, {"size": [1, 2]}, start={"sise": 2}, in_process=True)


def test_values_that_look_alike_are_refused():
    with pytest.raises(UserError, match="differ as text"):
        mfu_jax.tune(make_step, {"size": [1, "1", 2]}, start={"size": 2}, in_process=True)


def test_a_partial_is_a_step_like_any_other(tmp_path):
    path = tmp_path / "evidence.jsonl"
    plain = functools.partial(make_step, mode="plain")
    result = mfu_jax.tune(plain, {"size": [4, 8]}, in_process=True, evidence=path)
    assert {row.source for row in result.rows} == {"measured"}
    with pytest.raises(UserError, match="not the evidence of this search"):
        mfu_jax.tune(make_step, {"size": [4, 8]}, in_process=True, evidence=path)


def test_a_function_that_was_typed_in_is_refused(monkeypatch):
    monkeypatch.setattr(make_step, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(UserError, match=r"__main__\.make_step cannot be imported"):
        mfu_jax.tune(make_step, {"size": [1, 2]})


def with_a_thread_that_never_ends(size):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return make_step(size)


@pytest.mark.full
def test_a_child_that_answers_and_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("mfu_jax.planning.tune.any_step._EXIT_SECONDS", 0.5)
    began = time.monotonic()
    result = mfu_jax.tune(with_a_thread_that_never_ends, {"size": [4, 8]})
    assert {row.source for row in result.rows} == {"measured"}
    assert time.monotonic() - began < 300


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
