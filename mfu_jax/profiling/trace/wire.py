"""Protobuf's wire format, as in `mfu_jax.util.protobuf`: millions of small messages in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mfu_jax.util.protobuf import EIGHT, FOUR, LENGTH, LONGEST_VARINT, VARINT, WireError, fields

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]


class FieldsOfMany(NamedTuple):
    """The next field of every message that has another one.

    Attributes:
        rows: indices of these messages.
        numbers: field numbers.
        values: varints as signed integers; lengths and raw bits otherwise.
        starts: where the bytes of their values begin.
        ends: where they end.
    """

    rows: IntArray
    numbers: IntArray
    values: IntArray
    starts: IntArray
    ends: IntArray

    def of(self, number: int) -> FieldsOfMany:
        """The fields with this number."""
        chosen = self.numbers == number
        return FieldsOfMany(*(column[chosen] for column in self))


def fields_of_many(data: Bytes, starts: IntArray, ends: IntArray) -> Iterator[FieldsOfMany]:
    """The fields of many messages: the first field of each, then the second of each, ….

    Args:
        data: the file.
        starts: where the messages begin.
        ends: where they end.

    Raises:
        WireError: one of them is not a message.
    """
    rows = np.flatnonzero(starts < ends)
    at, ends = starts[rows], ends[rows]
    while rows.size:
        tags, at = _varints(data, at)
        kinds = tags & 7
        begins = at.copy()
        values = np.zeros_like(at)
        varying = np.flatnonzero((kinds == VARINT) | (kinds == LENGTH))
        values[varying], begins[varying] = _varints(data, at[varying])
        at = begins + _sizes(kinds, values)
        begins = np.where(kinds == VARINT, at, begins)
        if np.any(at > ends):
            raise WireError("a field reaches beyond its message")
        yield FieldsOfMany(rows, tags >> 3, values, begins, at)
        more = at < ends
        rows, at, ends = rows[more], at[more], ends[more]


def _sizes(kinds: IntArray, lengths: IntArray) -> IntArray:
    """How many bytes follow the tag, or the varint."""
    known = np.isin(kinds, (VARINT, EIGHT, LENGTH, FOUR))
    if not known.all() or np.any(lengths[kinds == LENGTH] < 0):
        raise WireError("a field of an unknown kind")
    return np.select([kinds == LENGTH, kinds == EIGHT, kinds == FOUR], [lengths, 8, 4], 0)


def _varints(data: Bytes, at: IntArray) -> tuple[IntArray, IntArray]:
    """The varints at many positions, as signed integers, and the positions after them."""
    try:
        first = data[at]
        values = first.astype(np.int64) & 127
        after = at + 1
        long = np.flatnonzero(first >= 128)
        for shift in range(7, 7 * LONGEST_VARINT, 7):
            if not long.size:
                return values, after
            byte = data[after[long]]
            after[long] += 1
            values[long] |= (byte.astype(np.int64) & 127) << shift
            long = long[byte >= 128]
    except IndexError:
        raise WireError("it ends within a field") from None
    if long.size:
        raise WireError("a number of more than ten bytes")
    return values, after


def children(data: memoryview, start: int, end: int, number: int) -> tuple[IntArray, IntArray]:
    """Where the messages of a repeated field begin and end; other fields are skipped.

    The only Python loop over all events of a trace: it costs about 0.3 µs per event.
    """
    starts: list[int] = []
    ends: list[int] = []
    tag = number << 3 | LENGTH
    at = start
    try:
        while at < end:
            if data[at] == tag and data[at + 1] < 128:  # common case, without a call
                begin = at + 2
                at = begin + data[at + 1]
                starts.append(begin)
                ends.append(at)
                continue
            field = next(fields(data, at, end))
            at = field.end
            if field.number == number:
                starts.append(field.start)
                ends.append(field.end)
    except IndexError:
        raise WireError("it ends within a field") from None
    if at > end:
        raise WireError("a field reaches beyond its message")
    return np.array(starts, np.int64), np.array(ends, np.int64)
