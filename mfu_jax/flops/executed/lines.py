"""The lines of a computation's text, all matched at once if each is an instruction."""

from __future__ import annotations

import re

# A tuple's shape ends where ` opcode(` begins: nothing within a shape looks like that. Operands
# without brackets and strings end at the first parenthesis. A class that excludes one character
# matches several times faster than others, and faster still without backtracking (`++`).
PATTERN = r" *(ROOT |)%?([^ ]++) = (\(.*?\)|[^ ]++) ([a-z][^(]*+)\("
_LINE = re.compile(rf"\n{PATTERN}([^)]*+)\)(.*+)")

Line = tuple[str, str, str, str, str, str]
"""``ROOT `` or nothing, name, shape, opcode, operands up to the first parenthesis, and the rest."""

WITHOUT_OPERANDS = frozenset({"parameter", "constant"})


def read_lines(text: str) -> list[Line] | None:
    """The instructions of a text; None unless every line of it is one, with a ``)``.

    Args:
        text: lines, each with the line break before it.
    """
    found = _LINE.findall(text)
    # If a match runs on into the next line, there are fewer matches than lines.
    return found if found and len(found) == text.count("\n") else None
