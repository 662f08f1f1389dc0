"""docs/ledger.svg: the ledger as a waterfall. `scripts/make_pages.py` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_WIDTH, _ROW, _TOP = 860, 36, 74
_BARS = (236, 404)  # left edge, and width of 100% of the executed FLOPs
_TFLOP, _SHARE = 744, 832  # right edges of the two columns of numbers
# A card with its own background is readable on light and dark pages.
_STYLE = """
  svg { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
  .card { fill: #f6f8fa; stroke: #d0d7de } text { fill: #1f2328 } .quiet { fill: #59636e }
  .model { fill: #1a7f37 } .extra { fill: #bc4c00 } .executed { fill: #0969da }
  .reported { fill: #8250df } .title { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #151b23; stroke: #3d444d } text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .model { fill: #3fb950 } .extra { fill: #f0883e } .executed { fill: #4493f8 }
    .reported { fill: #ab7df8 }
  }"""


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """One bar.

    Attributes:
        label: text on its left.
        kind: its CSS class.
        start: FLOPs at its left end.
        flops: its length in FLOPs.
    """

    label: str
    kind: str
    start: int
    flops: int


def draw(ledger: Mapping[str, Any], *, title: str) -> str:
    """The SVG.

    Args:
        ledger: as returned by `mfu_jax.flops.ledger.Ledger.to_json`.
        title: the step that was counted.
    """
    rows = list(_rows(ledger))
    height = _TOP + _ROW * len(rows) + 38
    body = [_text(24, 34, title, "title"), _text(_TFLOP, 58, "TFLOP", "quiet", "end")]
    body.append(_text(_SHARE, 58, "share", "quiet", "end"))
    for i, row in enumerate(rows):
        body += _bar(row, _TOP + _ROW * i, ledger["executed"])
    residual = f"Per step and device. Unexplained: {ledger['residual']:,} FLOPs."
    body.append(_text(24, height - 18, residual, "quiet"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" aria-label="{title}">',
            f"<style>{_STYLE}\n</style>",
            f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _rows(ledger: Mapping[str, Any]) -> Iterator[PictureRow]:
    """The non-zero lines; the causes between executed and XLA-reported FLOPs are omitted."""
    start = 0
    for line in ledger["lines"]:
        if line["flops"]:
            is_model = line["label"] == "model"
            label = "model (MFU)" if is_model else f"+ {line['label']}"
            kind = "model" if is_model else "extra"
            yield PictureRow(label=label, kind=kind, start=start, flops=line["flops"])
        start += line["flops"]
    yield PictureRow(label="= executed (HFU)", kind="executed", start=0, flops=ledger["executed"])
    yield PictureRow(label="XLA reports", kind="reported", start=0, flops=ledger["xla_reported"])


def _bar(row: PictureRow, top: int, whole: int) -> Iterator[str]:
    left, width = _BARS
    x, length = left + width * row.start / whole, max(2.0, width * row.flops / whole)
    yield _text(24, top + 19, row.label)
    yield (
        f'<rect class="{row.kind}" x="{x:.1f}" y="{top + 3}" width="{length:.1f}" '
        f'height="22" rx="2"/>'
    )
    yield _text(_TFLOP, top + 19, f"{row.flops / 1e12:,.1f}", anchor="end")
    yield _text(_SHARE, top + 19, f"{row.flops / whole:.1%}", anchor="end")


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
