"""The examples for plain JAX and its neural-network libraries, against hand arithmetic.

Those of the adapters run beside the adapters' tests, in ``tests/integrations``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.examples import run_example
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def matmul(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


# Forward, and the gradients of weights and of inputs; nothing needs one of the first layer's input.
BY_HAND = {
    "plain_jax": 2 * matmul(1024, 256, 1024) + 3 * matmul(1024, 1024, 256),
    "flax_nnx": 2 * matmul(1024, 512, 1024) + 3 * matmul(1024, 1024, 10),
    # A 3 × 3 window without padding fits at 30 × 30 positions of a 32 × 32 image.
    "flax_linen": 2 * matmul(128 * 30 * 30, 3 * 3 * 3, 64) + 3 * matmul(128, 64, 10),
    "equinox_mlp": 2 * matmul(256, 256, 1024)
    + 3 * (matmul(256, 1024, 1024) + matmul(256, 1024, 256)),
    "optax_accumulation": 4 * 2 * matmul(512, 512, 512),  # four calls are one step
}
STEPS = {name: 12 if name == "optax_accumulation" else 20 for name in BY_HAND}


@pytest.mark.full
@pytest.mark.parametrize("name", BY_HAND)
def test_an_example_prints_its_steps_and_counts_their_flops(name: str, tmp_path: Path) -> None:
    run = run_example(name, tmp_path)
    assert len(run.records) == STEPS[name]
    assert run.flops() == {BY_HAND[name]}
    losses = [record["learning/loss"] for record in run.records]
    assert losses[-1] < losses[0]
    for line, record in zip(run.lines, run.records, strict=True):
        assert f"loss: {record['learning/loss']:.3f}" in line


@pytest.mark.full
@pytest.mark.parametrize(("stage", "batch"), [("0", 1), ("3", 4)])
def test_the_tutorials_step(stage: str, batch: int, tmp_path: Path) -> None:
    length, width, layers, vocabulary = 128, 384, 2, 512
    layer = matmul(length, width, 3 * width) + matmul(length, width, width)
    layer += matmul(length, width, 4 * width) + matmul(length, 4 * width, width)
    layer += 2 * matmul(length, width, length) // 2  # scores and values of half of the pairs
    by_hand = 3 * batch * (layers * layer + matmul(length, width, vocabulary))
    assert run_example("tutorial", tmp_path, stage).flops() == {by_hand}


@pytest.mark.full
def test_the_cells_of_the_notebook_run_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if "outputs" in cell)
    assert len(cells) >= 4
    names: dict[str, object] = {}
    for cell in cells:
        exec(cell, names)


def test_every_example_is_tested_and_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    integrations = (ROOT / "tests" / "integrations").glob("test_*.py")
    tests = [*integrations, ROOT / "tests" / "logger" / "loop" / "test_phases.py", Path(__file__)]
    tested = "".join(path.read_text(encoding="utf-8") for path in tests)
    for example in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"({example.name})" in page
        assert f'"{example.stem}"' in tested or f'"{example.name}"' in tested
