"""A single-file page: its head, style and script, and the parts that all pages share."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib import resources

from mfu_jax.pages.markup import Markup, joined, raw, tag
from mfu_jax.storage.targets import write_whole


def document(title: str, body: Iterable[Markup], *, style: str = "") -> str:
    """The whole page's HTML.

    Args:
        title: the window's title.
        body: what the page shows.
        style: the page's own style, after the shared one.
    """
    script = packaged("mfu_jax.pages", "script.js")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        raw("style", packaged("mfu_jax.pages", "style.css") + style),
    ]
    content = [tag("head", *head), tag("body", tag("main", *body), raw("script", script))]
    return f"<!doctype html>\n{tag('html', *content, lang='en')}\n"


def packaged(package: str, name: str) -> str:
    """A style sheet or script installed with a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """A policy that loads nothing and runs only our script, whatever names on the page contain."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def section(title: str, *content: Markup | None) -> Markup:
    """A part of the page, with its heading."""
    return tag("section", tag("h2", title), *content)


def headlines(numbers: Sequence[tuple[str, str, float | None]]) -> Markup:
    """Headline numbers, each as name, text and value."""
    cards = [
        tag("div", tag("dt", name), tag("dd", text, data_headline=name, data_value=value))
        for name, text, value in numbers
    ]
    return tag("dl", *cards)


def verdict_line(sentence: str) -> Markup:
    """The answer, at the top of a page: `Verdict.sentence`, its first part in bold."""
    first, semicolon, rest = sentence.partition("; ")
    return tag("p", tag("strong", first), f"{semicolon}{rest}", class_="verdict")


def quiet(text: str) -> Markup:
    """A remark."""
    return tag("p", text, class_="quiet")


def notes(lines: Sequence[str]) -> Markup:
    """A list of what a reader must know about the numbers; empty markup if there are none."""
    return tag("ul", *(tag("li", line) for line in lines), class_="notes") if lines else joined([])


def write_page(name: str, text: str) -> str:
    """Writes a page to the path or address `name`, and returns `name`.

    Raises:
        UserError: the file cannot be written.
    """
    write_whole(name, "--html", text.encode())
    return name
