"""The page: headline numbers, waterfall, advice, tables, roofline, timeline and ledger."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from mfu_jax.formatting import percent
from mfu_jax.profiling.page.bars import legend, waterfall_bars
from mfu_jax.profiling.page.markup import Markup, joined, raw, tag
from mfu_jax.profiling.page.roofline import roofline, without_matmuls
from mfu_jax.profiling.page.tables import row_table, scope_tables
from mfu_jax.profiling.page.timeline import timeline
from mfu_jax.profiling.profile import Profile
from mfu_jax.profiling.render import seconds_text, short


def page(profile: Profile) -> str:
    """The whole page, as one text.

    Args:
        profile: what is shown.
    """
    answer = profile.overview()
    by = {kind: profile.table(kind) for kind in ("scope", "op", "kernel", "phase")}
    title = f"{short(answer['program'])}: MFU {percent(profile.mfu)}"
    body = [
        tag("h1", short(answer["program"])),
        _headlines(profile, answer),
        *_notes(profile),
        _section("Where the peak went", legend(), waterfall_bars(profile.waterfall, "waterfall")),
        *_phases(profile),
        *_advice(profile),
        _section("Scopes", scope_tables(profile, by["scope"])),
        _section(
            "Roofline",
            roofline(profile.peaks, by),
            row_table("kinds without matmuls", without_matmuls(by["kernel"])),
        ),
        _section("One step", timeline(profile.picture)),
        _section("Ops", row_table("op", by["op"])),
        _section("By phase", row_table("phase", by["phase"])),
        _section("FLOPs", _ledger(profile)),
    ]
    script = _file("script.js")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        raw("style", _file("style.css")),
    ]
    content = [tag("head", *head), tag("body", tag("main", *body), raw("script", script))]
    return f"<!doctype html>\n{tag('html', *content, lang='en')}\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded, and no script runs but ours, whatever a name in the trace holds."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _section(title: str, *content: Markup) -> Markup:
    return tag("section", tag("h2", title), *content)


def _headlines(profile: Profile, answer: Mapping[str, Any]) -> Markup:
    count = len(answer["devices"])
    numbers = [
        ("MFU", percent(profile.mfu), answer["mfu"]),
        ("HFU", percent(profile.hfu), answer["hfu"]),
        ("step time", seconds_text(answer["step_time_seconds"]), answer["step_time_seconds"]),
        ("coverage", percent(answer["coverage"]), answer["coverage"]),
    ]
    cards = [
        tag("div", tag("dt", name), tag("dd", text, data_headline=name, data_value=value))
        for name, text, value in numbers
    ]
    about = (
        f"{count} × {answer['device_kind'] or answer['platform']}, {profile.peaks.main}; mean of "
        f"{answer['steps']} steps. Trace: {answer['source']}"
    )
    return joined([tag("dl", *cards), tag("p", about, class_="quiet")])


def _notes(profile: Profile) -> Iterator[Markup]:
    if profile.notes:
        yield tag("ul", *(tag("li", note) for note in profile.notes), class_="notes")


def _phases(profile: Profile) -> Iterator[Markup]:
    """One waterfall for each program, where a step is several."""
    if len(profile.programs) > 1:
        parts = []
        for program in profile.programs:
            head = (
                f"{short(program.name)}: {seconds_text(program.seconds)} of a step in "
                f"{program.executions:g} execution{'' if program.executions == 1 else 's'}"
            )
            bars = waterfall_bars(program.waterfall, program.name)
            parts.append(tag("div", tag("h3", head), bars, data_program=program.name))
        yield _section("Each program on its own", *parts)


def _advice(profile: Profile) -> Iterator[Markup]:
    if profile.advice:
        items = []
        for advice in profile.advice:
            share = percent(advice.gain_seconds / profile.measured.step_seconds)
            gain = f": {seconds_text(advice.gain_seconds)} of a step ({share})"
            evidence = tag("div", advice.evidence)
            cause = tag("b", advice.cause)
            items.append(tag("li", cause, gain, evidence, data_gain=advice.gain_seconds))
        note = tag("p", "The largest gain first; gains do not add up.", class_="quiet")
        yield _section("Advice", note, tag("ol", *items, class_="advice"))


def _ledger(profile: Profile) -> Markup:
    """From model FLOPs to executed FLOPs of one run of the main program."""
    ledger = profile.program.ledger
    rows = [(line.label, line.flops, line.note) for line in ledger.lines]
    rows.append(("residual", ledger.residual, ""))
    rows.append(("= executed", ledger.executed, f"model FLOPs are {ledger.convention}"))
    rows += [(f"of which {line.label}", line.flops, line.note) for line in ledger.of_which]
    head = tag("tr", *(tag("th", title, scope="col") for title in _LEDGER))
    body = [_ledger_row(*row, ledger.executed) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body), data_by="ledger")
    return tag("div", table, class_="wide")


_LEDGER = ("FLOPs per run of the program and device", "FLOPs", "of executed", "")


def _ledger_row(label: str, flops: int, note: str, whole: int) -> Markup:
    return tag(
        "tr",
        tag("th", label, scope="row"),
        tag("td", f"{flops:,}", data_value=flops),
        tag("td", percent(flops / whole if whole else None)),
        tag("td", note, class_="word"),
    )
