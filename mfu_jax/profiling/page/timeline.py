"""The timeline of one step: one row per lane, as wide as the zoom setting."""

from __future__ import annotations

from collections.abc import Iterator

from mfu_jax.pages.document import quiet
from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.profiling.breakdown.one_step import Event, Lane, StepPicture
from mfu_jax.profiling.join.ops import Work
from mfu_jax.util.formatting import seconds_text, short

_TICKS = 10
_KINDS = {
    Work.COMMUNICATION: "communication",
    Work.TRANSFER: "memory",
    Work.HOST: "host",
    Work.CONTROL: "control",
    Work.COMPUTE: "memory",
}


def timeline(picture: StepPicture) -> Markup:
    """The step's lanes of events."""
    zoom = tag("input", type="range", id="zoom", min="0", max="6", step="0.1", value="0")
    control = tag("p", tag("label", "zoom ", zoom), class_="script")
    lanes = [_lane(lane, picture.seconds) for lane in picture.lanes]
    strip = tag("div", _ticks(picture.seconds), *lanes, class_="strip", id="strip")
    return joined(
        [control, tag("div", strip, class_="wide timeline", tabindex="0"), _about(picture)]
    )


def _ticks(seconds: float) -> Markup:
    marks = [
        tag("span", seconds_text(seconds * i / _TICKS), style=f"left:{number(100 * i / _TICKS)}%")
        for i in range(_TICKS)
    ]
    return tag("div", *marks, class_="ticks", aria_hidden="true")


def _lane(lane: Lane, seconds: float) -> Markup:
    depth = max(event.depth for event in lane.events) + 1
    events = tag("div", *_events(lane, seconds), class_="lane", style=f"--depth:{depth}")
    return tag("div", tag("b", lane.name), events, class_="device")


def _events(lane: Lane, seconds: float) -> Iterator[Markup]:
    for event in lane.events:
        left, width = 100 * event.start / seconds, 100 * event.seconds / seconds
        style = f"left:{number(left, 3)}%;width:{number(width, 3)}%"
        if event.depth:
            style += f";--row:{event.depth}"
        name = short(event.name)
        scope = event.op.record.scope if event.op and event.op.record else ""
        about = f"{name} · {seconds_text(event.seconds)}" + (f" · {short(scope)}" if scope else "")
        label = name if width > 1 else None
        yield tag("i", label, class_=_kind(event), style=style, title=about)


def _kind(event: Event) -> str:
    if event.op is None:
        return "host"
    if event.op.record is None:
        return "unknown"
    return "model" if event.op.record.flops else _KINDS[event.op.work]


_KEY = (
    ("model", "matmuls"),
    ("memory", "other work"),
    ("communication", "communication"),
    ("control", "loops"),
    ("unknown", "no instruction"),
    ("host", "host, or many short events"),
)


def _about(picture: StepPicture) -> Markup:
    count = f"{picture.devices} device{'s' if picture.devices > 1 else ''}"
    note = f"A step of median length, on {count}; the narrowest events are drawn together."
    return joined([key(_KEY), quiet(note)])
