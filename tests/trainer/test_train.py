"""The trainer as its user runs it: a process, its exit code, and the files that it leaves."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax import cli, train
from mfu_jax.logger.records.non_finite import NON_FINITE_EXIT_CODE
from mfu_jax.profiling.profile import read_profile
from mfu_jax.runs.report.setup import read_setup
from mfu_jax.trainer.run.checkpoint import CHECKPOINT_EXIT_CODE
from tests.support.messages import is_told
from tests.support.paths import ROOT
from tests.support.trainer_process import (
    TINY,
    losses,
    one_device,
    records,
    run,
    send_after,
    start,
    start_anew,
)
from tests.support.work import HANG_SECONDS


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Forty steps without a break."""
    folder = tmp_path_factory.mktemp("straight")
    tensorboard = f"tensorboard_dir={folder / 'events'}"
    keys = ("steps=40", "eval_interval=20", "profile_steps=31-34", tensorboard)
    code, out, err = start_anew(folder, *keys)
    assert code == 0, err
    return folder, out


@pytest.mark.full
def test_every_step_has_its_line_after_the_ledger_and_before_the_summary(
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
    for word in ("summary:", "median", "p99", "tensorboard --logdir"):
        assert word in tail
    assert out.count("= executed") == 1
    assert out.index("= executed") < out.index("completed step: 0,"), "printed once, at the start"


@pytest.mark.full
def test_json_is_all_that_stdout_has(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "steps=6", "--json")
    answer = json.loads(out)
    assert answer["exit_code"] == code == 0
    assert Path(answer["metrics"]).is_file()
    assert answer["summary"]["verdict"]["kind"] == "report"
    assert "completed step: 5, " in err


@pytest.mark.full
def test_json_of_a_run_with_nothing_to_do_has_the_totals_that_it_ended_with(tmp_path: Path) -> None:
    keys = ("steps=6", "enable_checkpointing=true", "--json")
    first, again = (json.loads(run(tmp_path, *keys)[1]) for _ in range(2))
    assert again["summary"]["steps"] == 4  # without the two of the warm-up
    assert again == first
    never = json.loads(run(tmp_path, "steps=0", "run_name=never", "--json")[1])
    assert never["summary"] is None
    assert [name for name in ("metrics", "tensorboard", "checkpoints") if never[name]] == []


def test_a_misspelt_flag_is_told_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--jsn"]) == 2
    assert "did you mean '--json'?" in capsys.readouterr().err


@pytest.mark.full
def test_the_profile_of_a_run_has_its_model_flops(straight: tuple[Path, str]) -> None:
    folder, _ = straight
    profile = read_profile(folder / "default" / "profile", peak_tflops_per_device=5)
    assert profile.coverage > 0.95
    setup = read_setup(str(folder / "default" / "metrics.jsonl"))
    written = setup.values["model TFLOP per device per step"]
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


@pytest.mark.full
def test_the_text_is_learned(straight: tuple[Path, str]) -> None:
    # Uniform guessing over 256 bytes costs ln 256 = 5.545.
    first, *_, last = losses(straight[0])
    assert 5.3 < first < 5.8
    assert last < 4


@pytest.mark.full
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
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("Overview/")]
    read = {(tag, e.step): e.value for tag in tags for e in events.Scalars(tag)}
    assert set(read) == set(numbers)
    for key, value in numbers.items():
        assert read[key] == pytest.approx(value, rel=1e-6)
    assert {"perf/mfu", "perf/hfu", "perf/per_device_tflops_per_sec", "learning/loss"} <= {
        name for name, _ in read
    }


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


_NOT_WRITTEN = re.compile(r"checkpoint of step (\d+) .*\(File too large\); step (\d+) is kept")
# Larger files fail as on a full disk: metrics have room, the weights have not, however many files
# they are written to: one matrix is too large.
LIMIT_FILE_SIZE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_written_is_one_line_and_the_earlier_one_resumes_bitwise(
    tmp_path: Path,
) -> None:
    assert run(tmp_path / "straight", "steps=40", "mlp_dim=1024")[0] == 0
    keys = ("steps=40", "mlp_dim=1024", "enable_checkpointing=true", "checkpoint_period=8")
    process = start(tmp_path, *keys)
    send_after(process, 9, signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    saved = len(records(tmp_path))

    limited = (sys.executable, "-c", LIMIT_FILE_SIZE)
    code, _, err = start_anew(tmp_path, *keys, wrapper=limited)
    assert code == CHECKPOINT_EXIT_CODE, err
    said = [_NOT_WRITTEN.search(line) for line in err.splitlines()]
    assert all(said), err
    failed = {int(one[1]): int(one[2]) for one in said if one}
    assert failed == {step: saved for step in range(8, 41, 8) if step > saved}
    assert losses(tmp_path) == losses(tmp_path / "straight")

    code, out, err = run(tmp_path, *keys)
    assert code == 0, err
    assert f"completed step: {saved}," in out
    assert f"completed step: {saved - 1}," not in out
    assert losses(tmp_path) == losses(tmp_path / "straight")


@pytest.mark.full
def test_another_models_checkpoint_is_refused_and_kept(tmp_path: Path) -> None:
    keys = ("steps=4", "enable_checkpointing=true", "checkpoint_period=4")
    assert run(tmp_path, *keys)[0] == 0
    code, _, err = run(tmp_path, *keys, "emb_dim=64", "steps=8")
    assert code == 2
    assert "does not fit this config" in err.splitlines()[-2]
    assert "Traceback" not in err
    assert len(records(tmp_path)) == 4
    assert run(tmp_path, *keys, "steps=6")[0] == 0
    assert [r["step"] for r in records(tmp_path)] == list(range(6))


@pytest.mark.full
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
    "grouped matmul": (["grouped_matmul=kernel"], "is a TPU's, and the devices are cpu"),
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
    assert is_told(err)
    assert out == ""


@pytest.mark.full
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
    assert is_told(done.stderr)
    assert done.stdout == ""
