"""Files that a user names: regular ones are read up to a limit, the others refused at once."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.util import user_files
from mfu_jax.util.user_files import line_blocks, opened, read_bytes, read_text, text_lines


def make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def make_link(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (make_fifo, "fifo' cannot be read (not a regular file); expected a test"),
        (make_link, "link' cannot be read (not a regular file)"),
        (lambda folder: folder, "(Is a directory)"),
        (lambda folder: folder / "missing", "(No such file or directory)"),
        (lambda folder: folder / ("x" * 300), "(File name too long)"),
        (lambda folder: folder / ("a/" * 3000), "(File name too long)"),
        (lambda folder: folder / "a\0b", "(its name holds a NUL)"),
    ],
)
def test_what_is_no_regular_file_is_refused(path, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error, opened(path(tmp_path), "a test"):
        pass
    assert says in str(error.value)


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    assert read_bytes(path, "a test", 4) == b"1234"
    (tmp_path / "link").symlink_to(path)
    assert read_text(tmp_path / "link", "a test", 4) == "1234"
    os.truncate(path, 2**31)
    with pytest.raises(UserError, match=r"\(2,048 MiB, more than 1\); expected a test"):
        read_bytes(path, "a test", 2**20)


def test_a_file_without_a_size_has_the_limit_too() -> None:
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(UserError, match="cannot be read"):
        read_bytes("/proc/self/maps", "a test", 10)


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match="not UTF-8 text: invalid start byte at byte 2"):
        read_text(tmp_path / "a", "a test", 10)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "a", "a test", 10) == "{}"


def test_blocks_end_with_a_line_and_bytes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "_BLOCK_BYTES", 4)
    content = "a\r\nß\n\nlast".encode() + b"\xff"
    file = io.BytesIO(content)
    blocks = list(line_blocks(file, "a", "a test"))
    assert b"".join(blocks) == content
    assert all(block.endswith(b"\n") for block in blocks[:-1])
    lines = [line for block in blocks for line in text_lines(block)]
    assert lines == ["a\n", "ß\n", "\n", "last\ufffd"]
    assert not file.closed


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "_LONGEST_LINE", 100)
    monkeypatch.setattr(user_files, "_BLOCK_BYTES", 50)
    blocks = line_blocks(io.BytesIO(b"short\n" + bytes(10**6)), "a", "a test")
    assert next(blocks) == b"short\n"
    with pytest.raises(UserError, match="a line of over 100 bytes"):
        next(blocks)
