"""MaxText's own trainer; runs where maxtext is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("maxtext")

from maxtext.trainers.pre_train import train

from mfu_jax.integrations import maxtext
from tests.support.sinks import ListSink

pytestmark = pytest.mark.full
STEPS = 6


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
        "base_emb_dim": 32,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_target_length": 32,
        "per_device_batch_size": 1,
        "attention": "dot_product",
        "skip_jax_distributed_system": True,
    }
    train.main(["", str(base), *(f"{key}={value}" for key, value in values.items())])
    return [json.loads(line) for line in (folder / "metrics.txt").read_text().splitlines()]


def maxtext_package() -> Any:
    import maxtext as package

    return package


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["learning/loss"] for line in lines if "learning/loss" in line]


def test_maxtexts_trainer_is_measured_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "ours").mkdir()
    bare = losses(run_maxtext(tmp_path / "bare"))
    memory = ListSink()
    with maxtext.instrumented(peak_tflops_per_device=1, sinks=[memory]) as steps:
        measured = losses(run_maxtext(tmp_path / "ours"))
    assert measured == bare
    assert [record.step for record in memory.records] == list(range(STEPS))
    ours = [record.scalars["learning/loss"] for record in memory.records]
    np.testing.assert_array_equal(np.float32(ours[: len(bare)]), np.float32(bare))
    assert steps[0].ledger.residual == 0
    assert any("goodput/eval_seconds" in record.scalars for record in memory.records)
