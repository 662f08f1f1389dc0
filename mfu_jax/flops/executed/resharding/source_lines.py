"""The user's source lines of a program's instructions, from its tables of stack frames."""

from __future__ import annotations

import re

from mfu_jax.flops.executed.hlo.module import HloInstruction

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
