"""`mfu-jax plan --sweep`: a compiler that says how often it ran, and a command that is killed.

The compiler's memory is 11 GiB and 30, 5 or 2 for each sequence (none, minimal, full), of 31.25:
the largest batches are 0, 4 and 10. A sequence takes 300, 320 or 400 rows of a matmul.
"""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support.messages import is_told

WORDS = (
    *("topology=v6e-8", "model_name=llama2-7b", "max_target_length=128"),
    *("remat_policy=none,minimal,full", "per_device_batch_size=1..8"),
)
MAIN = """
import sys
from mfu_jax.cli import main
from mfu_jax.trainer.planned.planned_step import TrainerStep
from tests.support.messages import is_told
TrainerStep.module = "tests.support.fake_compiler"
sys.exit(main(["plan", "--sweep", *sys.argv[1:]]))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_COMPILER_LOG", str(log))

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *WORDS, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compiled():
        return log.read_text().splitlines() if log.exists() else []

    return start, compiled


def _answer(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.full
def test_a_sweep_that_is_killed_goes_on_and_compiles_a_third(sweep, monkeypatch):
    start, compiled = sweep
    monkeypatch.setenv("FAKE_COMPILER_SECONDS", "0.3")
    with start("--json") as first:
        while len(compiled()) < 3:
            assert first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait()
    monkeypatch.setenv("FAKE_COMPILER_SECONDS", "0")
    with start("--json") as second:
        answer = _answer(second)
    assert answer["points"] == 24
    assert len(set(compiled())) <= 8
    assert len(answer["rows"]) == answer["plans"] <= 8
    ran = compiled()
    assert len(ran) - len(set(ran)) <= 1  # again only what was killed; the rest is in the cache
    assert answer["winner"]["values"] == {"remat_policy": "minimal", "per_device_batch_size": "4"}
    assert {"remat_policy=minimal", "per_device_batch_size=4", "fsdp=8"} <= set(
        answer["flags"].split()
    )
    for row in answer["rows"]:
        words = [f"{key}={text}" for key, text in row["values"].items()]
        assert row["source"] == "planned"
        assert any(set(words) <= set(line.split()) for line in compiled())

    before = len(compiled())
    with start() as again:
        out, _ = again.communicate(timeout=120)
    assert len(compiled()) == before
    winner = out.splitlines().index("winner:")
    assert "remat_policy=minimal" in out.splitlines()[winner + 1]


@pytest.mark.full
def test_a_killed_command_takes_its_compiler_along(sweep, monkeypatch):
    start, compiled = sweep
    monkeypatch.setenv("FAKE_COMPILER_SECONDS", "60")
    with start() as process:
        while not compiled():
            assert process.poll() is None
            time.sleep(0.02)
        children = _children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert children
    deadline = time.monotonic() + 20
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return list(map(int, file.read().split()))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("budget=soon",), "expected a time"),
        (("state=a.jsonl",), "unknown key 'state'"),
        (("--html", "a.html"), "html= is a key of a single plan"),
        (("fsdp=3,5",), "does not fill the 8 devices"),
        (("emb_dimm=1",), "unknown key 'emb_dimm'"),
    ],
)
def test_wrong_input_is_one_line(sweep, words, part):
    start, compiled = sweep
    with start(*words) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert part in err
    assert is_told(err, hint=True)
    assert not compiled()
