"""Every number in docs/conventions.md and docs/differences_from_maxtext.md comes from the code."""

from __future__ import annotations

import json

import pytest

from mfu_jax.flops.analytic.conventions import CONVENTIONS
from mfu_jax.flops.analytic.inputs.maxtext_keys import parse_override
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.mixers import gated_delta_net
from mfu_jax.flops.analytic.totals import calculate_tflops_per_device, compare_conventions
from tests.support.maxtext import WRONG
from tests.support.paths import ROOT

DIFFERENCES = (ROOT / "docs" / "differences_from_maxtext.md").read_text()
MAXTEXT = json.loads((ROOT / "tests" / "data" / "maxtext_differences.json").read_text())["rows"]


def table(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def maxtext_row(model: str, length: int, **changes):
    return next(
        row
        for row in MAXTEXT
        if (row["model"], row["max_target_length"], row["changes"]) == (model, length, changes)
    )


def test_the_table_of_conventions():
    page = (ROOT / "docs" / "conventions.md").read_text()
    rows = table(page.split("## What others print")[0])
    assert [row[0].strip("`") for row in rows] == list(CONVENTIONS)
    for column, model in ((2, "llama3-8b"), (4, "mixtral-8x7b")):
        counted = compare_conventions(load_model_config(model, {"max_target_length": 8192}))
        for row in rows:
            training = counted[row[0].strip("`")].training
            assert row[column] == f"{training / 1e12:.2f}", row
            assert row[column + 1] == f"{training / counted['maxtext'].training:.4f}", row


@pytest.mark.parametrize("row", table(DIFFERENCES), ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_of_differences(row):
    model, length, changes, theirs, ours, ratio, _ = row
    ours_changes = {
        key: parse_override(key, value)
        for key, value in (change.split("=") for change in changes.split())
    }
    # MaxText assumes one image wherever it counts any; the others it does not count.
    their_changes = {k: v for k, v in ours_changes.items() if k != "images_per_sequence"}
    maxtext = maxtext_row(model, int(length), **their_changes)["total_tflops"]
    config = load_model_config(model, {**ours_changes, "max_target_length": int(length)})
    total = calculate_tflops_per_device(config, "maxtext").total
    assert (theirs, ours, ratio) == (f"{maxtext:.2f}", f"{total:.2f}", f"{maxtext / total:.4f}")


def test_numbers_in_the_text_of_differences():
    text = " ".join(DIFFERENCES.split())
    every = json.loads((ROOT / "tests" / "data" / "maxtext_all_models.json").read_text())["models"]
    same = len(every) - len(WRONG)
    assert f"For {same} of the {len(every)} models that MaxText bundles" in text

    gate = []
    for model in ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b"):
        config = load_model_config(model, {"max_target_length": 2048})
        ours = calculate_tflops_per_device(config).learnable_weight
        gate.append(1 - maxtext_row(model, 2048)["learnable_weight_tflops"] / ours)
    assert f"weight FLOPs are {100 * min(gate):.1f} to {100 * max(gate):.1f}% low" in text

    window = []
    for length in (8192, 131072):
        config = load_model_config("olmo3-7b", {"max_target_length": length})
        ours = calculate_tflops_per_device(config)
        window.append(maxtext_row("olmo3-7b", length)["attention_tflops"] / ours.attention)
    assert f"attention is {window[0]:.2f} times" in text
    assert f"{window[1]:.2f} times at 131072" in text

    plain, mtp = (
        calculate_tflops_per_device(
            load_model_config("deepseek3-671b", {"max_target_length": 2048, "mtp_num_layers": n})
        ).total
        for n in (0, 1)
    )
    counted = (
        maxtext_row("deepseek3-671b", 2048, mtp_num_layers=1)["total_tflops"]
        - maxtext_row("deepseek3-671b", 2048)["total_tflops"]
    )
    assert f"{(mtp - plain) / counted:.2f} times what is counted" in text

    model = load_model_config("qwen3-next-80b-a3b")
    recurrent, chunked = (
        next(part.macs for part in gated_delta_net(layer) if "/core" in part.name)
        for layer in (model, model.replace(scan_chunk_size=64))
    )
    assert f"{chunked / recurrent} times that with chunks of 64" in text
