"""The trainer's config as settings of the logger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.settings import Settings
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.run.checkpoint import Checkpointer
from mfu_jax.trainer.run.run_logger import lock_run, settings_of


def test_keys_of_the_config_that_are_settings_keep_their_values() -> None:
    config = load(
        [
            "run_name=r",
            "base_output_directory=out",
            "metrics_file=auto",
            "tensorboard_dir=",
            "dump_program=out/step.mfu",
            "log_period=7",
            "warmup_steps=3",
            "convention=exact",
            "hardware=h100",
            "peak_tflops_per_device=2.5",
            "abort_on_nan_loss=false",
        ]
    )
    assert settings_of(config, start_step=5) == Settings(
        metrics_file="out/r/metrics.jsonl",
        heartbeat_file="out/r/heartbeat.json",
        profile_dir="out/r/profile",
        dump_program="out/step.mfu",
        log_period=7,
        warmup_steps=3,
        convention="exact",
        hardware="h100",
        peak_tflops_per_device=2.5,
        abort_on_inf_loss=True,  # the trainer's default; an observer's is False
        flops_source="analytic",
        start_step=5,
    )


@pytest.mark.full
def test_a_run_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    config = load([f"base_output_directory={tmp_path}", "run_name=r"])
    code = (
        "import sys\nfrom mfu_jax.trainer.config.pyconfig import load\n"
        "from mfu_jax.trainer.run.run_logger import lock_run\n"
        "with lock_run(load(sys.argv[1:])):\n    print('locked', flush=True)\n    sys.stdin.read()"
    )
    arguments = [f"base_output_directory={tmp_path}", "run_name=r"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        expected = rf"run folder '{tmp_path}/r' is in use by process {process.pid} "
        with pytest.raises(UserError, match=expected):
            lock_run(config)
        process.communicate()
    with lock_run(config):
        assert (tmp_path / "r" / "run.lock").exists()
    assert list((tmp_path / "r").iterdir()) == []


def test_a_run_that_writes_nothing_there_makes_no_folder(tmp_path: Path) -> None:
    off = ["metrics_file=", "tensorboard_dir=", "enable_checkpointing=false"]
    with lock_run(load([f"base_output_directory={tmp_path}/new", *off])):
        assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_a_store_that_is_not_there_are_refused() -> None:
    where = ["base_output_directory=nowhere://b", "run_name=r", "enable_checkpointing=true"]
    expected = "checkpoints cannot be written to nowhere://b/r/checkpoints"
    with pytest.raises(UserError, match=expected):
        Checkpointer(load(where))
