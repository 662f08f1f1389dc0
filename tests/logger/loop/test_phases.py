"""Phases of a step: when they begin and end, and what they and the whole step come to."""

from __future__ import annotations

import gc
import importlib.util
import json
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.logger.loop.phases import PhaseBook
from mfu_jax.logger.records.step_cost import StepCost, add_costs
from mfu_jax.logger.timing.readiness import Watcher
from tests.support.fake_device import FakeClock, FakeWatcher
from tests.support.floats import assert_close_as_float32
from tests.support.paths import ROOT
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS

PEAK = {"peak_tflops_per_device": 0.001}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Book(PhaseBook):
    """A book whose device ends each phase at a time that the test sets."""

    def watch(self, marker: Any) -> Any:
        return Ended(marker)


class Ended:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def result(self) -> float:
        return self.seconds


def spans(*phases: tuple[float, float, float | None]) -> list[float]:
    """Seconds of phases that were entered, left, and whose outputs were ready at these times."""
    clock = Clock()
    book = Book(clock, FakeWatcher(FakeClock()))
    made = []
    for entered, left, ready in phases:
        clock.now = entered
        with book.phase("a", None) as phase:
            clock.now = left
            phase._marker = ready
        made.append(phase)
    return [phase.seconds() for phase in made]


def test_a_phase_of_the_host_alone_takes_its_block() -> None:
    assert spans((1.0, 3.0, None), (3.5, 4.0, None)) == [2.0, 0.5]


def test_the_device_ends_a_phase_and_the_next_begins_then() -> None:
    # Both are dispatched at once; the device works from 0 to 5 on the one, to 7 on the other.
    assert spans((0.0, 0.1, 5.0), (0.1, 0.2, 7.0)) == [5.0, 2.0]


def test_an_idle_device_begins_when_the_phase_is_entered() -> None:
    assert spans((0.0, 0.1, 1.0), (3.0, 3.1, 4.0)) == [1.0, 1.0]


@pytest.mark.full
def test_phases_without_a_step_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.loop.phases._MOST_PHASES", 5)
    clock = Clock()
    book = Book(clock, FakeWatcher(FakeClock()))
    alive = []
    for _ in range(500):
        with book.phase("a", None) as phase:
            clock.now += 2.0
        alive.append(weakref.ref(phase))
    del phase
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 6  # and the one before them
    metrics, _ = book.take()
    assert metrics["phase/a"]()["seconds"] == 5 * 2.0


def test_a_device_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.timing.readiness._JOIN_SECONDS", 0.0)
    release = threading.Event()
    hung = SimpleNamespace(block_until_ready=lambda: release.wait(HANG_SECONDS))
    watcher = Watcher(lambda: (0.0, 1.0))
    ended = PhaseBook(Clock(), watcher).watch(hung)
    watcher.close()
    assert not ended.done()
    release.set()
    assert ended.result(HANG_SECONDS) > 0


def test_costs_add_and_what_is_unknown_stays_unknown() -> None:
    one = StepCost(model_flops_per_device=3, executed_flops_per_device=4, peak_flops_per_sec=10.0)
    both = add_costs([one, one])
    assert (both.model_flops_per_device, both.executed_flops_per_device) == (6, 8)
    rates = both.rates(1.0)
    assert (rates["perf/mfu"], rates["perf/hfu"]) == (0.6, 0.8)
    assert "perf/mbu" not in rates
    faster = StepCost(
        model_flops_per_device=30, executed_flops_per_device=40, peak_flops_per_sec=100.0
    )
    # 3 FLOPs at 10 a second and 30 at 100 a second take 0.6 seconds at best.
    assert add_costs([one, faster]).rates(1.0)["perf/mfu"] == pytest.approx(0.6)
    unknown = StepCost(model_flops_per_device=3, peak_flops_per_sec=10.0)
    assert add_costs([one, unknown]).executed_flops_per_device is None


@jax.jit
def play(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@jax.jit
def learn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, {"loss": loss}


FORWARD = 2 * 16 * 8 * 8


def test_phases_and_the_whole_step() -> None:
    memory = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=1)
    rollout = mfu_jax.instrument(play, logger=logger, **PEAK)
    update = mfu_jax.instrument(learn, logger=logger, **PEAK)
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    for _ in range(4):
        with logger.step():
            with logger.phase("rollout"):
                for _ in range(3):
                    x = rollout(w, x)
            with logger.phase("update"):
                w, metrics = update(w, x)
    summary = logger.close()
    last = memory.records[-1].scalars
    assert last["learning/loss"] == float(metrics["loss"])
    assert last["perf/per_device_tflops"] * 1e12 == 5 * FORWARD
    assert last["phase/rollout/per_device_tflops"] * 1e12 == 3 * FORWARD
    assert last["phase/update/per_device_tflops"] * 1e12 == 2 * FORWARD
    for name, flops in (("rollout", 3 * FORWARD), ("update", 2 * FORWARD)):
        seconds = last[f"phase/{name}/seconds"]
        assert last[f"phase/{name}/mfu"] == pytest.approx(flops / (1e9 * seconds))
        assert last[f"phase/{name}/hfu"] == last[f"phase/{name}/mfu"]
        # The first step compiles and is excluded.
        assert summary.phases[name]["times"] == 3
    assert "phase update: 3 times" in summary.render()


def test_phases_of_functions_that_nobody_instrumented() -> None:
    memory = ListSink()
    cost = StepCost(model_flops_per_device=FORWARD, peak_flops_per_sec=1e9)
    clock = FakeClock()
    with mfu_jax.MetricLogger(
        sinks=[memory], clock=clock.wall, monotonic=clock.monotonic
    ) as logger:
        w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
        for step in range(2):
            with logger.phase("environment"):
                clock.advance(2.0)
            with logger.phase("rollout", cost=cost) as phase:
                x = play(w, x)
                phase.wait_for(x)
                clock.advance(0.5)
            logger.record(step, {"loss": x.mean()})
    last = memory.records[-1].scalars
    assert last["perf/per_device_tflops"] * 1e12 == FORWARD
    assert last["phase/environment/seconds"] == 2.0
    assert "phase/environment/mfu" not in last
    assert last["phase/rollout/seconds"] == 0.5
    assert last["phase/rollout/mfu"] == pytest.approx(FORWARD / (1e9 * 0.5))


def test_a_step_timed_as_a_block() -> None:
    memory = ListSink()
    with mfu_jax.MetricLogger(
        sinks=[memory], model_flops_per_device=2 * FORWARD, start_step=3
    ) as logger:
        w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
        for _ in range(2):
            with logger.step() as step:
                w, metrics = learn(w, x)
                step.log(metrics, rate=0.1)
    assert [record.step for record in memory.records] == [3, 4]
    assert memory.records[-1].scalars["learning/loss"] == float(metrics["loss"])
    assert memory.records[-1].scalars["learning/rate"] == 0.1
    assert memory.records[-1].scalars["perf/per_device_tflops"] * 1e12 == 2 * FORWARD


def test_a_step_that_raises_is_not_recorded() -> None:
    memory = ListSink()
    with mfu_jax.MetricLogger(sinks=[memory]) as logger:
        with pytest.raises(KeyError), logger.step(), logger.phase("a"):
            raise KeyError("x")
        with logger.step():
            pass
    assert [record.step for record in memory.records] == [0]
    assert not any(name.startswith("phase/") for name in memory.records[0].scalars)


def test_wrong_nesting_says_what_to_do() -> None:
    with mfu_jax.MetricLogger(sinks=[]) as logger:
        with (
            pytest.raises(UserError, match=r"(?s)inside phase 'a'.*expected.*usually.*logger.step"),
            logger.phase("a"),
            logger.phase("b"),
        ):
            pass
        with (
            pytest.raises(UserError, match=r"(?s)inside step 0.*expected.*usually.*logger.phase"),
            logger.step(),
            logger.step(),
        ):
            pass
        with pytest.raises(UserError, match=r"(?s)is not usable.*expected.*usually"):
            logger.phase("a/b")


def rl_phases() -> Any:
    path = ROOT / "examples" / "rl_phases.py"
    spec = importlib.util.spec_from_file_location("rl_phases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_cartpole_falls_as_its_equations_say() -> None:
    module = rl_phases()
    # At rest and upright, with θ = 0: θ'' = −F/m_total / (l (4/3 − m_pole/m_total)) by hand.
    after = module.dynamics(jnp.zeros((1, 4)), jnp.array([1]))
    turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    drive = 10 / 1.1 - 0.1 * 0.5 * turn / 1.1
    assert_close_as_float32(after[0], np.array([0, 0.02 * drive, 0, 0.02 * turn]), terms=1)


@pytest.mark.full
def test_actor_critic_learns_and_logs_its_phases(tmp_path: Path) -> None:
    module = rl_phases()
    path = tmp_path / "rl.jsonl"
    stands = module.main(
        ["--iterations=40", f"--metrics_file={path}", "--peak_tflops_per_device=1"]
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = records[0], records[-1]
    assert len(records) == 40
    assert stands > 2 * first["learning/episode_steps"]
    # network [4, 128, 128] and the actor's 2: a rollout needs no critic.
    a_step = 2 * 256 * (4 * 128 + 128 * 128 + 128 * 2)
    assert last["phase/rollout/per_device_tflops"] * 1e12 == pytest.approx(64 * a_step, rel=1e-12)
    parts = [last[f"phase/{name}/per_device_tflops"] for name in ("rollout", "update")]
    assert last["perf/per_device_tflops"] == pytest.approx(sum(parts), rel=1e-12)


def test_a_pool_works_for_the_phase_that_is_open_and_an_actor_has_a_logger_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner, actor = ListSink(), ListSink()
    logger = mfu_jax.MetricLogger(sinks=[learner], warmup_steps=0)
    of_actor = mfu_jax.MetricLogger(sinks=[actor], warmup_steps=0)
    update, work, act = (
        mfu_jax.instrument(jax.jit(lambda x: {"sum": jnp.sum(x)}), logger=used, **PEAK)
        for used in (logger, logger, of_actor)
    )
    errors: list[BaseException] = []

    def run(function: Any) -> None:
        def attempt() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(HANG_SECONDS)

    def act_once() -> None:
        with logger.step() as step, logger.phase("rollout") as phase:  # the learner's logger
            phase.wait_for(jnp.ones(2))
            step.log(reward=1.0)
        with of_actor.step(), of_actor.phase("rollout"):
            act(jnp.ones(8))

    def learn_thrice() -> None:
        for _ in range(3):
            with logger.step(), logger.phase("update"):
                update(jnp.ones(4))
                run(act_once)
                run(lambda: work(jnp.ones(2)))

    run(learn_thrice)
    logger.close()
    of_actor.close()
    assert not errors
    assert [record.step for record in learner.records] == [0, 1, 2]
    assert [record.step for record in actor.records] == [0, 1, 2]
    # The first has compiled.
    assert {n: of["times"] for n, of in logger.summary().phases.items()} == {"update": 2}
    assert {n: of["times"] for n, of in of_actor.summary().phases.items()} == {"rollout": 2}
    (line,) = caplog.messages
    assert "is not logged: thread" in line
    assert "give each thread its own MetricLogger" in line
