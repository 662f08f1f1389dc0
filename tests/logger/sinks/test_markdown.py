"""The logger's texts as Markdown, as TensorBoard's own converter shows them."""

import pytest

from mfu_jax.flops.ledger import Ledger
from mfu_jax.flops.ledger_lines import LedgerLine
from mfu_jax.logger.sinks.markdown import as_markdown, values_as_markdown

plugin_util = pytest.importorskip("tensorboard.plugin_util")


def html(text: str) -> str:
    return plugin_util.markdown_to_safe_html(text)


def test_values_become_a_table_and_mean_only_themselves() -> None:
    shown = html(values_as_markdown({"peak": "2 | *3*", "<script>": "_a_ `b`\nc"}))
    assert shown.count("<tr>") == 3
    assert "<td>2 | *3*</td>" in shown
    assert "<td>&lt;script&gt;</td>" in shown
    assert "<td>_a_ `b` c</td>" in shown


def test_a_configuration_becomes_a_table() -> None:
    shown = html(as_markdown("steps=80 run_name=demo\ndataset_suffixes=[.py,.md] model_name="))
    assert shown.count("<tr>") == 5
    assert "<td>dataset_suffixes</td>" in shown
    assert "<td>[.py,.md]</td>" in shown


def test_the_ledger_becomes_a_table_with_its_title_and_notes() -> None:
    ledger = Ledger(
        model=150,
        convention="maxtext",
        lines=(LedgerLine(label="model", flops=150, note="convention maxtext"),),
        executed=200,
        causes=(LedgerLine(label="loops", flops=-50, note="one iteration"),),
        xla_reported=None,
        notes=("a note",),
    )
    shown = html(as_markdown(f"train_step:\n{ledger.render()}"))
    assert "train_step:" in shown
    assert "<td>150</td>\n<td>75.00%</td>\n<td>convention maxtext</td>" in shown
    assert "<td>-</td>\n<td></td>\n<td>cost_analysis() gives no number here</td>" in shown
    assert "<li>note: a note</li>" in shown


def test_other_texts_stay_a_block() -> None:
    assert as_markdown("one line") == "one line"
    assert as_markdown("first\n  second: 3") == "    first\n      second: 3"
