"""`instrument` on steps of many kinds: counted right, compiled once, and otherwise left alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.sinks import Sink, StepRecord
from mfu_jax.summary import Summary

PEAK = {"peak_tflops_per_device": 0.001}

# x[B, D] @ w1[D, F] @ w2[F, E]; training needs no gradient of x, so the first layer costs 2 × and
# the second 3 × its forward: 2·B·D·F·2 + 2·B·F·E·3.
B, D, F, E = 4, 8, 16, 2
STEP_FLOPS = 2 * B * D * F * 2 + 2 * B * F * E * 3


class Memory(Sink):
    """Keeps everything that a sink is given."""

    keeps_every_step = True

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.texts: dict[str, str] = {}
        self.summary: Summary | None = None

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def write_text(self, tag: str, text: str) -> None:
        self.texts[tag] = text

    def write_summary(self, summary: Summary) -> None:
        self.summary = summary

    def column(self, name: str) -> list[float]:
        return [record.scalars[name] for record in self.records]


class Compilations:
    """Names of the executables that JAX makes."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(details.get("fun_name")))

    def of(self, name: str) -> int:
        return self.names.count(f"jit({name})")


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    jax.clear_caches()  # two jits of one function share their programs
    seen = Compilations()
    jax.monitoring.register_event_duration_secs_listener(seen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(seen)


def train_step(state: Any, x: jax.Array, scale: float = 1.0) -> tuple[Any, dict[str, jax.Array]]:
    def loss(weights: Any) -> jax.Array:
        return scale * jnp.mean((jnp.tanh(x @ weights["w1"]) @ weights["w2"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), {"loss": value}


def make_state() -> dict[str, jax.Array]:
    one, two = jax.random.split(jax.random.key(0))
    return {"w1": jax.random.normal(one, (D, F)), "w2": jax.random.normal(two, (F, E))}


def batch(rows: int = B) -> jax.Array:
    return jnp.arange(rows * D, dtype=jnp.float32).reshape(rows, D) / 100


def run(step: Callable[..., Any], steps: int = 4) -> list[Any]:
    state, outputs = make_state(), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        outputs.append(jax.tree.map(np.asarray, (state, metrics)))
    return outputs


def test_counts_model_and_executed_flops_of_a_step() -> None:
    memory = Memory()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    run(step)
    step.close()
    assert step.flops.model.per_device == STEP_FLOPS
    assert step.flops.executed.total == STEP_FLOPS
    assert step.ledger.residual == 0
    assert memory.column("perf/per_device_tflops") == [STEP_FLOPS / 1e12] * 4
    for record in memory.records:
        seconds = record.scalars["perf/step_time_seconds"]
        assert record.scalars["perf/mfu"] == pytest.approx(STEP_FLOPS / (1e9 * seconds))
        assert record.scalars["perf/hfu"] == record.scalars["perf/mfu"]
    assert [record.step for record in memory.records] == [0, 1, 2, 3]
    assert memory.records[0].kind == "compile"


def test_outputs_are_bitwise_those_of_the_bare_step() -> None:
    bare = run(jax.jit(train_step, donate_argnums=0))
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=0), sinks=[], **PEAK)
    ours = run(step)
    step.close()
    jax.tree.map(np.testing.assert_array_equal, bare, ours)


def test_compiles_once_for_each_shape(compilations: Compilations) -> None:
    memory = Memory()
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=0), sinks=[memory], **PEAK)
    state = make_state()
    for rows in (4, 4, 6, 6, 4, 6):
        state, _ = step(state, batch(rows))
    step.close()
    assert compilations.of("train_step") == 2
    text = memory.texts["recompiled/train_step"]
    assert text == "train_step was recompiled at step 2: x: float32[4,8] → float32[6,8]"
    four, six = STEP_FLOPS, STEP_FLOPS * 6 // 4
    expected = [n / 1e12 for n in (four, four, six, six, four, six)]
    assert memory.column("perf/per_device_tflops") == expected
    assert [record.kind for record in memory.records][2] == "compile"


def test_donated_buffers_stay_donated() -> None:
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=0), sinks=[], **PEAK)
    first = make_state()
    second, _ = step(first, batch())
    assert all(leaf.is_deleted() for leaf in first.values())
    step(second, batch())
    assert all(leaf.is_deleted() for leaf in second.values())
    step.close()


def test_static_and_keyword_arguments(compilations: Compilations) -> None:
    memory = Memory()
    jitted = jax.jit(train_step, static_argnames="scale", donate_argnames="state")
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    state = make_state()
    for scale in (1.0, 1.0, 2.0):
        state, metrics = step(x=batch(), state=state, scale=scale)
    step.close()
    assert compilations.of("train_step") == 2
    assert memory.texts["recompiled/train_step"].endswith("scale: 1.0 → 2.0")
    assert memory.records[-1].scalars["learning/loss"] == float(metrics["loss"])


def test_traced_python_numbers_are_no_new_program(compilations: Compilations) -> None:
    memory = Memory()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    state = make_state()
    for rows, scale in ((4, 1.0), (6, 2.0), (4, 3.0), (6, 4.0), (4, 5.0)):
        state, _ = step(state, batch(rows), scale)
    step.close()
    assert compilations.of("train_step") == 2
    ratios = [value * 1e12 / STEP_FLOPS for value in memory.column("perf/per_device_tflops")]
    assert ratios == pytest.approx([1, 1.5, 1, 1.5, 1])


def test_programs_compiled_before_instrumenting_are_told_apart(compilations: Compilations) -> None:
    memory = Memory()
    jitted = jax.jit(train_step)
    for rows in (4, 6):
        jitted(make_state(), batch(rows))
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    for rows in (4, 6, 4):
        step(make_state(), batch(rows))
    step.close()
    assert compilations.of("train_step") == 2
    ratios = [value * 1e12 / STEP_FLOPS for value in memory.column("perf/per_device_tflops")]
    assert ratios == pytest.approx([1, 1.5, 1])


def test_per_device_counts_over_a_mesh_keep_shardings(compilations: Compilations) -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(everywhere, None))
    step = mfu_jax.instrument(jitted, sinks=[], **PEAK)
    state = jax.device_put(make_state(), everywhere)
    with jax.set_mesh(mesh):
        for _ in range(3):
            state, _ = step(state, jax.device_put(batch(4 * B), rows))
    step.close()
    assert compilations.of("train_step") == 1
    assert state["w1"].sharding.is_equivalent_to(everywhere, 2)
    assert step.flops.model.per_device == STEP_FLOPS
    assert step.flops.executed.total == STEP_FLOPS


def test_remat_raises_executed_but_not_model_flops() -> None:
    def remat_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.tanh(h @ w) @ w), None

        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0])

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    step = mfu_jax.instrument(jax.jit(remat_step), sinks=[], **PEAK)
    w = jnp.ones((3, D, D))
    for _ in range(2):
        w, _ = step(w, jnp.ones((B, D)))
    step.close()
    forward = 3 * 2 * (2 * B * D * D)
    # The scan carries dL/dh of every layer, also of the first one's input.
    assert step.flops.model.per_device == 3 * forward
    # The last tanh of a layer needs its own output again, so both matmuls run once more.
    assert step.flops.executed.total - step.flops.model.per_device == forward
    assert step.ledger.residual == 0


def test_flops_from_a_number_or_a_config() -> None:
    given = mfu_jax.instrument(jax.jit(train_step), flops_source=123, sinks=[], **PEAK)
    run(given, 1)
    given.close()
    assert given.flops.model.per_device == 123
    config = {
        "vocab_size": 512, "num_decoder_layers": 4, "emb_dim": 64, "num_query_heads": 4,
        "num_kv_heads": 4, "head_dim": 16, "mlp_dim": 256, "mlp_activations": ["gelu"],
        "per_device_batch_size": 2, "max_target_length": 128,
    }  # fmt: skip
    by_config = mfu_jax.instrument(
        jax.jit(train_step), flops_source=config, convention="dense", sinks=[], **PEAK
    )
    run(by_config, 1)
    by_config.close()
    assert by_config.flops.model.per_device == 452_984_832
    assert by_config.flops.model.tokens_per_device == 256


def test_as_decorator_and_context_manager() -> None:
    memory = Memory()

    @mfu_jax.instrument(sinks=[memory], **PEAK)
    @functools.partial(jax.jit, donate_argnums=0)
    def decorated(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Doc of the step."""
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, value

    assert decorated.__doc__ == "Doc of the step."
    with decorated as step:
        w = jnp.ones((D, F))
        for _ in range(3):
            w, loss = step(w, batch())
    assert memory.summary is not None
    assert memory.records[-1].scalars["learning/loss"] == float(loss)
    assert step.flops.model.per_device == 2 * (2 * B * D * F)


def test_plain_functions_are_jitted(compilations: Compilations) -> None:
    step = mfu_jax.instrument(train_step, jit={"donate_argnums": 0}, sinks=[], **PEAK)
    first = make_state()
    step(first, batch())
    step.close()
    assert compilations.of("train_step") == 1
    assert first["w1"].is_deleted()


class Trainer:
    """Has its step as a method, jitted, as many trainers do."""

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train_step(self, state: Any, x: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        return train_step(state, x)


@pytest.mark.parametrize("bind", ["method", "partial"])
def test_methods_and_partials_of_jitted_functions(bind: str, compilations: Compilations) -> None:
    memory = Memory()
    trainer = Trainer()
    bound = trainer.train_step
    if bind == "partial":
        bound = functools.partial(Trainer.train_step, trainer)
    step = mfu_jax.instrument(bound, sinks=[memory], **PEAK)
    state = make_state()
    for rows in (4, 4, 6):
        first, (state, _) = state, step(state, batch(rows))
        assert first["w1"].is_deleted()
    step.close()
    assert compilations.of("train_step") == 2
    assert step.flops.executed.total == step.flops.model.per_device == STEP_FLOPS * 6 // 4
    assert memory.texts["recompiled/train_step"].endswith("x: float32[4,8] → float32[6,8]")


def test_switched_off_it_only_calls_the_step() -> None:
    calls = []
    step = mfu_jax.instrument(lambda x: calls.append(x) or x, enable_mfu=False)
    threads = threading.active_count()
    assert step(3) == 3
    with step.logger.pause("eval"), step.logger.step() as scope, step.logger.phase("a"):
        scope.log(loss=1.0)
    assert step.close() is None
    assert calls == [3]
    assert threading.active_count() == threads


def test_steps_with_nothing_to_log_are_timed_all_the_same() -> None:
    memory = Memory()

    def grow(state: jax.Array) -> jax.Array:
        return state @ state * 1e-3

    step = mfu_jax.instrument(jax.jit(grow, donate_argnums=0), sinks=[memory], **PEAK)
    state = jnp.ones((8, 8))
    for _ in range(3):
        state = step(state)
    step.close()
    assert [r.scalars["perf/per_device_tflops"] * 1e12 for r in memory.records] == [2 * 8**3] * 3
    assert not any(name.startswith("learning/") for name in memory.records[0].scalars)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda a: {"loss": a, "grads": jnp.ones(3)}, {"loss"}),
        (lambda a: (jnp.ones((2, 2)), {"loss": a, "accuracy": a}), {"loss", "accuracy"}),
        (lambda a: (jnp.ones(3), jnp.int32(1), a), {"output_1", "loss"}),
        (lambda a: ((a, {"x": a}), jnp.ones(3)), {"loss"}),
        (lambda a: (jnp.ones(3), {"train_loss": a, "big": jnp.ones(3)}), {"train_loss"}),
        (lambda a: a, {"loss"}),
    ],
)
def test_metrics_are_found_in_the_output(output: Callable[..., Any], expected: set[str]) -> None:
    memory = Memory()
    step = mfu_jax.instrument(jax.jit(output), sinks=[memory], **PEAK)
    step(jnp.float32(0.5))
    step.close()
    found = {n for n in memory.records[0].scalars if n.startswith("learning/")}
    assert found == {f"learning/{name}" for name in expected}


def test_metrics_as_told() -> None:
    memory = Memory()
    step = mfu_jax.instrument(
        jax.jit(train_step), metrics=lambda out: {"mine": out[1]["loss"]}, sinks=[memory], **PEAK
    )
    outputs = run(step)
    step.close()
    assert memory.column("learning/mine") == [float(metrics["loss"]) for _, metrics in outputs]


def test_two_functions_are_parts_of_one_step() -> None:
    memory = Memory()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    critic = mfu_jax.instrument(jax.jit(train_step), logger=logger, **PEAK)
    actor = mfu_jax.instrument(jax.jit(train_step), logger=logger, **PEAK)
    actor.__name__ = "actor"
    state = make_state()
    for _ in range(2):
        with logger.step() as step:
            critic(state, batch())
            critic(state, batch())
            actor(state, batch(8))
            step.log(loss=1.5)
    logger.close()
    assert memory.column("perf/per_device_tflops") == [4 * STEP_FLOPS / 1e12] * 2
    assert memory.column("learning/loss") == [1.5, 1.5]
    assert {"learning/train_step/loss", "learning/actor/loss"} < set(memory.records[0].scalars)


def raises(*parts: str) -> Any:
    return pytest.raises(UserError, match="(?s)" + ".*".join(parts))


def test_errors_say_what_to_do() -> None:
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[], **PEAK)
    with raises("logged no call", "expected", "usually", "use what instrument"):
        _ = step.flops
    run(step, 1)
    step.close()
    with raises("called after close", "expected", "usually", "close it after"):
        step(make_state(), batch())
    with raises("given int", "expected the function", "usually", "pass the jitted"):
        mfu_jax.instrument(3)
    with raises("'log_perod'", "did you mean 'log_period'", "expected", "usually"):
        mfu_jax.instrument(train_step, log_perod=3)
    with raises("flops_source='trace'", "traced, analytic, value", "did you mean 'traced'"):
        mfu_jax.instrument(train_step, flops_source="trace")
    with raises("both given", "expected", "usually", "pass it to MetricLogger"):
        mfu_jax.instrument(train_step, logger=object(), log_period=3)


def test_functions_that_cannot_be_jitted_say_so() -> None:
    step = mfu_jax.instrument(lambda x: float(x.sum()), sinks=[], **PEAK)
    with raises("cannot be jitted", "expected", "usually", "with logger.step"):
        step(batch())


def test_a_call_inside_of_another_trace_says_so() -> None:
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[], **PEAK)
    with raises("while JAX traces", "expected", "usually", "outermost"):
        jax.jit(step)(make_state(), batch())
