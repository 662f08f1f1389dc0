"""Reads HTML pages: every element with its attributes and its text, and whether tags match."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_EMPTY = frozenset({"meta", "input", "link", "br", "img"})


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.found.append(element)
        if tag not in _EMPTY:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> has no start"
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.texts.append(data)


def elements(page: str) -> list[Element]:
    """All elements, in their order; fails where an end tag has another start tag."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser.found


def outside(page: str) -> list[Element]:
    """The elements that load something, or lead out of the page."""
    return [
        e
        for e in elements(page)
        if "src" in e.attributes or not (e.attributes.get("href") or "#").startswith("#")
    ]


def headlines(page: str) -> dict[str, float]:
    """The numbers below a page's verdict, by name; of several runs, the last one's."""
    return {
        str(e.attributes["data-headline"]): float(e.attributes["data-value"] or "")
        for e in elements(page)
        if "data-headline" in e.attributes and "data-value" in e.attributes
    }


def values(page: str, attribute: str) -> list[float]:
    """The numbers of one attribute, in the order of the page."""
    return [
        float(e.attributes[attribute] or "") for e in elements(page) if attribute in e.attributes
    ]


def in_browser(file: Path, folder: Path, *more: str) -> str:
    """The page after a headless browser has run its script, as HTML; `more` are its options."""
    assert CHROMIUM
    words = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --dump-dom".split()
    words += [*more, "--disable-background-networking", "--disable-component-update"]
    command = [CHROMIUM, *words, f"--user-data-dir={folder}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
