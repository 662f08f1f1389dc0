"""MaxText's own trainer; runs where maxtext is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("maxtext")

from maxtext.trainers.pre_train import train

from mfu_jax.integrations import maxtext
from tests.support.examples import run_example
from tests.support.sinks import ListSink

pytestmark = pytest.mark.full
STEPS = 6
LENGTH, WIDTH, LAYERS, VOCABULARY = 32, 32, 2, 128


def run_maxtext(folder: Path) -> list[dict[str, Any]]:
    """Trains a tiny model with an evaluation every 2 steps; MaxText's own metrics file."""
    base = Path(maxtext_package().__file__).parent / "configs" / "base.yml"
    values = {
        "run_name": folder.name,
        "base_output_directory": folder,
        "metrics_file": folder / "metrics.txt",
        "hardware": "cpu",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "steps": STEPS,
        "eval_interval": 2,
        "eval_steps": 1,
        "base_emb_dim": WIDTH,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 2 * WIDTH,
        "base_num_decoder_layers": LAYERS,
        "head_dim": WIDTH // 2,
        "vocab_size": VOCABULARY,
        "max_target_length": LENGTH,
        "per_device_batch_size": 1,
        "attention": "dot_product",
        "skip_jax_distributed_system": True,
    }
    train.main(["", str(base), *(f"{key}={value}" for key, value in values.items())])
    return [json.loads(line) for line in (folder / "metrics.txt").read_text().splitlines()]


def maxtext_package() -> Any:
    import maxtext as package

    return package


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    """By step; MaxText empties its file when it evaluates, so it has the last ones only."""
    return {int(line["step"]): line["learning/loss"] for line in lines if "learning/loss" in line}


def flops_by_hand(length: int = LENGTH, width: int = WIDTH) -> int:
    """Of one device's sequence: matmuls, half of the attention pairs, and the norms' scales."""
    layer = 4 * width * width + 3 * width * 2 * width
    matmuls = 3 * 2 * length * (LAYERS * layer + width * VOCABULARY)
    attention = 3 * LAYERS * (2 * 2 * length * length * width) // 2
    scales = 3 * (2 * LAYERS + 1) * 2 * length * width  # einsums "i...k,...k->i...k"
    return matmuls + attention + scales


def test_maxtexts_trainer_is_measured_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "ours").mkdir()
    bare = losses(run_maxtext(tmp_path / "bare"))
    memory = ListSink()
    with maxtext.instrumented(peak_tflops_per_device=1, sinks=[memory]) as steps:
        measured = losses(run_maxtext(tmp_path / "ours"))
    assert measured == bare
    assert [record.step for record in memory.records] == list(range(STEPS))
    ours = {record.step: record.scalars["learning/loss"] for record in memory.records}
    assert bare.items() <= ours.items()
    assert len(bare) == 2
    evaluated = [r.step for r in memory.records if "goodput/eval_seconds" in r.scalars]
    assert evaluated == [0, 2, 4]
    assert steps[0].flops.model.per_device == flops_by_hand()
    assert steps[0].ledger.residual == 0


def test_the_example(tmp_path: Path) -> None:
    run = run_example("maxtext_train", tmp_path)
    assert run.flops() == {flops_by_hand(length=64, width=64)}
