"""Metrics switched on by flags, argparse and mappings, and off at no cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import flags as absl_flags

import mfu_jax
from mfu_jax import flags
from mfu_jax.errors import UserError
from mfu_jax.instrumentation.assembly import sinks_of
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.settings import Settings
from mfu_jax.sinks import JsonlSink, TensorBoardSink
from mfu_jax.util import jax_internals


@jax.jit
def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, {"loss": loss}


# x[4, 8] @ w[8, 2], and the gradient of w alone.
STEP_FLOPS = 2 * (2 * 4 * 8 * 2)
W, X = jnp.ones((8, 2)), jnp.ones((4, 8))


def parsed(*arguments: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    flags.define(values)
    values(["trainer", *arguments])
    return values


def test_every_setting_is_a_flag_with_its_default() -> None:
    assert flags.settings(parsed()) == Settings()


def test_a_peak_of_zero_is_refused_and_no_tokens_are_not_shown() -> None:
    with pytest.raises(Exception, match=r"peak_tflops_per_device=0\.0 is not a peak"):
        parsed("--peak_tflops_per_device=0")
    with pytest.raises(UserError, match=r"peak_tflops_per_device=0\.0 is not a peak"):
        flags.from_mapping({"peak_tflops_per_device": "0"})
    assert flags.settings(parsed("--tokens_per_step=0")).tokens_per_step == 0


@pytest.mark.full
def test_logger_from_flags_logs_what_the_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = parsed(
        f"--metrics_file={path}",
        "--peak_tflops_per_device=0.001",
        "--tokens_per_step=32",
        "--warmup_steps=0",
        "--noabort_on_nan_loss",
    )
    compiled: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(details.get("fun_name")))

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        logger = mfu_jax.MetricLogger.from_flags(train_step, W, X, flag_values=values)
        w = W
        for step in range(3):
            w, metrics = train_step(w, X)
            logger.record(step, metrics)
        logger.close()
    finally:
        jax_internals.unregister_event_duration_listener(listen)
    assert compiled.count("jit(train_step)") == 1
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        seconds = record["perf/step_time_seconds"]
        assert record["perf/per_device_tflops"] == STEP_FLOPS / 1e12
        assert record["perf/mfu"] == pytest.approx(STEP_FLOPS / (1e9 * seconds))
        assert record["perf/hfu"] == record["perf/mfu"]
        assert record["perf/per_device_tokens"] == 32


def test_shapes_are_enough_for_the_example_arguments(tmp_path: Path) -> None:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    values = parsed("--peak_tflops_per_device=1")
    logger = mfu_jax.MetricLogger.from_flags(train_step, *shapes, flag_values=values)
    assert logger.cost.model_flops_per_device == STEP_FLOPS
    assert logger.cost.executed_flops_per_device == STEP_FLOPS
    logger.close()


def test_flops_by_value_and_by_config() -> None:
    values = parsed(
        "--flops_source=value", "--model_flops_per_device=77", "--peak_tflops_per_device=1"
    )
    with mfu_jax.MetricLogger.from_flags(train_step, W, X, flag_values=values) as logger:
        assert logger.cost.model_flops_per_device == 77
    analytic = Settings.of(
        {
            "flops_source": "analytic",
            "model_config": "llama3-8b per_device_batch_size=1 max_target_length=128",
            "peak_tflops_per_device": 1,
        }
    )
    with flags.make_logger(analytic, train_step, W, X) as logger:
        expected = mfu_jax.calculate_tflops_per_device(analytic.parsed_model_config()).total
        assert logger.cost.model_flops_per_device / 1e12 == pytest.approx(expected)
        assert logger.cost.tokens_per_device == 128


def test_instrument_takes_the_settings_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = parsed(f"--metrics_file={path}", "--peak_tflops_per_device=1", "--start_step=5")
    step = mfu_jax.instrument(train_step, settings=flags.settings(values))
    step(W, X)
    step.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5]


def test_disabled_everything_does_nothing() -> None:
    values = parsed("--noenable_mfu")
    logger = mfu_jax.MetricLogger.from_flags(train_step, "no", "arguments", flag_values=values)
    assert isinstance(logger, DisabledLogger)
    logger.record(0, {"loss": 1.0})
    assert logger.close() is None


def test_the_disabled_logger_has_every_method_of_the_real_one() -> None:
    methods = {name for name in vars(mfu_jax.MetricLogger) if not name.startswith("_")}
    assert methods - {"from_flags"} <= set(dir(DisabledLogger))


def test_argparse_and_mappings_give_the_same() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=0.1)
    flags.add_arguments(parser)
    args = parser.parse_args(["--log_period", "10", "--enable_mfu=false"])
    expected = Settings(log_period=10, enable_mfu=False)
    assert flags.from_mapping(vars(args), strict=False) == expected
    assert flags.from_mapping(args, strict=False) == expected
    assert flags.from_arguments(args) == expected
    assert flags.from_mapping({"log_period": 10, "enable_mfu": False}) == expected
    assert flags.settings(parsed("--log_period=10", "--noenable_mfu")) == expected


def test_names_with_a_prefix_fit_beside_a_trainers_own() -> None:
    expected = Settings(warmup_steps=5, log_period=10, enable_mfu=False)
    given = ["--mfu_warmup_steps=5", "--mfu_log_period=10", "--nomfu_enable_mfu"]

    values = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("warmup_steps", 2000, "of the learning rate", flag_values=values)
    flags.define(values, prefix="mfu_")
    values(["trainer", *given])
    assert flags.settings(values, prefix="mfu_") == expected
    assert values.warmup_steps == 2000

    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup_steps", type=int, default=2000)
    flags.add_arguments(parser, prefix="mfu_")
    args = parser.parse_args(given)
    assert flags.from_arguments(args, prefix="mfu_") == expected
    assert flags.from_mapping(args, prefix="mfu_") == expected
    assert args.warmup_steps == 2000

    config = {"warmup_steps": 2000, "mfu_warmup_steps": 5, "mfu_log_period": 10}
    assert flags.from_mapping({**config, "mfu_enable_mfu": False}, prefix="mfu_") == expected


def test_the_logger_of_prefixed_flags_is_that_of_the_flags() -> None:
    values = absl_flags.FlagValues()
    flags.define(values, prefix="mfu_")
    values(["trainer", "--nomfu_enable_mfu"])
    logger = mfu_jax.MetricLogger.from_flags(train_step, W, X, flag_values=values, prefix="mfu_")
    assert isinstance(logger, DisabledLogger)


def test_wrong_values_of_prefixed_flags_fail_when_they_are_parsed() -> None:
    values = absl_flags.FlagValues()
    flags.define(values, prefix="mfu_")
    with pytest.raises(absl_flags.IllegalFlagValueError, match=r"^hardware 'h1000' is not known"):
        values(["trainer", "--mfu_hardware=h1000"])


@pytest.mark.parametrize(
    ("arguments", "on"),
    [
        ([], True),
        (["--enable_mfu"], True),
        (["--enable_mfu=true"], True),
        (["--enable_mfu", "false"], False),
        (["--noenable_mfu"], False),
    ],
)
def test_a_switch_of_argparse_is_written_as_absls(arguments: list[str], on: bool) -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    assert flags.from_arguments(parser.parse_args(arguments)).enable_mfu is on


@pytest.mark.parametrize("argument", ["--log_period=0", "--flops_source=value"])
def test_a_wrong_argument_ends_the_program_as_argparses_own_errors_do(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        flags.from_arguments(parser.parse_args([argument]))
    assert ended.value.code == 2
    wrong, hint = capsys.readouterr().err.splitlines()
    assert f"error: {argument.removeprefix('--')}" in wrong
    assert hint.startswith("hint: usually")


def test_a_trainers_own_names_are_not_taken_for_ours(caplog: pytest.LogCaptureFixture) -> None:
    config = {"warmup_steps": 2000, "hardware": "tpu", "model_config": {"width": 8}}
    both = {**config, "log_period": 10, "learning_rate": 0.1}
    assert flags.from_mapping(both, strict=False) == Settings(log_period=10)
    assert [line.partition("=")[0] for line in caplog.messages] == list(config)
    assert "warmup_steps=2000 is left to the trainer" in caplog.text
    assert "prefix='mfu_'" in caplog.text
    caplog.clear()
    assert flags.from_mapping({"warmup_steps": 5}) == Settings(warmup_steps=5)  # all are ours
    assert flags.from_mapping({"mfu_x": 1}, prefix="mfu_", strict=False) == Settings()
    with pytest.raises(UserError, match=r"(?s)'mfu_log_perod'.*did you mean 'mfu_log_period'"):
        flags.from_mapping({"mfu_log_perod": 1}, prefix="mfu_")
    assert not caplog.messages


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    learning_rate: float = 0.1
    log_period: int = 10
    metrics_file: str = "run.jsonl"
    enable_mfu: bool = False


def _omegaconf() -> Any:
    return pytest.importorskip("omegaconf").OmegaConf.structured(TrainerConfig)


def _ml_collections() -> Any:
    collections = pytest.importorskip("ml_collections")
    return collections.ConfigDict(dataclasses.asdict(TrainerConfig()))


def _draccus() -> Any:
    return pytest.importorskip("draccus").parse(TrainerConfig, args=["--log_period=10"])


CONFIGS: dict[str, Callable[[], Any]] = {
    "dataclass": TrainerConfig,
    "namespace": lambda: argparse.Namespace(**vars(TrainerConfig())),
    "omegaconf": _omegaconf,
    "ml_collections": _ml_collections,
    "ml_collections, frozen": lambda: pytest.importorskip("ml_collections").FrozenConfigDict(
        _ml_collections()
    ),
    "fiddle": lambda: pytest.importorskip("fiddle").Config(TrainerConfig, learning_rate=0.2),
    "draccus": _draccus,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_objects_of_many_libraries_are_read(name: str) -> None:
    expected = Settings(log_period=10, metrics_file="run.jsonl", enable_mfu=False)
    config = CONFIGS[name]()
    assert flags.from_mapping(config, strict=False) == expected
    with pytest.raises(UserError, match=r"(?s)'learning_rate' is not a setting.*strict=False"):
        flags.from_mapping(config)


@pytest.mark.parametrize("config", [None, 3, "metrics", TrainerConfig])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(UserError, match=r"(?s)expected a mapping.*usually an empty section"):
        flags.from_mapping(config)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"log_perod": 1}, ["'log_perod'", "did you mean 'log_period'", "usually", "strict"]),
        ({"log_period": 0}, ["log_period=0", "at least 1", "usually", "large", "enable_mfu=false"]),
        ({"log_period": "ten"}, ["log_period='ten'", "whole number", "usually"]),
        ({"log_period": 1.5}, ["log_period=1.5", "whole number"]),
        ({"enable_mfu": "maybe"}, ["enable_mfu='maybe'", "true or false"]),
        ({"flops_source": "hlo"}, ["flops_source='hlo'", "traced, analytic, value"]),
        ({"flops_source": "value"}, ["no number", "expected", "usually", "pass it"]),
        ({"model_flops_per_device": 3}, ["does not read it", "flops_source=value"]),
        ({"peak_tflops_per_device": -1}, ["-1", "expected a positive number", "usually"]),
        ({"tokens_per_step": -1}, ["-1", "at least 0", "usually"]),
        ({"tensorboard_dir": 0}, ["tensorboard_dir=0", "expected text", "usually", "leave it out"]),
        ({"convention": "palm"}, ["palm", "expected", "flops_source=analytic"]),
    ],
)
def test_wrong_values_say_what_to_do(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError, match="(?s)" + ".*".join(parts)):
        flags.from_mapping(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware=h1000"], "^hardware 'h1000' is not known"),
        (["--flops_source=value"], "^flops_source=value has no number"),
        (["--flops_source=analytic"], "^model_config='' names no model"),
        (["--flops_source=analytic", "--model_config=llama9-8b"], "llama9-8b"),
        (["--profile_steps=9-3", "--profile_dir=p"], "(?s)^profile_steps='9-3'.*wrong way round"),
        (["--profile_steps=abc", "--profile_dir=p"], "(?s)'abc'.*hint: usually another notation"),
    ],
)
def test_wrong_flags_fail_when_they_are_parsed(arguments: list[str], message: str) -> None:
    with pytest.raises(absl_flags.IllegalFlagValueError, match=message):
        parsed(*arguments)


def test_a_count_that_fails_gives_a_logger_without_mfu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mfu_jax.instrumentation.program_analysis.traced_model", lambda *_: 1 / 0)
    with flags.make_logger(Settings(peak_tflops_per_device=1.0), train_step, W, X) as logger:
        logger.record(0, train_step(W, X)[1])
    assert logger.summary().steps + logger.summary().warmup_steps == 1
    (line,) = caplog.messages
    assert line.startswith("MFU of train_step is not known: TypeError")


def test_wrong_use_of_flags_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"(?s)no flag --log_period.*define\(\) before app.run"):
        flags.settings(absl_flags.FlagValues())
    unparsed = absl_flags.FlagValues()
    flags.define(unparsed)
    with pytest.raises(UserError, match=r"(?s)not parsed yet.*from main\(\)"):
        flags.settings(unparsed)
    with pytest.raises(UserError, match=r"(?s)defined twice.*instrument\(step, "):
        flags.define(unparsed)
    parser = argparse.ArgumentParser()
    with pytest.raises(
        UserError, match=r"(?s)no argument --mfu_log_period.*add_arguments\(parser\)"
    ):
        flags.from_arguments(parser.parse_args([]), prefix="mfu_")
    parser.add_argument("--warmup_steps", type=int)
    with pytest.raises(UserError, match=r"(?s)--warmup_steps is defined twice.*prefix='mfu_'"):
        flags.add_arguments(parser)


@pytest.mark.parametrize("arguments", [(W,), (W, jnp.ones((4, 9))), (W, "text")])
def test_wrong_example_arguments_say_what_to_do(arguments: tuple[Any, ...]) -> None:
    settings = Settings(peak_tflops_per_device=1.0)
    with pytest.raises(UserError, match=r"(?s)train_step cannot be .*expected.*usually.*pass them"):
        flags.make_logger(settings, train_step, *arguments)


def test_how_often_files_are_flushed_to_disk_is_a_setting(tmp_path: Path) -> None:
    settings = Settings(
        metrics_file=str(tmp_path / "m.jsonl"), tensorboard_dir=str(tmp_path), fsync_seconds=7
    )
    sinks = sinks_of(settings, progress=False)
    found = [
        sink._file.fsync_seconds for sink in sinks if isinstance(sink, JsonlSink | TensorBoardSink)
    ]
    assert found == [7.0, 7.0]
    for sink in sinks:
        sink.close()


def test_device_traces_cannot_go_to_an_object_store() -> None:
    with pytest.raises(UserError, match="profile_dir='gs://b/x' is an object store"):
        Settings(profile_steps="1-2", tensorboard_dir="gs://b/x")
