"""The lines of a computation's text, all matched at once where each is an instruction."""

from __future__ import annotations

import re

# A tuple's shape ends where ` opcode(` begins: nothing within a shape looks like that. Operands
# without brackets and strings end at the first parenthesis. What excludes one character only is
# matched several times faster than a class, and faster still if it is never given back (`++`).
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
    # A match that goes on into the next line leaves fewer than there are lines.
    return found if found and len(found) == text.count("\n") else None
