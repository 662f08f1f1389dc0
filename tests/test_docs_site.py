"""The site of mkdocs.yml: it builds, no link is broken, and search finds every page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import DOCS, ROOT


@pytest.mark.full
def test_the_site_builds_without_a_broken_link_and_search_finds_every_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {f"docs/{page.stem}/" for page in DOCS.glob("*.md") if page.stem != "README"}
    assert pages | {"", "docs/", "examples/", "CONTRIBUTING/"} <= found
    assert (tmp_path / "docs" / "profile_waterfall.png").exists()


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = re.findall(r"docs/\w+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(menu) == sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))
