"""The trainer as its user runs it: a process, its exit code, and the files that it leaves."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mfu_jax import cli
from mfu_jax.logger.non_finite import NON_FINITE_EXIT_CODE
from mfu_jax.profiling.profile import read_profile
from mfu_jax.trainer.checkpoint import CHECKPOINT_EXIT_CODE
from tests.support.floats import assert_close_as_float32
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS

TINY = [
    "configs/base.yml",
    "num_decoder_layers=1",
    "emb_dim=32",
    "mlp_dim=64",
    "num_query_heads=2",
    "num_kv_heads=1",
    "head_dim=16",
    "max_target_length=32",
    "per_device_batch_size=4",
    "peak_tflops_per_device=5",
    "tensorboard_dir=",
]


def one_device() -> dict[str, str]:
    """The environment of a trainer on one CPU device, whose machine code is not optimised."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def start(
    folder: Path, *arguments: str, wrapper: Sequence[str] = (), **options: Any
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mfu_jax.train", *TINY, f"base_output_directory={folder}"]
    return subprocess.Popen(
        [*wrapper, *command, *arguments],
        cwd=ROOT,
        env=one_device(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def send_after(process: subprocess.Popen[str], step: int, signum: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"completed step: {step},"):
            process.send_signal(signum)
            return


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, out, err


def records(folder: Path, name: str = "default") -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str = "default") -> list[float]:
    return [record["learning/loss"] for record in records(folder, name)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Forty steps without a break."""
    folder = tmp_path_factory.mktemp("straight")
    tensorboard = f"tensorboard_dir={folder / 'events'}"
    code, out, err = run(folder, "steps=40", "eval_interval=20", "profile_steps=31-34", tensorboard)
    assert code == 0, err
    return folder, out


@pytest.mark.slow
def test_every_step_has_its_line_and_the_run_ends_with_summary_and_ledger(
    straight: tuple[Path, str],
) -> None:
    folder, out = straight
    lines = [line for line in out.splitlines() if line.startswith("completed step: ")]
    assert [int(line.split()[2].rstrip(",")) for line in lines] == list(range(40))
    for line in lines:
        for word in ("seconds:", "TFLOP/s/device:", "Tokens/s/device:", "loss:", "MFU:", "HFU:"):
            assert word in line
    assert [r["step"] for r in records(folder)] == list(range(40))
    tail = out[out.index("completed step: 39") :]
    for word in ("summary:", "median", "p99", "= executed", "tensorboard --logdir"):
        assert word in tail


@pytest.mark.slow
def test_the_profile_of_a_run_has_its_model_flops(straight: tuple[Path, str]) -> None:
    folder, _ = straight
    profile = read_profile(folder / "default" / "profile", peak_tflops_per_device=5)
    assert profile.coverage > 0.95
    setup = json.loads((folder / "default" / "metrics.jsonl.setup.json").read_text())
    written = setup["values"]["model TFLOP per device per step"]
    assert profile.program.ledger.model / 1e12 == pytest.approx(float(written.split()[0]), rel=1e-5)
    assert sum(bar.seconds for bar in profile.waterfall) == pytest.approx(
        profile.measured.step_seconds
    )
    (record,) = [r for r in records(folder) if "profile/coverage" in r]
    assert record["step"] >= 34
    assert record["profile/last_step"] == 34
    assert record["profile/step_time_seconds"] == profile.measured.step_seconds
    points = [v for name, v in record.items() if name.startswith("profile/mfu_points/")]
    assert sum(points) == pytest.approx(100)


@pytest.mark.slow
def test_the_text_is_learned(straight: tuple[Path, str]) -> None:
    # Uniform guessing over 256 bytes costs ln 256 = 5.545.
    first, *_, last = losses(straight[0])
    assert 5.3 < first < 5.8
    assert last < 4


@pytest.mark.slow
def test_tensorboards_own_reader_finds_every_metric_of_every_step(
    straight: tuple[Path, str],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = straight
    events = EventAccumulator(str(folder / "events"), size_guidance={"scalars": 0})
    events.Reload()
    numbers = {
        (name, record["step"]): value
        for record in records(folder)
        for name, value in record.items()
        if "/" in name
    }
    read = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert set(read) == set(numbers)
    for key, value in numbers.items():
        assert read[key] == pytest.approx(value, rel=1e-6)
    assert {"perf/mfu", "perf/hfu", "perf/per_device_tflops_per_sec", "learning/loss"} <= {
        name for name, _ in read
    }


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise_with_every_step_once(
    straight: tuple[Path, str], tmp_path: Path
) -> None:
    keys = ("steps=40", "enable_checkpointing=true", "checkpoint_period=8")
    process = start(tmp_path, *keys)
    send_after(process, 19, signal.SIGKILL)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == -signal.SIGKILL
    survived = records(tmp_path)  # every line parses: none is torn in the middle
    assert survived[-1]["step"] >= 15  # the checkpoint of 16 steps came after their records

    code, out, err = run(tmp_path, *keys)
    assert code == 0, err
    assert "completed step: 0," not in out
    assert [r["step"] for r in records(tmp_path)] == list(range(40))
    assert losses(tmp_path) == losses(straight[0])

    code, out, err = run(tmp_path, *keys)
    assert (code, "nothing to do" in out) == (0, True)
    assert len(records(tmp_path)) == 40


@pytest.mark.slow
def test_sigterm_saves_and_the_next_run_goes_on_bitwise(
    straight: tuple[Path, str], tmp_path: Path
) -> None:
    keys = (
        "steps=40",
        "write_period_seconds=0",
        "enable_checkpointing=true",
        "checkpoint_period=1000",
    )
    process = start(tmp_path, *keys)
    send_after(process, 5, signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143, err
    done = len(records(tmp_path))
    assert 6 <= done < 40
    assert "summary:" in out

    code, _, err = run(tmp_path, *keys)
    assert code == 0, err
    assert [r["step"] for r in records(tmp_path)] == list(range(40))
    assert losses(tmp_path) == losses(straight[0])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_save_as_well(signum: signal.Signals, tmp_path: Path) -> None:
    process = start(
        tmp_path, "steps=100000", "enable_checkpointing=true", "checkpoint_period=99999"
    )
    send_after(process, 5, signum)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + signum, err
    assert "summary:" in out
    (checkpoint,) = (tmp_path / "default" / "checkpoints").iterdir()
    assert int(checkpoint.name) == len(records(tmp_path))


# Larger files fail as on a full disk: metrics have room, the weights have not.
LIMIT_FILE_SIZE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_one_line_and_the_earlier_one_resumes_bitwise(
    straight: tuple[Path, str], tmp_path: Path
) -> None:
    keys = ("steps=40", "enable_checkpointing=true", "checkpoint_period=8")
    process = start(tmp_path, *keys)
    send_after(process, 9, signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    saved = len(records(tmp_path))

    limited = start(tmp_path, *keys, wrapper=(sys.executable, "-c", LIMIT_FILE_SIZE))
    _, err = limited.communicate(timeout=HANG_SECONDS)
    assert limited.returncode == CHECKPOINT_EXIT_CODE, err
    missing = [step for step in range(8, 41, 8) if step > saved]
    for line, step in zip(err.splitlines(), missing, strict=True):
        assert f"the checkpoint of step {step} " in line
        assert f"(File too large); step {saved} is kept" in line
    assert losses(tmp_path) == losses(straight[0])

    code, out, err = run(tmp_path, *keys)
    assert code == 0, err
    assert f"completed step: {saved}," in out
    assert f"completed step: {saved - 1}," not in out
    assert losses(tmp_path) == losses(straight[0])


@pytest.mark.slow
def test_another_models_checkpoint_is_refused_and_kept(tmp_path: Path) -> None:
    keys = ("steps=4", "enable_checkpointing=true", "checkpoint_period=4")
    assert run(tmp_path, *keys)[0] == 0
    code, _, err = run(tmp_path, *keys, "emb_dim=64", "steps=8")
    assert code == 2
    assert "does not fit this config" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert len(records(tmp_path)) == 4
    assert run(tmp_path, *keys, "steps=6")[0] == 0
    assert [r["step"] for r in records(tmp_path)] == list(range(6))


@pytest.mark.slow
def test_a_nan_loss_ends_the_run_with_its_own_exit_code(tmp_path: Path) -> None:
    keys = ("learning_rate=1e30", "gradient_clipping_threshold=0", "warmup_steps_fraction=0")
    code, out, err = run(tmp_path, "steps=6", *keys)
    assert code == NON_FINITE_EXIT_CODE
    assert "Traceback" not in err
    assert records(tmp_path)[-1]["learning/loss"] in ("NaN", "Infinity")
    assert "summary:" in out
    assert run(tmp_path, "run_name=on", "steps=6", *keys, "abort_on_nan_loss=false")[0] == 0


BAD = {
    "unknown key": (["stepz=3"], "did you mean 'steps'"),
    "wrong type": (["steps=many"], "whole number"),
    "heads": (["num_query_heads=3", "num_kv_heads=2"], "num_query_heads=3"),
    "batch": (["per_device_batch_size=0.3"], "whole number"),
    "mesh": (["data=3"], "does not fill"),
    "dataset folder": (["dataset_path=/nowhere"], "/nowhere"),
    "no file": (["none.yml"], "none.yml"),
    "python tag": (["{tmp}/tag.yml"], "python"),
    "not yaml": (["{tmp}/broken.yml"], "broken.yml"),
    "unwritable folder": (["base_output_directory={tmp}/tag.yml"], "tag.yml"),
    "unwritable checkpoints": (
        ["base_output_directory={tmp}/tag.yml", "enable_checkpointing=true"],
        "tag.yml",
    ),
    "attention": (["attention=splash"], "runs on tpu only"),
    "model": (["model_name=llama9"], "unknown model 'llama9'"),
    "memory": (["emb_dim=1048576", "vocab_size=262144"], "parameters do not fit"),
    "trillion": (["emb_dim=1e12"], "below 2^31"),
    "contradiction": (["model_name=llama3-8b"], "override_model_config=true"),
    "chip": (["peak_tflops_per_device=0", "hardware=h9000"], "peak_tflops_per_device"),
}


def bad_command(case: str, folder: Path) -> tuple[list[str], str]:
    """The arguments of `mfu-jax` in a bad case, and the words of its message."""
    (folder / "tag.yml").write_text("steps: !!python/object/apply:os.system ['true']\n")
    (folder / "broken.yml").write_text("steps: [1\n")
    arguments, words = BAD[case]
    arguments = [a.format(tmp=folder) for a in arguments]
    if not arguments[0].endswith(".yml") or "=" in arguments[0]:
        arguments = [*TINY, f"base_output_directory={folder / 'out'}", *arguments]
    return ["train", *arguments], words


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, words = bad_command(case, tmp_path)
    assert cli.main(command) == 2
    out, err = capfd.readouterr()
    assert words in err
    assert len(err.splitlines()) == 1
    assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unknown key", "unwritable checkpoints"])
def test_bad_input_of_a_process_is_one_line_and_exit_code_2(case: str, tmp_path: Path) -> None:
    command, words = bad_command(case, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mfu_jax.cli", *command],
        cwd=ROOT,
        env=one_device(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    keys = ("steps=4", "eval_interval=2", "enable_checkpointing=true", "checkpoint_period=2")
    processes = start_job(tmp_path, 2, *keys, "per_device_batch_size=2", "host_log_period=1")
    outputs = [process.communicate(timeout=HANG_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1]
    # The first process alone writes.
    assert "completed step: 3" in outputs[0][0]
    assert "step" not in outputs[1][0]
    hosts = json.loads((tmp_path / "default" / "metrics.jsonl.hosts.json").read_text())
    assert [host["process"] for host in hosts["hosts"]] == [0, 1]
    assert hosts["missing"] == []
    code, _, err = run(tmp_path, *keys[:2], "per_device_batch_size=4", "run_name=one")
    assert code == 0, err
    tokens = 4 * 32
    assert_close_as_float32(losses(tmp_path), losses(tmp_path, "one"), terms=tokens)
    for two, one in zip(records(tmp_path), records(tmp_path, "one"), strict=True):
        assert two["perf/per_device_tflops"] * 2 == pytest.approx(one["perf/per_device_tflops"])
    two, one = (records(tmp_path, name)[-1]["eval/avg_loss"] for name in ("default", "one"))
    assert_close_as_float32(two, one, terms=tokens)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start_job(folder: Path, count: int, *keys: str) -> list[subprocess.Popen[str]]:
    job = (*keys, f"coordinator_address=localhost:{free_port()}", f"num_processes={count}")
    return [start(folder, *job, f"process_id={i}") for i in range(count)]


def by_step(folder: Path, name: str = "default") -> dict[int, float]:
    return {record["step"]: record["learning/loss"] for record in records(folder, name)}


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_its_checkpoint_is_read_by_one_and_by_four(
    tmp_path: Path,
) -> None:
    """Two processes, whose device each has half of the weights and all sequences; one is killed."""
    keys = ("steps=12", "enable_checkpointing=true", "checkpoint_period=2", "num_kv_heads=2")
    both = start_job(tmp_path / "two", 2, *keys, "tensor=2", "per_device_batch_size=2")
    assert both[0].stdout is not None
    for line in both[0].stdout:
        if "completed step: 5" in line:
            both[1].kill()
    _, err = both[0].communicate(timeout=HANG_SECONDS)
    both[1].communicate(timeout=HANG_SECONDS)
    assert both[0].returncode == 75, err
    assert "process 1 of 2 died" in err
    assert "run the same command again to resume" in err

    saved = tmp_path / "two" / "default"
    restored = max(int(folder.name) for folder in (saved / "checkpoints").glob("[0-9]*"))
    assert restored in (4, 6, 8, 10)
    for count in (1, 4):
        shutil.copytree(saved / "checkpoints", tmp_path / f"by_{count}/default/checkpoints")
    alone = ("steps=12", "num_kv_heads=2", "per_device_batch_size=4", "run_name=straight")
    code, _, err = run(tmp_path, *alone)
    assert code == 0, err
    four = start_job(
        *(tmp_path / "by_4", 4, *keys, "per_device_batch_size=1"),
        *("fsdp=2", "context_parallelism=2"),
    )
    code, _, err = run(tmp_path / "by_1", *keys, "per_device_batch_size=4")
    assert code == 0, err
    ended = [process.communicate(timeout=HANG_SECONDS)[1] for process in four]
    assert [process.returncode for process in four] == [0] * 4, ended[0]

    straight = by_step(tmp_path, "straight")
    for folder in ("two", "by_1", "by_4"):
        got = by_step(tmp_path / folder)
        first = 0 if folder == "two" else restored
        assert next(iter(got)) == first
        expected = {step: straight[step] for step in got}
        assert_close_as_float32(got, expected, terms=12 * 4 * 32)
