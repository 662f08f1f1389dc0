"""`instrument` on steps of many kinds: counted right, compiled once, and otherwise left alone."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mfu_jax
from mfu_jax.cli import main
from mfu_jax.errors import UserError
from mfu_jax.hardware import calibration
from mfu_jax.settings import Settings
from mfu_jax.sinks import PrometheusSink, make_sink
from mfu_jax.util import jax_internals
from tests.support.instrumented import (
    PEAK,
    STEP_FLOPS,
    B,
    Compilations,
    D,
    F,
    batch,
    make_state,
    run,
    train_step,
)
from tests.support.sinks import ListSink


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    jax.clear_caches()  # two jits of one function share their programs
    seen = Compilations()
    jax.monitoring.register_event_duration_secs_listener(seen)
    yield seen
    jax_internals.unregister_event_duration_listener(seen)


@pytest.mark.parametrize("is_given", [False, True])
def test_measuring_a_peak_is_no_part_of_counting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_given: bool
) -> None:
    spans: list[str] = []

    def measure(*_: Any, **__: Any) -> dict[str, float]:
        spans.append(step.logger._spans.open.name)
        time.sleep(0.1)
        return {"flops_per_sec": 1e12, "size": 8, "busy": 0.0}

    monkeypatch.setenv("MFU_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "measure", measure)
    memory = ListSink()
    peak = {"peak_tflops_per_device": 1.0} if is_given else {}
    step = mfu_jax.instrument(jax.jit(lambda x: jnp.sum(x @ x)), sinks=[memory], **peak)
    step(jnp.ones((8, 8)))
    uses = step.close().seconds_by_use
    assert uses["count"] > 0
    assert spans == ([] if is_given else ["calibrate"])
    assert uses.get("calibrate", 0.0) == memory.records[0].scalars.get(
        "goodput/calibrate_seconds", 0.0
    )
    assert (uses.get("calibrate", 0.0) >= 0.1) is not is_given


@pytest.mark.full
@pytest.mark.usefixtures("compilations")
def test_counts_model_and_executed_flops_of_a_step() -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    run(step)
    step.close()
    assert step.flops.model.per_device == STEP_FLOPS
    assert step.flops.executed.total == STEP_FLOPS
    assert step.ledger.residual == 0
    assert memory.scalar("perf/per_device_tflops") == [STEP_FLOPS / 1e12] * 4
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


@pytest.mark.full
def test_compiles_once_for_each_shape(compilations: Compilations) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=0), sinks=[memory], **PEAK)
    state = make_state()
    for rows in (4, 4, 6, 6, 4, 6):
        state, _ = step(state, batch(rows))
    step.close()
    assert compilations.of("train_step") == 2
    text = dict(memory.texts)["recompiled/train_step"]
    assert text == "train_step was recompiled at step 2: x: float32[4,8] → float32[6,8]"
    four, six = STEP_FLOPS, STEP_FLOPS * 6 // 4
    expected = [n / 1e12 for n in (four, four, six, six, four, six)]
    assert memory.scalar("perf/per_device_tflops") == expected
    assert [record.kind for record in memory.records][2] == "compile"


def test_donated_buffers_stay_donated() -> None:
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=0), sinks=[], **PEAK)
    first = make_state()
    second, _ = step(first, batch())
    assert all(leaf.is_deleted() for leaf in first.values())
    step(second, batch())
    assert all(leaf.is_deleted() for leaf in second.values())
    step.close()


@pytest.mark.full
def test_static_and_keyword_arguments(compilations: Compilations) -> None:
    memory = ListSink()
    jitted = jax.jit(train_step, static_argnames="scale", donate_argnames="state")
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    state = make_state()
    for scale in (1.0, 1.0, 2.0):
        state, metrics = step(x=batch(), state=state, scale=scale)
    step.close()
    assert compilations.of("train_step") == 2
    assert dict(memory.texts)["recompiled/train_step"].endswith("scale: 1.0 → 2.0")
    assert memory.records[-1].scalars["learning/loss"] == float(metrics["loss"])


@pytest.mark.full
def test_traced_python_numbers_are_no_new_program(compilations: Compilations) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    state = make_state()
    for rows, scale in ((4, 1.0), (6, 2.0), (4, 3.0), (6, 4.0), (4, 5.0)):
        state, _ = step(state, batch(rows), scale)
    step.close()
    assert compilations.of("train_step") == 2
    ratios = [value * 1e12 / STEP_FLOPS for value in memory.scalar("perf/per_device_tflops")]
    assert ratios == pytest.approx([1, 1.5, 1, 1.5, 1])


@pytest.mark.full
def test_programs_compiled_before_instrumenting_are_distinguished(
    compilations: Compilations,
) -> None:
    memory = ListSink()
    jitted = jax.jit(train_step)
    for rows in (4, 6):
        jitted(make_state(), batch(rows))
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    for rows in (4, 6, 4):
        step(make_state(), batch(rows))
    step.close()
    assert compilations.of("train_step") == 2
    ratios = [value * 1e12 / STEP_FLOPS for value in memory.scalar("perf/per_device_tflops")]
    assert ratios == pytest.approx([1, 1.5, 1])


@pytest.mark.full
def test_per_device_counts_over_a_mesh_keep_shardings(compilations: Compilations) -> None:
    explicit = (AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=explicit)
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


def test_wrong_settings_fail_before_the_first_call() -> None:
    for options, parts in (
        ({"hardware": "h1000"}, r"'h1000' is not known.*nearest: 'h100'"),
        ({"peak_tflops_per_device": 1e15}, r"usually FLOP/s"),
        ({"profile_steps": "9-3", "profile_dir": "p"}, r"first and the last step"),
        ({"flops_source": "analytic"}, r"names no model"),
        ({"flops_source": "analytic", "model_config": "lama3-8b"}, r"lama3-8b"),
        ({"flops_source": {"emb_dim": 3}}, r"expected"),
        ({"trip_counts": 3}, r"expected a mapping from the name of a loop"),
        ({"group_sizes": 3}, r"group_sizes=3: expected the rows per group"),
        ({"group_sizes": (3, -1)}, r"expected the rows per group, whole numbers"),
        ({"sequence_lengths": (64.5,)}, r"expected the keys per sequence"),
    ):
        with pytest.raises(UserError, match=parts):
            mfu_jax.instrument(train_step, **options)


def test_an_unknown_chip_costs_mfu_and_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "mfu_jax.hardware.step_peaks.find_peak",
        lambda *_, **__: mfu_jax.hardware.lookup("TPU v99"),
    )
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory])
    run(step)
    step.close()
    (line,) = caplog.messages
    assert line.startswith("MFU of train_step is not known: device kind 'TPU v99'")
    assert "hardware=calibrate" in line
    assert memory.scalar("perf/mfu") == memory.scalar("perf/hfu") == [None] * 4
    assert memory.scalar("perf/per_device_tflops") == [STEP_FLOPS / 1e12] * 4
    assert None not in memory.scalar("learning/loss")


def test_equal_work_that_xla_merges_is_told_once() -> None:
    def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def gradient() -> jax.Array:
            return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

        return w - 0.1 * (gradient() + gradient()), {"loss": jnp.sum(w)}

    memory, w = ListSink(), jnp.ones((64, 64))
    step = mfu_jax.instrument(twice, jit={}, sinks=[memory], warmup_steps=0, **PEAK)
    for _ in range(4):
        w, _ = step(w, jnp.ones((64, 64)))
    step.close()
    assert step.ledger.removed == step.flops.model.per_device // 2
    notes = [note for record in memory.records for note in record.notes]
    (note,) = [note for note in notes if "MFU is above HFU" in note]
    assert "the program runs 50.0% of the model's FLOPs" in note
    assert not [
        flag for record in memory.records for flag in record.flags if flag == "hfu_below_mfu"
    ]


@pytest.mark.parametrize("declared", [False, True])
def test_the_set_up_says_if_attention_is_counted_in_full(declared: bool) -> None:
    def attend(x: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        x = jnp.tanh(x @ jnp.ones((8, 8)))
        weights = jax.nn.softmax(jnp.where(mask, x @ x.T, -jnp.inf))
        return {"loss": jnp.sum(weights @ x)}

    memory = ListSink()
    step = mfu_jax.instrument(attend, jit={}, sinks=[memory], **PEAK)
    with mfu_jax.attention_mask("causal") if declared else contextlib.nullcontext():
        step(jnp.ones((4, 8)), jnp.ones((4, 4), bool))
    step.close()
    shown = "\n".join(text for tag, text in memory.texts if tag.startswith("setup"))
    assert "model TFLOP per device per step: " in shown
    told = "50.0% of the model FLOPs are attention under a mask that depends on data or "
    assert (told in shown) == ('mfu_jax.attention_mask("causal")' in shown) == (not declared)


@pytest.mark.usefixtures("compilations")
def test_only_what_can_be_the_cause_of_a_recompilation_is_named() -> None:
    memory = ListSink()
    jitted = jax.jit(lambda x, number, scale: (x * number * scale).sum())
    step = mfu_jax.instrument(jitted, sinks=[memory], **PEAK)
    # The counter is a Python number in the first call and JAX's own, weakly typed, in the second.
    step(batch(4), 0, 0.5)
    step(batch(6), jnp.asarray(0) + 1, 0.25)
    step.close()
    text = dict(memory.texts)["recompiled/<lambda>"]
    assert "x: float32[4,8] → float32[6,8]" in text
    assert "scale" not in text
    assert not any(record.notes for record in memory.records)


@pytest.mark.full
@pytest.mark.usefixtures("compilations")
def test_a_program_of_equal_counts_has_no_second_ledger() -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    step(make_state(), batch(), 1)
    step(make_state(), batch(), 1.5)
    step.close()
    tags = [tag for tag, _ in memory.texts]
    assert tags.count("recompiled/train_step") == 1
    assert tags.count("ledger/train_step") == 1


def test_trip_counts_of_loops_that_depend_on_data() -> None:
    @jax.jit
    def loop(x: jax.Array, times: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x @ x, x).sum()

    once = mfu_jax.instrument(loop, sinks=[], **PEAK)
    once(jnp.eye(D), jnp.int32(3))
    once.close()
    assert once.flops.executed.total == 2 * D**3
    (name,) = {item.where for item in once.flops.executed.unaccounted}
    given = mfu_jax.instrument(loop, sinks=[], trip_counts={name: 3}, **PEAK)
    given(jnp.eye(D), jnp.int32(3))
    given.close()
    assert given.flops.executed.total == 3 * 2 * D**3
    assert not given.flops.executed.unaccounted


@pytest.mark.full
def test_group_sizes_that_are_data() -> None:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows, width, hidden = 8, 8, 16
    x, w = jnp.ones((rows, width)), jnp.ones((2, width, hidden))
    step = jax.jit(lambda x, w, sizes: gmm(x, w, sizes, tiling=(8, 8, 16), interpret=True).sum())
    for options, counted in (({}, rows), ({"group_sizes": (4, 1)}, 5)):
        instrumented = mfu_jax.instrument(step, sinks=[], **options, **PEAK)
        instrumented(x, w, jnp.array([4, 1]))
        instrumented.close()
        assert instrumented.flops.model.per_device == 2 * counted * width * hidden


def test_a_first_call_that_fails_leaves_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[memory], **PEAK)
    with pytest.raises(TypeError):
        step(make_state(), "text")
    with pytest.raises(UserError, match="logged no call"):
        step.summary()
    assert step.close() is None
    assert memory.summary is None
    assert not caplog.messages


def test_the_name_of_a_partial_that_another_library_jits() -> None:
    jitted = nnx.jit(functools.partial(train_step, scale=2.0))
    assert mfu_jax.instrument(jitted, sinks=[], **PEAK).__name__ == "train_step"


def test_as_decorator_and_context_manager() -> None:
    memory = ListSink()

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


@pytest.mark.full
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


def test_a_run_dir_has_what_every_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = mfu_jax.instrument(jax.jit(train_step), run_dir=str(tmp_path / "a"), **PEAK)
    run(step)
    step.close()
    assert (step.settings.profile_dir, step.settings.metrics_file) == (
        f"{tmp_path}/a/profile",
        f"{tmp_path}/a/metrics.jsonl",
    )
    assert {"metrics.jsonl", "tensorboard"} <= {path.name for path in (tmp_path / "a").iterdir()}
    assert f"mfu-jax report {tmp_path}/a" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "a")]) == 0
    assert "% MFU" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(UserError, match="run_dir"):
        mfu_jax.instrument(train_step, run_dir=True)


def test_the_next_step_names_the_file_that_a_sink_writes(tmp_path: Path) -> None:
    sink = make_sink("jsonl", str(tmp_path / "metrics.jsonl"))
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[sink], **PEAK)
    run(step)
    summary = step.close()
    assert summary.verdict is not None
    assert summary.verdict.next_steps[-1].text.startswith(f"mfu-jax report {tmp_path} ")


def test_outputs_that_sinks_replace_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(tmp_path / "a.jsonl")
    mfu_jax.instrument(jax.jit(train_step), sinks=[], metrics_file=file, **PEAK)
    assert f"metrics_file={file!r}: not written" in caplog.text
    caplog.clear()
    mfu_jax.instrument(jax.jit(train_step), sinks=[], **PEAK)
    mfu_jax.instrument(jax.jit(train_step), metrics_file=file, **PEAK)
    assert not caplog.text


@pytest.mark.parametrize(
    ("setting", "name", "make"),
    [
        ("metrics_file", "a.jsonl", lambda path: make_sink("jsonl", path)),
        ("tensorboard_dir", "./tb/", lambda path: make_sink("tensorboard", path)),
        ("prometheus_textfile", "a.prom", lambda path: PrometheusSink(port=None, textfile=path)),
    ],
)
def test_an_output_that_a_given_sink_writes_is_not_said_to_lack(
    setting: str,
    name: str,
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if setting == "prometheus_textfile":
        pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    outputs = {"metrics_file": "b.jsonl", "tensorboard_dir": "b", setting: name}
    with contextlib.closing(make(str(tmp_path / name))) as sink:
        mfu_jax.instrument(jax.jit(train_step), sinks=[sink], **outputs, **PEAK)
    said = {other for other in outputs if f"{other}=" in caplog.text}
    assert said == outputs.keys() - {setting}


@pytest.mark.parametrize("folder", ["a", ""])
def test_another_run_dir_moves_what_the_first_has_named(folder: str) -> None:
    own = Settings(run_dir=folder, metrics_file="/metrics.jsonl", profile_dir="p")
    step = mfu_jax.instrument(train_step, settings=own, run_dir="b", sinks=[])
    settings = step.settings
    assert (settings.tensorboard_dir, settings.metrics_file, settings.profile_dir) == (
        "b/tensorboard",
        "/metrics.jsonl",
        "p",
    )
    kept = mfu_jax.instrument(train_step, settings=Settings(run_dir="a"), log_period=3, sinks=[])
    assert kept.settings.metrics_file == "a/metrics.jsonl"
    moved = mfu_jax.instrument(train_step, settings=kept.settings, run_dir="b", sinks=[])
    assert vars(moved.settings) == vars(Settings(run_dir="b", log_period=3))


def test_a_file_of_its_own_is_not_moved_into_the_run_dir() -> None:
    settings = Settings(run_dir="runs/a", metrics_file="b.jsonl")
    assert settings.metrics_file == "b.jsonl"
    assert settings.tensorboard_dir == "runs/a/tensorboard"


@pytest.mark.full
@pytest.mark.parametrize("wrap", [lambda step: step, functools.partial], ids=["bare", "partial"])
def test_a_cached_partial_of_flax_is_the_step_that_it_caches(
    wrap: Any, compilations: Compilations
) -> None:
    rows, width, out = 2, 8, 4

    has_modes = "graph_updates" in inspect.signature(nnx.cached_partial).parameters
    graph = {"graph": True, "graph_updates": True} if has_modes else {}

    @nnx.jit(**graph)
    def update(model: nnx.Linear, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.sum(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model), grads))
        return loss

    def losses(observe: Any) -> tuple[list[float], Any]:
        model = nnx.Linear(width, out, rngs=nnx.Rngs(0))
        cached = nnx.cached_partial(update, model, **graph)
        step = observe(wrap(cached))
        return [float(step(jnp.ones((rows, width)))) for _ in range(3)], step

    bare, _ = losses(lambda step: step)
    jax.clear_caches()
    compiled = compilations.of("update")
    measured, step = losses(lambda step: mfu_jax.instrument(step, sinks=[], **PEAK))
    step.close()
    assert measured == bare
    assert compilations.of("update") == compiled + 1
    flops = 2 * (2 * rows * width * out)  # forward, and the gradient of the weights
    assert step.flops.model.per_device == step.flops.executed.total == flops


@pytest.mark.full
@pytest.mark.parametrize("bind", ["method", "partial"])
def test_methods_and_partials_of_jitted_functions(bind: str, compilations: Compilations) -> None:
    memory = ListSink()
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
    assert dict(memory.texts)["recompiled/train_step"].endswith("x: float32[4,8] → float32[6,8]")
