"""scripts/comparisons/xla_flops.py: one row a variant, the ledgers as JSON."""

from __future__ import annotations

import json
import sys

import pytest

from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from scripts.comparisons import xla_flops as compare_xla_flops

TINY = [
    "num_decoder_layers=2",
    "emb_dim=32",
    "num_query_heads=2",
    "num_kv_heads=2",
    "head_dim=16",
    "mlp_dim=64",
    "max_target_length=16",
    "per_device_batch_size=1",
]


@pytest.mark.full
def test_variants_side_by_side_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["--variant=scan_layers=true", "--variant=scan_layers=false"]
    monkeypatch.setattr(sys, "argv", ["compare_xla_flops.py", *TINY, *variants, "--json"])
    compare_xla_flops.main()
    scanned, unrolled = json.loads(capsys.readouterr().out)
    assert (scanned["variant"], unrolled["variant"]) == ("scan_layers=true", "scan_layers=false")
    # Per layer 4 projections of 32 × 32 and 3 matrices of 32 × 64, the head of 32 × 256; 16 tokens;
    # 2 FLOPs, 3 passes. Attention: 2 matmuls over 16² pairs of width 32.
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 256
    attention = 2 * 2 * 16 * 16 * 32
    for row in (scanned, unrolled):
        assert row["executed"] == 3 * 2 * (16 * weights + attention)
        assert row["model"] == 3 * 2 * (16 * weights + attention // 2)
        assert row["residual"] == 0
    assert scanned["xla_reported"] < scanned["executed"] < unrolled["xla_reported"]


def test_the_table_shows_what_is_unexplained() -> None:
    executed = ExecutedCount(forward=100, backward=200)
    ledgers = {
        "one": compare_flops(model=300, executed=executed, xla_reported=75.0),
        "two": compare_flops(model=295, executed=executed),
    }
    _, one, two, residuals = compare_xla_flops.render(ledgers).splitlines()
    assert one.split() == ["one", "300", "300", "75", "0.250"]
    assert two.split() == ["two", "295", "300", "-", "-"]
    assert residuals == "residuals: two: 5"
