"""The page: headline numbers, waterfall, advice, tables, roofline, timeline and ledger.

Adding a section: a file beside this one, a section here; only `mfu_jax.pages` makes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mfu_jax.pages.document import document, headlines, notes, packaged, quiet, section
from mfu_jax.pages.markup import Markup, joined, tag
from mfu_jax.pages.tables import wide
from mfu_jax.profiling.page.bars import legend, waterfall_bars
from mfu_jax.profiling.page.roofline import roofline, without_matmuls
from mfu_jax.profiling.page.tables import row_table, scope_tables
from mfu_jax.profiling.page.timeline import timeline
from mfu_jax.profiling.profile import Profile
from mfu_jax.util.formatting import percent, seconds_text, short


def page(profile: Profile) -> str:
    """The whole page's HTML.

    Args:
        profile: the profile to show.
    """
    answer = profile.overview()
    by = {kind: profile.table(kind) for kind in ("scope", "op", "kernel", "phase")}
    title = f"{short(answer['program'])}: MFU {percent(profile.mfu)}"
    body = [
        tag("h1", short(answer["program"])),
        _headlines(profile, answer),
        notes(profile.notes),
        section("Where the peak went", legend(), waterfall_bars(profile.waterfall, "waterfall")),
        *_phases(profile),
        *_advice(profile),
        section("Scopes", scope_tables(profile, by["scope"])),
        section(
            "Roofline",
            roofline(profile.peaks, by),
            row_table("kinds without matmuls", without_matmuls(by["kernel"])),
        ),
        section("One step", timeline(profile.picture)),
        section("Ops", row_table("op", by["op"])),
        section("By phase", row_table("phase", by["phase"])),
        section("FLOPs", _ledger(profile)),
    ]
    return document(
        title,
        body,
        style=packaged("mfu_jax.profiling.page", "style.css"),
        script=packaged("mfu_jax.profiling.page", "script.js"),
    )


def _headlines(profile: Profile, answer: Mapping[str, Any]) -> Markup:
    count = len(answer["devices"])
    numbers = [
        ("MFU", percent(profile.mfu), answer["mfu"]),
        ("HFU", percent(profile.hfu), answer["hfu"]),
        ("step time", seconds_text(answer["step_time_seconds"]), answer["step_time_seconds"]),
        ("coverage", percent(answer["coverage"]), answer["coverage"]),
    ]
    about = (
        f"{count} × {answer['device_kind'] or answer['platform']}, {profile.peaks.main}; mean of "
        f"{answer['steps']} steps. Trace: {answer['source']}"
    )
    return joined([headlines(numbers), quiet(about)])


def _phases(profile: Profile) -> Iterator[Markup]:
    """One waterfall per program, if a step consists of several."""
    if len(profile.programs) > 1:
        parts = []
        for program in profile.programs:
            head = (
                f"{short(program.name)}: {seconds_text(program.seconds)} of a step in "
                f"{program.executions:g} execution{'' if program.executions == 1 else 's'}"
            )
            bars = waterfall_bars(program.waterfall, program.name)
            parts.append(tag("div", tag("h3", head), bars, data_program=program.name))
        yield section("Each program on its own", *parts)


def _advice(profile: Profile) -> Iterator[Markup]:
    if profile.advice:
        items = []
        for advice in profile.advice:
            share = percent(advice.gain_seconds / profile.measured.step_seconds)
            gain = f": {seconds_text(advice.gain_seconds)} of a step ({share})"
            evidence = tag("div", advice.evidence)
            cause = tag("b", advice.cause)
            items.append(tag("li", cause, gain, evidence, data_gain=advice.gain_seconds))
        note = quiet("The largest gain first; gains do not add up.")
        yield section("Advice", note, tag("ol", *items, class_="advice"))


def _ledger(profile: Profile) -> Markup:
    """The ledger from model FLOPs to executed FLOPs of one run of the main program."""
    ledger = profile.program.ledger
    rows = [(line.label, line.flops, line.note) for line in ledger.lines]
    rows.append(("residual", ledger.residual, ""))
    rows.append(("= executed", ledger.executed, f"model FLOPs are {ledger.convention}"))
    rows += [(f"of which {line.label}", line.flops, line.note) for line in ledger.of_which]
    head = tag("tr", *(tag("th", title, scope="col") for title in _LEDGER))
    body = [_ledger_row(*row, ledger.executed) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body), data_by="ledger")
    return wide(table)


_LEDGER = ("FLOPs per run of the program and device", "FLOPs", "of executed", "")


def _ledger_row(label: str, flops: int, note: str, whole: int) -> Markup:
    return tag(
        "tr",
        tag("th", label, scope="row"),
        tag("td", f"{flops:,}", data_value=flops),
        tag("td", percent(flops / whole if whole else None)),
        tag("td", note, class_="word"),
    )
