"""What the doctor finds: a tensor, what happens to it, at which line, and what avoids it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mfu_jax.flops.executed.hlo.module import HloInstruction

Kind = Literal[
    "full rematerialization",
    "replicated work",
    "gathered stack",
    "lost batch",
    "moved for one operation",
    "there and back",
    "device order",
    "split across shards",
    "replicated state",
    "replicated batch",
]

# What happens, and what avoids it. {detail} is a number of devices, or another argument.
_WORDS: Mapping[Kind, tuple[str, str]] = {
    "full rematerialization": (
        "replicated, and then each device takes a slice of it",
        "give both sides of this line one sharding, or pass through one that splits a common "
        "dimension: x = jax.lax.with_sharding_constraint(x, {spec})",
    ),
    "replicated work": (
        "gathered, and all devices of the group compute the same from it",
        "keep it split: x = jax.lax.with_sharding_constraint(x, {spec}) before this line, also "
        "on its result",
    ),
    "gathered stack": (
        "gathered whole, although a loop reads one slice at a time",
        "split another dimension than the one that the loop runs over, such as P(None, {axes})",
    ),
    "lost batch": (
        "its batch is no longer split from here on",
        "keep the batch split: x = jax.lax.with_sharding_constraint(x, {spec}) after this line",
    ),
    "moved for one operation": (
        "moved to another sharding for this operation alone",
        "give its operands one sharding that it can keep: "
        "x = jax.lax.with_sharding_constraint(x, {spec})",
    ),
    "there and back": (
        "moved, used element by element, and moved back",
        "drop the constraint in between, or make it {spec}",
    ),
    "device order": (
        "moved to another order of the same devices",
        "use one mesh, with its axes in one order, for all shardings",
    ),
    "split across shards": (
        "moved, because a split cuts through its shards",
        "split along a dimension that is not sharded: reshape to (…, parts, width) with the mesh "
        "axis on width, or keep one array for each part",
    ),
    "replicated state": (
        "kept whole on more devices than {detail}, which has its shape",
        "give it the sharding of {detail} in in_shardings and out_shardings",
    ),
    "replicated batch": (
        "replicated, so that groups of {detail} devices repeat matmuls for it",
        "split its batch: jax.device_put(x, NamedSharding(mesh, P({axes})))",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ReshardedTensor:
    """A tensor that the partitioner moves or replicates at a place where no one asked for it.

    Attributes:
        kind: what happens to it.
        tensor: path of the argument, or scope and operation that make the tensor.
        file: source file of the operation; empty if the program does not say, like `line`.
        line: its line.
        axes: mesh axes that it is moved along; sizes and strides of groups if not known.
        before: how it is split, as a PartitionSpec, with ``U`` for what is not known; empty if
            nothing is, as without the mesh.
        after: how it is split where it is used.
        shape: dtype and dimensions of the array on one device.
        bytes_moved: bytes of the collectives' buffers in one step, on one device.
        instructions: names of the instructions that move it.
        detail: for replicated state, the argument that it should be like; for a replicated batch,
            how many devices do the same.
    """

    kind: Kind
    tensor: str
    file: str
    line: int
    axes: str = ""
    before: str = ""
    after: str = ""
    shape: str
    bytes_moved: int = 0
    instructions: tuple[str, ...] = ()
    detail: str = ""

    @property
    def text(self) -> str:
        """The finding in one line."""
        place = f" ({os.path.basename(self.file)}:{self.line})" if self.file else ""
        moved = f"; {self.bytes_moved / 2**20:,.3g} MiB a step" if self.bytes_moved else ""
        along = f" over {self.axes}" if self.bytes_moved and self.axes else ""
        words = _WORDS[self.kind][0].format(detail=self.detail)
        split = " → ".join(spec for spec in (self.before, self.after) if spec)
        split = f" ({split})" if split else ""
        return f"{self.tensor} {self.shape}{place}: {words}{split}{moved}{along}"

    @property
    def advice(self) -> str:
        """What avoids it."""
        axes = ", ".join(map(repr, self.axes.split("+"))) if self.axes.isidentifier() else "…"
        spec = re.sub(r"(?<!')\bU\b(?!')", "P.UNCONSTRAINED", self._wanted) or "P(…)"
        return _WORDS[self.kind][1].format(detail=self.detail, axes=axes, spec=spec)

    @property
    def _wanted(self) -> str:
        """The sharding that needs no move; empty if not known."""
        is_of_use = self.kind in ("moved for one operation", "full rematerialization")
        return self.after if is_of_use else self.before

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {**asdict(self), "text": self.text, "advice": self.advice}


def warnings_of(resharded: Sequence[ReshardedTensor], most: int = 3) -> list[str]:
    """A line for each of the largest findings, and how many more there are."""
    lines = [f"resharded without need: {one.text}. {one.advice}" for one in resharded[:most]]
    if len(resharded) > most:
        more = len(resharded) - most
        lines.append(f"and {more} more: mfu-jax plan, of a dump (dump_program=) too, lists all")
    return lines


_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) [^\n]*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_OLDER = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


class SourceLines:
    """Looks up where in the user's code an instruction comes from.

    Args:
        text: the program's text. Its tables precede its first computation.
    """

    def __init__(self, text: str) -> None:
        start, end = text.find("\nFileNames"), text.find("\nENTRY")
        tables = text[start : text.find(") -> ", start)] if 0 <= start < end else ""
        files, _, rest = tables.partition("\nFunctionNames")
        _, _, rest = rest.partition("\nFileLocations")
        locations, _, frames = rest.partition("\nStackFrames")
        names = dict(_FILE.findall(files))
        self._locations = {
            number: (names.get(file, ""), int(line))
            for number, file, line in _LOCATION.findall(locations)
        }
        self._frames = {
            number: (location, parent) for number, location, parent in _FRAME.findall(frames)
        }

    def of(self, instruction: HloInstruction) -> tuple[str, int]:
        """File and line of the innermost frame outside installed packages; ``("", 0)`` if unknown.

        If all frames are in packages, the innermost one.
        """
        if older := _OLDER.search(instruction.attribute_text):
            return older[1], int(older[2])
        match = _FRAME_ID.search(instruction.attribute_text)
        number, innermost = (match[1] if match else ""), ("", 0)
        while number in self._frames:
            location, parent = self._frames[number]
            place = self._locations.get(location, ("", 0))
            innermost = innermost if innermost[0] else place
            if place[0] and not _LIBRARY.search(place[0]):
                return place
            above = str(int(parent) - 1) if parent else ""  # written one too high; 0 for none
            number = above if above != number else ""
        return innermost
