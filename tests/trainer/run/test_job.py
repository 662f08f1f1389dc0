"""The end of a process whose job has lost another one."""

import dataclasses
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from mfu_jax.errors import UserError
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.run import job as job_module
from mfu_jax.trainer.run.job import Job
from mfu_jax.trainer.run.process_watch import LostProcess
from tests.campaigns.faults.two_processes import ProcessPair, read_losses, run_with_kills
from tests.support.paths import SCRIPTS


class EndedError(Exception):
    """Instead of the end of the tests' process."""


def end(job: Job, loss: LostProcess, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code with which the job ends this process."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise EndedError

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(EndedError):
        job._end(loss)
    return codes[0]


def test_a_death_ends_with_one_line_after_the_metrics_are_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, calls = Job(), []
    with job.flushing(lambda: calls.append("flush")):
        assert end(job, LostProcess(process=3, why="died: reason"), monkeypatch) == 75
    assert calls == ["flush"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mfu_jax.train: process 3 of 1 died: reason; process 0 ends with exit ")
    assert "exit code 75; run the same command again" in line


def test_metrics_that_cannot_be_written_delay_the_end_by_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_module, "_FLUSH_SECONDS", 0.05)
    released = threading.Event()
    job = Job()
    with job.flushing(released.wait):
        assert end(job, LostProcess(process=1, why="died"), monkeypatch) == 75
    released.set()


def test_anothers_error_ends_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_module, "_VERDICT_SECONDS", 0.05)
    assert (
        end(Job(), LostProcess(process=1, why="failed: no space", exit_code=74), monkeypatch) == 74
    )
    assert "process 1 of 1 failed: no space" in capfd.readouterr().err


def test_a_process_alone_has_nobody_to_tell() -> None:
    job = Job()
    job.join(load(["configs/base.yml"]))
    job.leave()
    job.await_verdict(OSError())
    assert job.fail(3, "reason") == 3
    with pytest.raises(KeyError), job.flushing(lambda: None):
        raise KeyError


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1234", "localhost:port"])
def test_a_malformed_address_is_refused(address: str) -> None:
    config = dataclasses.replace(load(["configs/base.yml"]), coordinator_address=address)
    with pytest.raises(UserError, match="host:port"):
        Job().join(config)


@pytest.mark.full
def test_either_of_two_processes_dies_and_a_resume_gives_the_losses_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    kills, losses = run_with_kills(tmp_path / "killed", 2, seed=1)
    for kill in kills:
        assert kill.exit_code == 75
        assert kill.stderr.splitlines() == [kill.last_line]
        assert f"process {kill.victim} of 2 died" in kill.last_line
    assert {kill.victim for kill in kills} == {0, 1}
    assert ProcessPair(tmp_path / "whole", "steps=60").wait() == [0, 0]
    assert losses == read_losses(tmp_path / "whole")
    assert [step for step, _ in losses] == list(range(60))


CLUSTER = SCRIPTS / "cluster"


@pytest.mark.full
def test_the_documented_slurm_job_is_a_script_whose_keys_are_known() -> None:
    script = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    assert "#SBATCH" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = re.search(r"srun mfu-jax train my.yml (.*?)\n  code", script, re.DOTALL)
    assert command is not None
    words = command[1].replace("\\\n", " ").split()
    assert load(["configs/base.yml", *words]).distributed


def test_the_documented_jobset_has_a_pod_for_each_host_of_its_slice() -> None:
    job = yaml.safe_load((CLUSTER / "jobset.yml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    slice_ = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = slice_["template"]["spec"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    container = pod["containers"][0]
    hosts = int(rows) * int(columns) // container["resources"]["limits"]["google.com/tpu"]
    assert slice_["parallelism"] == slice_["completions"] == hosts
    assert pod["restartPolicy"] == "Never"  # JobSet starts all pods of a slice again
    program, command, file, *words = container["command"]
    assert (program, command, file) == ("mfu-jax", "train", "my.yml")
    assert load(["configs/base.yml", *words]).distributed
