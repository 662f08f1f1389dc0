"""`mfu-jax doctor`: what this machine has, and what would be missing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jax
import pytest

from mfu_jax.cli import main
from mfu_jax.commands import doctor


def test_the_parts_of_this_machine_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MFU_JAX_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = {check["name"]: check["found"] for check in answer["checks"]}
    assert answer["passed"] is True
    assert found["jax"] == jax.__version__
    assert found["devices"] == f"{jax.device_count()} × cpu"
    assert found["cache"] == str(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert found["run folder"] == str(Path.cwd())
    assert {"flax", "grain", "orbax-checkpoint", "tensorboardX", "wandb", "libtpu"} <= found.keys()


def test_a_run_folder_that_cannot_be_written_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "runs" / "a")]) == 0
    capsys.readouterr()
    (tmp_path / "runs").touch()
    assert main(["doctor", str(tmp_path / "runs" / "a")]) == 1
    assert "runs/a cannot be written (Not a directory): pass another" in capsys.readouterr().out


def test_an_object_store_is_no_folder_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "gs://bucket/a"]) == 0
    assert "gs://bucket/a (an object store: not tried)" in capsys.readouterr().out


def test_a_folder_that_may_not_be_looked_at_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exists = Path.exists

    def guarded(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", guarded)
    assert main(["doctor", "/tmp/closed"]) == 1
    assert "/tmp/closed cannot be written (Permission denied)" in capsys.readouterr().out


def test_what_is_missing_has_its_use_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = doctor.versions_of

    def some(names: Iterable[str]) -> dict[str, str]:
        return known(name for name in names if name not in ("wandb", "jaxlib"))

    monkeypatch.setattr(doctor, "versions_of", some)
    assert main(["doctor"]) == 1  # without jaxlib there is no step
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["missing", "wandb", "the sink wandb: pip install 'mfu-jax[wandb]'"] in lines
    assert ["missing", "jaxlib", "pip install jaxlib"] in lines


def test_a_device_without_a_known_peak_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Device:
        device_kind, platform = "Tomorrow 9000", "tpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert main(["doctor"]) == 1
    assert "missing  peak" in capsys.readouterr().out
