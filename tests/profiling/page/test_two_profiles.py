"""The page of two profiles: its numbers are those of the JSON, which arithmetic by hand checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_jax import cli
from mfu_jax.profiling.page.bars import bar_row
from tests.profiling.report.test_comparison import write_profile
from tests.support import html_pages

US = 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A step of 50 µs, and one of 100 µs with twice the rows, other times and one op more."""
    folder = tmp_path_factory.mktemp("pages")
    before = write_profile(folder / "a", 1, 512, {"norm": 8, "fusion": 30}, 50)
    ops = {"norm": 20, "extra": 5, "fusion": 50}
    return [str(before), str(write_profile(folder / "b", 42, 1024, ops, 100))]


@pytest.fixture(scope="module")
def page(folders: list[str]) -> str:
    assert cli.main(["profile", *folders, "--html"]) == 0
    return Path(folders[1], "comparison.html").read_text(encoding="utf-8")


def rows_of(page: str, chart: str) -> dict[str, float]:
    """Seconds by the bars of a chart."""
    _, _, rest = page.partition(f'aria-label="{chart}"')
    part = rest.partition("<section>")[0]
    names = [part_.partition('"')[0] for part_ in part.split('data-bar="')[1:]]
    seconds = [float(p.partition('"')[0]) for p in part.split('data-seconds="')[1:]]
    return dict(zip(names, seconds, strict=True))


def test_every_second_has_its_reason(
    page: str, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = rows_of(page, "reasons")
    assert (reasons["before"], reasons["after"]) == pytest.approx((50 * US, 100 * US))
    assert reasons["more FLOPs"] == pytest.approx(30 * US)  # 512 → 1024 rows of an op of 30 µs
    between = {name: s for name, s in reasons.items() if name not in ("before", "after")}
    assert sum(between.values()) == pytest.approx(50 * US)
    assert cli.main(["profile", *folders, "--json"]) == 0
    assert between == pytest.approx(json.loads(capsys.readouterr().out)["by_reason"])


def test_both_waterfalls_are_there(page: str) -> None:
    bars = rows_of(page, "waterfalls")
    assert sum(bars.values()) == pytest.approx(50 * US)
    assert bars["idle"] == pytest.approx(13 * US)  # 12 → 25 µs
    _, _, rest = page.partition('aria-label="waterfalls"')
    assert "24.00 → 25.00 points" in rest


def test_a_bar_of_one_profile_leaves_the_other_ones_track_empty() -> None:
    row = str(bar_row("evaluation", [None, ("other", 60, 70)], []))
    assert row.count('class="track"') == 2
    assert row.count("<i ") == 1


def test_ops_and_scopes_have_both_times(page: str) -> None:
    found = html_pages.elements(page)
    texts = [e.text for e in found if e.tag == "tr"]
    assert any(t.startswith("mlp30.000 µs50.000 µs+20.000 µs") for t in texts)
    assert any("more FLOPs +30.000 µs, less time per FLOP -10.000 µs" in t for t in texts)
    assert not any({"src", "href"} & set(element.attributes) for element in found)
    assert len([e for e in found if e.tag == "script"]) == 1


def test_a_page_elsewhere(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "two.html")
    assert cli.main(["profile", *folders, "--html", page]) == 0
    assert capsys.readouterr().out.strip() == page
    assert Path(page).is_file()
    assert cli.main(["profile", *folders, "--html", str(tmp_path / "two.html" / "two.html")]) == 2
