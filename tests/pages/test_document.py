"""What every page has: nothing loaded from elsewhere, and names that stay text."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.pages.document import document, facts, notes, packaged, section, write_page
from mfu_jax.pages.tables import Column, Word, table
from tests.support import html_pages

HOSTILE = "</script><script>alert(1)</script>\x00\"'&"


def test_only_our_script_may_run() -> None:
    text = document(HOSTILE, [section(HOSTILE, notes([HOSTILE]))])
    found = html_pages.elements(text)
    (script,) = (e for e in found if e.tag == "script")
    assert script.text == packaged("mfu_jax.pages", "script.js")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    (policy,) = (e for e in found if e.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"] == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert not html_pages.outside(text)
    assert text.count(escape("</script><script>")) == 3
    assert "\x00" not in text


def test_a_style_of_its_own_follows_the_style_of_all_pages() -> None:
    found = html_pages.elements(document("t", [], style="b { color: red }"))
    (style,) = (e for e in found if e.tag == "style")
    assert style.text.index("prefers-color-scheme: dark") < style.text.index("b { color: red }")


def test_headlines_carry_their_values() -> None:
    text = facts([("MFU", "41.2%", 0.412), ("cost", "n/a", None)])
    assert [e.text for e in html_pages.elements(text) if e.tag == "dd"] == ["41.2%", "n/a"]
    assert html_pages.values(text, "data-value") == [0.412]


def test_a_table_shows_the_first_rows_and_says_how_many_more() -> None:
    columns = [Column[int]("square", lambda n: n * n, lambda n: f"{n * n:,}"), Word[int]("w", str)]
    text = table("number", range(1000), str, columns, most=40)
    assert html_pages.values(text, "data-value") == [n * n for n in range(40)]
    (foot,) = (e for e in html_pages.elements(text) if e.tag == "tfoot")
    assert foot.text == "rest: 960 more"


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--html"):
        write_page(str(tmp_path / "file" / "page.html"), "text")
    with pytest.raises(UserError, match="--html"):
        write_page("\0", "text")
    assert write_page(str(tmp_path / "page.html"), "text") == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "text"
