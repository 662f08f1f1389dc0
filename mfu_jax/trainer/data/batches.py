"""Batches of packed byte-level documents, read through grain, or of random tokens.

The iterator's `get_state()` and `set_state()` get and set its read position, for checkpoints.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.layers.families import model_spec
from mfu_jax.trainer.config.messages import wrong
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.preferences import preference_pair
from mfu_jax.util.formatting import counted
from mfu_jax.util.optional_deps import TRAIN, require

_TEXT_KEYS = (
    "inputs",
    "targets",
    "inputs_position",
    "inputs_segmentation",
    "targets_weight",
)


def row_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one sequence of a batch."""
    text = jax.ShapeDtypeStruct((config.max_target_length,), jnp.int32)
    rows = dict.fromkeys(_TEXT_KEYS, text)
    if config.images_per_sequence:
        pixels = jax.ShapeDtypeStruct(image_shape(config), jnp.uint8)
        rows |= {"images": pixels, "inputs_image": text}
    return rows


_Split = Callable[[np.ndarray], dict[str, np.ndarray]]
# Ends a document; the byte 0 does not occur in text.
SEPARATOR = 0
_PLACEHOLDER = 1  # the token at image positions; not a separator
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"}


class CheckpointableIterator(Protocol):
    """The interface of grain's iterators."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...
    def __next__(self) -> dict[str, np.ndarray]: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class NumberedBatches:
    """Endless batches, each made from its number; the read position is grain's."""

    def __init__(self, make: Callable[[int], dict[str, np.ndarray]]) -> None:
        self._make, self._number = make, 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = self._make(self._number)
        self._number += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The number of the next batch, under the name that grain gives it."""
        return {"next_index": self._number}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a position that `get_state` returned."""
        self._number = state["next_index"]


class TokenRows:
    """A sequence of tokens, cut into rows of `length` + 1 that overlap by one: the last target of a
    row is the first input of the next."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1]


class RandomRows:
    """Endless rows of uniformly random tokens, each determined by its index and the seed."""

    def __init__(self, vocab_size: int, length: int, seed: int) -> None:
        self._vocab_size, self._length, self._seed = vocab_size, length, seed

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.default_rng((self._seed, index))
        return generator.integers(1, self._vocab_size, self._length + 1, dtype=np.int32)


def make_iterator(
    config: Config,
    *,
    split: str,
    rows_per_process: int,
    accumulation: int,
    share: int = 0,
    shares: int = 1,
) -> CheckpointableIterator:
    """Endless batches of this process: dicts of int32 [accumulation, rows, sequence], and images.

    Args:
        split: "train", reshuffled in every epoch, or "eval", always in the same order.
        rows_per_process: sequences of one micro-batch that this process feeds.
        share, shares: this process feeds every `shares`-th sequence, starting at `share`.

    Raises:
        UserError: the data is missing or too small for one batch, or grain, which reads it.
    """
    rows = _rows(config, split)
    sequences = rows_per_process * accumulation
    batch_rows = sequences // 2 if config.use_dpo else sequences
    cut, of_row = _cut(config), row_shapes(config)

    def shaped(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        to = (accumulation, rows_per_process)
        return {key: v.reshape(*to, *of_row[key].shape) for key, v in batch.items()}

    def numbered(number: int) -> dict[str, np.ndarray]:
        first = number * batch_rows
        own = [rows[(first + i) * shares + share] for i in range(batch_rows)]
        if cut is split_row:
            return shaped(split_row(np.stack(own)))
        parts = [cut(row) for row in own]
        return shaped({key: np.stack([part[key] for part in parts]) for key in of_row})

    if isinstance(rows, RandomRows):  # needs no order of its own
        return NumberedBatches(numbered)
    if len(rows) < batch_rows * shares:
        raise UserError(
            f"the {split} split has {counted(len(rows), 'sequence')} of {config.max_target_length} "
            f"tokens, a batch takes {batch_rows * shares}",
            hint="add data, or make batch or sequences smaller",
        )
    grain = require("grain", "dataset_type=text, unlike synthetic,", install=TRAIN)
    dataset = grain.MapDataset.source(rows)
    if split == "train":
        dataset = dataset.seed(config.seed).shuffle()
    dataset = dataset[share::shares].repeat().map(cut).batch(batch_rows, drop_remainder=True)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(dataset.map(shaped).to_iter_dataset(options))


def _cut(config: Config) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """The function that turns a row of tokens into a sequence, or a pair."""
    split: Callable[[np.ndarray], dict[str, np.ndarray]] = split_row
    if config.use_dpo:
        split = functools.partial(preference_pair, images=image_tokens(config))
    return with_images(config, split) if config.images_per_sequence else split


def split_row(row: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of S + 1 packed tokens → inputs, targets, positions and segments; each int32 […, S].

    Positions count from 0 in each document, segments from 1 in each row. The separator belongs to
    the document that it ends, and its target has weight 0.

    >>> row = split_row(np.array([7, 8, 0, 9, 9]))
    >>> row["inputs_segmentation"].tolist(), row["inputs_position"].tolist()
    ([1, 1, 1, 2], [0, 1, 2, 0])
    >>> row["targets_weight"].tolist()
    [1, 1, 0, 1]
    """
    row = row.astype(np.int32)
    inputs, targets = row[..., :-1], row[..., 1:]
    ends = inputs == SEPARATOR
    first_of_document = np.ones(ends.shape, bool)
    first_of_document[..., 1:] = ends[..., :-1]
    index = np.arange(inputs.shape[-1], dtype=np.int32)
    start = np.maximum.accumulate(np.where(first_of_document, index, 0), axis=-1)
    return {
        "inputs": inputs,
        "targets": targets,
        "inputs_position": (index - start).astype(np.int32),
        "inputs_segmentation": np.cumsum(first_of_document, axis=-1, dtype=np.int32),
        "targets_weight": (~ends).astype(np.int32),
    }


def _rows(config: Config, split: str) -> TokenRows | RandomRows:
    if config.dataset_type == "synthetic":
        seed = config.seed + (split == "eval")
        return RandomRows(config.vocab_size, config.max_target_length, seed)
    if config.vocab_size < 256:
        raise wrong(config, "dataset_type vocab_size", "text gives bytes, which need at least 256")
    folder = Path(config.dataset_path or sysconfig.get_paths()["stdlib"])
    documents = _read_documents(folder, config.dataset_suffixes)
    train, evaluation = split_documents(documents, config.eval_fraction)
    texts = train if split == "train" else evaluation
    joined = b"".join(text + bytes([SEPARATOR]) for text in texts)
    return TokenRows(np.frombuffer(joined, np.uint8), config.max_target_length)


def split_documents(
    documents: dict[str, bytes], eval_fraction: float
) -> tuple[list[bytes], list[bytes]]:
    """Splits whole documents by a hash of their names, so that new files do not move others.

    A single document is cut in two.
    """
    if len(documents) == 1:
        (text,) = documents.values()
        cut = round(len(text) * (1 - eval_fraction))
        return [text[:cut]], [text[cut:]]
    by_hash = sorted(documents, key=lambda name: zlib.crc32(name.encode()))
    held_out = {n for n in by_hash if zlib.crc32(n.encode()) < eval_fraction * 2**32}
    if not held_out and eval_fraction:
        held_out = {by_hash[0]}
    train = [text for name, text in documents.items() if name not in held_out]
    return train, [text for name, text in documents.items() if name in held_out]


@functools.lru_cache(maxsize=1)  # both splits share one read
def _read_documents(folder: Path, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    if not folder.is_dir():
        raise UserError(
            f"dataset_path={str(folder)!r} is not a folder",
            hint="pass one with text files, or leave it empty for Python's standard library",
        )
    documents = {}
    for path in sorted(_files(folder, suffixes)):
        try:
            text = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        if text and SEPARATOR not in text:
            documents[path.relative_to(folder).as_posix()] = text
    if not documents:
        raise UserError(
            f"dataset_path={str(folder)!r} holds no text files that end in {' '.join(suffixes)}",
            hint="pass another folder, or other dataset_suffixes=[.txt,…]",
        )
    return documents


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below a folder with one of the suffixes; skipped folders are not even listed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        yield from (Path(parent, name) for name in names if Path(name).suffix in suffixes)


def image_shape(config: Config) -> tuple[int, ...]:
    """The images of a sequence: [images × tiles, height, width, channels]."""
    spec = model_spec(config).vision
    if spec is None:
        return ()
    tiles = config.images_per_sequence * max(config.tiles_per_image, 1)
    return tiles, *spec.sides, spec.channels


def image_tokens(config: Config) -> int:
    """Image tokens per sequence.

    Raises:
        UserError: they leave no text.
    """
    spec = model_spec(config).vision
    tokens = image_shape(config)[0] * spec.tokens if spec is not None else 0
    if tokens >= config.max_target_length:
        problem = f"images make {tokens} tokens of each sequence; expected fewer"
        raise wrong(config, "images_per_sequence max_target_length", problem)
    return tokens


def with_images(config: Config, split: _Split) -> _Split:
    """`split` for rows of S + 1 tokens that begin with images, whose pixels are random.

    Both sequences of a pair have the same images.

    The first document of a row becomes the text after the images; among image tokens, only the
    last has a target.

    Returns:
        A function whose result also has ``images`` (bytes, of `image_shape`) and
        ``inputs_image`` (see `Images.places`; int32 [S]).
    """
    count, shape = image_tokens(config), image_shape(config)

    def cut(row: np.ndarray) -> dict[str, np.ndarray]:
        pixels = np.random.default_rng(zlib.crc32(row.tobytes())).integers(
            0, 256, shape, dtype=np.uint8
        )
        row = row.copy()
        row[:count] = _PLACEHOLDER
        found = split(row)
        *pair, length = found["inputs"].shape
        found["targets_weight"][..., : count - 1] = 0
        places = np.arange(1, length + 1, dtype=np.int32)
        images = np.broadcast_to(pixels, (*pair, *shape))
        at = np.broadcast_to(np.where(places <= count, places, 0), (*pair, length))
        return {**found, "images": images, "inputs_image": at}

    return cut
