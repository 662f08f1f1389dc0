"""Reads pieces of HLO text: lines, brackets, shapes, single attributes."""

from __future__ import annotations

import functools
import re

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.hlo.shapes import Shape


class HloParseError(UserError):
    """The text is not optimised HLO. The message shows the line and its number."""

    def __init__(self, reason: str, line: str = "", number: int = 0) -> None:
        where = f"HLO line {number}" if number else "HLO text"
        shown = f": {line.strip()[:200]!r}" if line else ""
        super().__init__(
            f"{where}: {reason}{shown}; expected the text of compiled.as_text()",
            hint="usually truncated or edited text, or another format; dump it again",
        )
        self.reason, self.line, self.number = reason, line, number


ELLIPSIS = "..."  # in place of a large constant's elements
ELIDED = (
    "a constant that this text leaves out, constant({...}): count the compiled program, or a dump "
    "of it (mfu_jax.dump, mfu-jax dump)"
)
"""What is missing, and what to do, where ``as_text()`` has left out a large constant."""

PERCENT_NAME = re.compile(r"%([^\s,(){}]+)")
COMMENT = re.compile(r"/\*.*?\*/")

# A tuple's shape ends where ` opcode(` begins: nothing within a shape looks like that. Operands
# without brackets and strings end at the first parenthesis. A class that excludes one character
# matches several times faster than others, and faster still without backtracking (`++`).
PATTERN = r" *(ROOT |)%?([^ ]++) = (\(.*?\)|[^ ]++) ([a-z][^(]*+)\("
_LINE = re.compile(rf"\n{PATTERN}([^)]*+)\)(.*+)")

InstructionLine = tuple[str, str, str, str, str, str]
"""``ROOT `` or nothing, name, shape, opcode, operands up to the first parenthesis, and the rest."""

WITHOUT_OPERANDS = frozenset({"parameter", "constant"})


def read_lines(text: str) -> list[InstructionLine] | None:
    """The instructions of a text; None unless every line of it is one, with a ``)``.

    Args:
        text: lines, each with the line break before it.
    """
    found = _LINE.findall(text)
    # If a match runs on into the next line, there are fewer matches than lines.
    return found if found and len(found) == text.count("\n") else None


# Classes that exclude one character match several times faster: kernels have long strings.
_STRING = r'(?:"[^"]*+(?<!\\)"|"[^"\\]*(?:\\.[^"\\]*)*")'
_SPECIAL = re.compile(rf"{_STRING}|[{{}}()\[\],]", re.DOTALL)


def split_top_level(text: str) -> list[str]:
    """Splits at the commas outside brackets and strings.

    >>> split_top_level('a={1,2}, b="x,y", c=3')
    ['a={1,2}', 'b="x,y"', 'c=3']
    """
    parts, depth, start, at = [], 0, 0, 0
    while match := _SPECIAL.search(text, at):
        token, at = match[0], match.end()
        if token == ",":
            if depth == 0:
                parts.append(text[start : match.start()].strip())
                start = at
        elif token in "{([":
            depth += 1
        elif token in "})]":
            depth -= 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def closing_parenthesis(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one just before `start`, or −1."""
    end = text.find(")", start)
    if end < 0 or (text.find("(", start, end) < 0 and text.find('"', start, end) < 0):
        return end
    depth = 1
    for match in _SPECIAL.finditer(text, start):
        token = match[0]
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def is_balanced(text: str) -> bool:
    """Whether all brackets outside strings are closed."""
    depth = 0
    for match in _SPECIAL.finditer(text):
        depth += (match[0] in "{([") - (match[0] in "})]")
    return depth <= 0


def operand_names(text: str) -> list[str]:
    """The names in a list of operands."""
    if text[:1] == "%" and "/" not in text and "(" not in text:  # no types, no comments
        return text[1:].split(", %")
    if "%" in text:
        return PERCENT_NAME.findall(text)
    return [part.split()[-1] for part in split_top_level(COMMENT.sub("", text))]


_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?$")
_LARGEST = 2**63 - 1  # a dimension
_MAX_TUPLE_DEPTH = 64


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Parses ``f32[2,3]{1,0:T(8,128)}`` or ``(s32[], (bf16[4], pred[]))``.

    >>> parse_shape("(s32[], bf16[4,<=8]{1,0})").elements[1].dims
    (4, 8)
    """
    return _parse_shape(COMMENT.sub("", text).strip(), 0)


def _parse_shape(text: str, depth: int) -> Shape:
    if depth > _MAX_TUPLE_DEPTH:
        raise HloParseError("tuple shape nested too deeply", text)
    if text.startswith("("):
        if not text.endswith(")"):
            raise HloParseError("tuple shape without a closing parenthesis", text)
        parts = split_top_level(text[1:-1])
        return Shape("tuple", elements=tuple(_parse_shape(p, depth + 1) for p in parts))
    match = _ARRAY.match(text)
    if not match:
        raise HloParseError("not a shape", text)
    dtype, dims, layout = match.groups()
    try:
        sizes = tuple(int(d.replace("<=", "")) for d in dims.split(",")) if dims else ()
    except ValueError:
        raise HloParseError("dimensions that are not numbers", text) from None
    if any(not 0 <= size <= _LARGEST for size in sizes):
        raise HloParseError("a dimension that is negative or no 64-bit number", text)
    return Shape(dtype, sizes, layout=layout or "")


_PLAIN_VALUE = re.compile(
    r'(?:\{[^{}"]*\}|[^\s,{}()\["]+|"[^"\\]*"'  # {0,1}, 2x2_1x1, "target"
    r"|\{\{[\d,]*\}(?:,\{[\d,]*\})*\}"  # {{0,1},{2,3}}
    r"|(?:mesh)?\[[^\[\]\"]*\](?:<=\[[\d,]*\](?:T\([\d,]*\))?| \{[^{}\"]*\})?"  # [2,4]<=[8]
    r")(?=,|$)"
)


def plain_attribute(text: str, key: str) -> str | None:
    """One of an instruction's attributes, empty if absent; None if the others must be read too.

    >>> plain_attribute(", index=1, replica_groups=[2,4]<=[8]", "replica_groups")
    '[2,4]<=[8]'
    """
    start = text.find(f"{key}=")
    if start < 0:
        return ""
    # The key may also occur in a string, or as the end of another key.
    if text.find('"', 0, start) < 0 and text[start - 2 : start] == ", ":
        match = _PLAIN_VALUE.match(text, start + len(key) + 1)
        return match[0] if match else None
    return None


def op_name_in(attributes: str) -> str:
    """The op_name in an instruction's ``metadata={op_name="…"}``, empty if absent."""
    start = attributes.find('op_name="', attributes.find("metadata={"))
    if start < 0:
        return ""
    start += len("op_name=")
    end = attributes.find('"', start + 1)
    if end >= 0 and attributes.find("\\", start, end) < 0:
        return attributes[start + 1 : end]
    match = _SPECIAL.match(attributes, start)
    return match[0][1:-1].replace("\\'", "'").replace('\\"', '"') if match else ""
