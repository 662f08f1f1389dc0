"""TFRecords of TensorBoard, against checksums from elsewhere."""

import random

import pytest

from mfu_jax.logger.sinks.event_files import crc32c, event_head, framed

record_writer = pytest.importorskip("tensorboardX.record_writer")
event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_checksums_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c([data]) == [expected]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 511, 512, 513, 515, 2000])
def test_records_of_any_size_are_those_of_tensorboardx(size: int) -> None:
    data = random.Random(size).randbytes(size)
    checksum = record_writer.masked_crc32c(data).to_bytes(4, "little")
    assert framed(data)[12:] == data + checksum
    head = size.to_bytes(8, "little")
    assert framed(data)[:12] == head + record_writer.masked_crc32c(head).to_bytes(4, "little")


@pytest.mark.parametrize("step", [0, 1, 127, 128, 2**31, 2**62 + 1, -1])
def test_the_head_of_an_event_is_read_by_protobuf(step: int) -> None:
    event = event_pb2.Event.FromString(event_head(step, 1.75e9 + 0.125))
    assert (event.step, event.wall_time) == (step, 1.75e9 + 0.125)


def test_records_written_together_are_those_written_one_by_one() -> None:
    messages = [random.Random(size).randbytes(size) for size in (700, 3, 0, 1025, 512, 1, 4, 2000)]
    checksums = [record_writer.masked_crc32c(m).to_bytes(4, "little") for m in messages]
    together = framed(*messages)
    assert together == b"".join(framed(message) for message in messages)
    for message, checksum in zip(messages, checksums, strict=True):
        assert message + checksum in together
