"""Packed rows of real text, the split, and the read position."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import TokenRows, make_iterator, split_documents, split_row


def config(**keys: object) -> Config:
    return pyconfig.from_mapping({}, overrides={"max_target_length": 8, **keys})


def iterator(config: Config, split: str = "train", **options: int):
    return make_iterator(
        config, split=split, **{"rows_per_process": 2, "accumulation": 1, **options}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / f"doc{i}.txt").write_bytes(bytes([65 + i]) * 30)
    return tmp_path


def test_a_row_is_split_at_the_documents() -> None:
    row = split_row(np.frombuffer(b"ab\0cde", np.uint8))
    assert row["inputs"].tolist() == [97, 98, 0, 99, 100]
    assert row["targets"].tolist() == [98, 0, 99, 100, 101]
    assert row["inputs_position"].tolist() == [0, 1, 2, 0, 1]
    assert row["inputs_segmentation"].tolist() == [1, 1, 1, 2, 2]
    # The separator (third input) cannot know what document comes next.
    assert row["targets_weight"].tolist() == [1, 1, 0, 1, 1]


def test_rows_cover_the_text_and_overlap_by_one_token() -> None:
    rows = TokenRows(np.arange(10, dtype=np.uint8), length=3)
    assert [rows[i].tolist() for i in range(len(rows))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    # One document of 65 bytes is 64 inputs + 1: eight rows of 8, four batches of two.
    (tmp_path / "a.txt").write_bytes(bytes(range(60, 125)))
    data = iterator(config(dataset_path=str(tmp_path), eval_fraction=0))
    batches = [next(data)["inputs"][0, :, 0].tolist() for _ in range(8)]
    first, second = np.concatenate(batches[:4]).tolist(), np.concatenate(batches[4:]).tolist()
    assert sorted(first) == sorted(second) == [60 + 8 * i for i in range(8)]
    assert first != second


def _letters(data) -> set[int]:
    return {int(t) for _ in range(400) for t in np.unique(next(data)["inputs"])} - {0}


def test_batches_of_one_row_have_no_end() -> None:
    one = iterator(config(dataset_type="synthetic"), rows_per_process=1)
    two = iterator(config(dataset_type="synthetic"), rows_per_process=2)
    rows = [next(one)["inputs"][0, 0].tolist() for _ in range(2)]
    assert rows == next(two)["inputs"][0].tolist()


@pytest.mark.full
def test_train_and_eval_share_no_document(folder: Path) -> None:
    options = config(dataset_path=str(folder), eval_fraction=0.3)
    train, evaluation = _letters(iterator(options)), _letters(iterator(options, "eval"))
    assert train
    assert evaluation
    assert not train & evaluation
    assert train | evaluation == {65 + i for i in range(20)}


def test_a_single_document_is_cut_in_two() -> None:
    assert split_documents({"a": b"0123456789"}, 0.2) == ([b"01234567"], [b"89"])


@pytest.mark.parametrize("data", ["text", "synthetic"])
def test_the_read_position_restores_the_sequence(data: str) -> None:
    first = iterator(config(dataset_type=data))
    for _ in range(3):
        next(first)
    state = first.get_state()
    expected = [next(first) for _ in range(3)]
    assert state == {"next_index": 3}  # also in checkpoints of synthetic runs that had grain
    second = iterator(config(dataset_type=data))
    second.set_state(state)
    for batch in expected:
        got = next(second)
        for key, value in batch.items():
            np.testing.assert_array_equal(got[key], value)


def test_only_files_need_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)
    assert next(iterator(config(dataset_type="synthetic")))["inputs"].shape == (1, 2, 8)
    with pytest.raises(UserError, match="dataset_type=text, unlike synthetic, needs"):
        iterator(config())


def test_processes_share_out_the_rows() -> None:
    whole = [next(iterator(config(dataset_type="synthetic"), "eval", rows_per_process=4))]
    parts = [
        next(
            make_iterator(
                config(dataset_type="synthetic"),
                split="eval",
                rows_per_process=2,
                accumulation=1,
                share=i,
                shares=2,
            )
        )
        for i in range(2)
    ]
    rows = {row.tobytes() for part in parts for row in part["inputs"][0]}
    assert rows == {row.tobytes() for row in whole[0]["inputs"][0]}


def test_synthetic_tokens_are_in_the_vocabulary_and_differ_between_rows() -> None:
    batch = next(iterator(config(dataset_type="synthetic", vocab_size=50)))
    assert batch["inputs"].shape == (1, 2, 8)
    assert 1 <= batch["inputs"].min() <= batch["inputs"].max() < 50
    assert batch["inputs"][0, 0].tolist() != batch["inputs"][0, 1].tolist()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dataset_path": "/nowhere/at/all"}, "is not a folder"),
        ({"dataset_suffixes": (".none",)}, "holds no text files"),
        ({"vocab_size": 100}, "at least 256"),
        ({"max_target_length": 1 << 30}, "sequences of 1073741824 tokens"),
    ],
)
def test_missing_or_small_data_is_named(keys: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        iterator(config(**keys))
