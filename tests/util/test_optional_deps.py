"""Packages that may be missing: imported only when used; one line says how to get them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from tests.support.trainer_process import SIZES, one_device

PARTS = ("absl", "flax", "grain", "optax", "orbax", "rich", "tensorboardX")

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""

INSTRUMENTED = """
import jax, jax.numpy as jnp, mfu_jax
@jax.jit
def train_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, {"loss": loss}
step = mfu_jax.instrument(train_step, peak_tflops_per_device=0.001, metrics_file=sys.argv[1])
w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
for _ in range(4):
    w, metrics = step(w, x)
step.close()
print("model FLOPs:", step.flops.model.per_device)
print(mfu_jax.tabulate(train_step, w, x).count.total)
"""


def run(blocked: tuple[str, ...], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process where the given packages cannot be imported."""
    source = f"BLOCKED = {set(blocked)!r}\n{BLOCK}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env=one_device(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.full
def test_the_block_blocks() -> None:
    assert "optax is blocked" in run(PARTS, "import optax").stderr


@pytest.mark.full
def test_instrument_counts_and_logs_without_any_of_them(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    done = run(PARTS, INSTRUMENTED, str(file))
    assert done.returncode == 0, done.stderr
    # x[16, 8] @ w[8, 4], and the same once more for the gradient of w.
    assert "model FLOPs: 2048\n2048\n" in done.stdout
    assert "completed step: 3" in done.stdout
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.full
def test_counting_a_config_needs_neither_them_nor_jax() -> None:
    code = "from mfu_jax.cli import main; raise SystemExit(main(['flops', 'gpt2-124m']))"
    done = run((*PARTS, "jax", "jaxlib", "numpy"), code)
    assert done.returncode == 0, done.stderr
    assert "TFLOP" in done.stdout


TRAINER = "from mfu_jax.cli import main; raise SystemExit(main(['train', 'steps=1', 'emb_dim=32']))"
MODULE = TRAINER.replace("mfu_jax.cli", "mfu_jax.train").replace("'train', ", "")
BAR = "import mfu_jax.sinks as s; s.ConsoleSink(progress=True)"
EVENTS = "import mfu_jax.sinks as s; s.make_sink('tensorboard', sys.argv[1])"

HAS_GRAIN = pytest.mark.skipif(
    importlib.util.find_spec("grain") is None, reason="it is missing, too, and named first"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("blocked", "code", "line"),
    [
        ("grain", TRAINER, "dataset_type=text, unlike synthetic, needs the package 'grain'"),
        ("orbax", TRAINER, "the trainer needs the package 'orbax'"),
        ("grain", MODULE, "dataset_type=text, unlike synthetic, needs the package 'grain'"),
        pytest.param("orbax", MODULE, "the trainer needs the package 'orbax'", marks=HAS_GRAIN),
        ("rich", BAR, "the progress bar needs the package 'rich'"),
    ],
)
def test_a_missing_part_is_one_line_that_names_the_extra(
    blocked: str, code: str, line: str, tmp_path: Path
) -> None:
    what, hint = run((blocked,), code, str(tmp_path)).stderr.strip().splitlines()[-2:]
    assert line in what
    assert hint == "hint: run pip install 'mfu-jax[train]'"


@pytest.mark.full
@pytest.mark.skipif(not hasattr(nnx, "List"), reason="the trainer needs a newer flax")
def test_the_trainer_on_random_tokens_needs_no_grain(tmp_path: Path) -> None:
    keys = (
        "steps=4",
        "dataset_type=synthetic",
        "eval_interval=2",
        f"base_output_directory={tmp_path}",
    )
    code = "import mfu_jax.train as t; raise SystemExit(t.main(sys.argv[1:]))"
    done = run(("grain",), code, *SIZES, *keys, "enable_checkpointing=false")
    assert done.returncode == 0, done.stderr
    assert "completed step: 3" in done.stdout


@pytest.mark.full
def test_a_sink_names_its_package(tmp_path: Path) -> None:
    *_, what, hint = run(("tensorboardX",), EVENTS, str(tmp_path)).stderr.strip().splitlines()
    assert "the sink 'tensorboard' needs the package 'tensorboardX'" in what
    assert hint == "hint: run pip install tensorboardX"


@pytest.mark.full
def test_a_terminal_without_rich_gets_lines_and_no_bar() -> None:
    code = """
sys.stderr.isatty = lambda: True
import mfu_jax.sinks as s
print(s.ConsoleSink(progress=None)._bar)
"""
    assert run(("rich",), code).stdout == "None\n"
    pytest.importorskip("rich")
    assert "_ProgressBar" in run((), code).stdout
