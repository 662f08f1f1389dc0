"""A single-file page: its head, style and script, and the parts that all pages share."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path

from mfu_jax.pages.markup import Markup, joined, raw, tag
from mfu_jax.storage.targets import write_whole
from mfu_jax.util.formatting import percent, seconds_text, span
from mfu_jax.verdict import Verdict

COLORS = ("model", "memory", "communication", "other", "below", "unknown")
"""Style-sheet classes, one for each run or curve."""

Number = tuple[str, str, float | None]
"""A number on a page: its name, its text and its value."""


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
    made = tag("footer", f"Made by mfu-jax {version('mfu-jax')}: ", tag("code", _command()))
    content = [tag("head", *head), tag("body", tag("main", *body, made), raw("script", script))]
    return f"<!doctype html>\n{tag('html', *content, lang='en')}\n"


def color(place: int) -> str:
    """The style-sheet class of a run or curve; the seventh has the first one's again."""
    return COLORS[place % len(COLORS)]


def packaged(package: str, name: str) -> str:
    """A style sheet or script installed with a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """A policy that loads nothing and runs only our script, whatever names on the page contain."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _command() -> str:
    """What made the page, as typed."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def page_head(
    name: str,
    sentence: str,
    verdicts: Mapping[str, Verdict],
    about: Sequence[tuple[str, str]],
    beneath: Sequence[str] = (),
) -> Markup:
    """The top of every page: what it is of, the answer, and the three numbers behind it.

    Args:
        name: of the run, program or target.
        sentence: the answer, its first part in bold.
        verdicts: by name of the run; one on a page of one run.
        about: name and value of what the numbers refer to; those without a value are left out.
        beneath: lines under the answer.
    """
    rows = [tag("span", tag("b", key), f" {value}") for key, value in about if value]
    first, semicolon, rest = sentence.partition("; ")
    rest, is_next, step = rest.partition("next: ")
    answer = (tag("strong", first), f"{semicolon}{rest}", tag("span", is_next, step))
    return tag(
        "header",
        tag("h1", name),
        tag("p", *answer, class_="verdict"),
        *(tag("p", line) for line in beneath),
        _three(verdicts),
        tag("p", *rows, class_="about"),
    )


def _three(verdicts: Mapping[str, Verdict]) -> Markup:
    """MFU, the largest loss and the step time, of each run."""
    names = ("MFU", "largest loss", "step time")
    columns = zip(names, zip(*map(_numbers, verdicts.values()), strict=True), strict=True)
    cards = []
    for name, numbers in columns:
        rows = []
        shown = zip(verdicts.items(), numbers, strict=True)
        for i, ((run, of), (text, value, aside)) in enumerate(shown):
            large = tag("span", text, data_headline=name, data_value=value, class_="large")
            if len(verdicts) > 1:
                label = {names[0]: of.placed, names[1]: aside}.get(name, "")
                label = ": ".join(filter(None, (run, label)))
                rows.append(tag("dd", large, tag("small", tag("i", class_=color(i)), label)))
            else:
                rows.append(tag("dd", large, tag("small", aside)))
        cards.append(tag("div", tag("dt", name), *rows))
    return tag("dl", *cards, class_="three several" if len(verdicts) > 1 else "three")


def _numbers(of: Verdict) -> Iterable[tuple[str, float | None, str]]:
    """Each number's text, its value and what is said beside it."""
    peak = f"of {of.peak}" if of.peak else ""
    yield percent(of.mfu), of.mfu, ", ".join(filter(None, (of.placed, of.counted, peak)))
    loss = of.losses[0] if of.losses else None
    if loss is None:
        yield "n/a", None, "not known"
    else:
        time = "" if loss.seconds is None else f", {span(loss.seconds)}"
        yield percent(loss.fraction), loss.fraction, f"{loss.name}, of the {loss.of}{time}"
    step = of.step_time_seconds
    aside = "predicted" if of.kind == "plan" else "mean of the measured steps"
    yield "n/a" if step is None else seconds_text(step), step, aside


def section(title: str, *content: Markup | None) -> Markup:
    """A part of the page, with its heading, which links to itself."""
    anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
    return tag("section", tag("h2", tag("a", title, href=f"#{anchor}")), *content, id=anchor)


def folded(summary: str, *content: Markup) -> Markup:
    """Details that the reader opens."""
    return tag("details", tag("summary", summary), *content)


def facts(numbers: Sequence[Number]) -> Markup:
    """More numbers, in small type."""
    cards = [
        tag("div", tag("dt", name), tag("dd", text, data_headline=name, data_value=value))
        for name, text, value in numbers
    ]
    return tag("dl", *cards, class_="facts")


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
